"""Twenty schemas of the kind that applications ask for, each with a request."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 9999}
_FLAG: Schema = {"type": "boolean"}


def _short(most: int) -> Schema:
    return {"type": "string", "maxLength": most}


def _one_of(*names: str) -> Schema:
    return {"enum": [*names]}


def _list(items: Schema, most: int) -> Schema:
    return {"type": "array", "items": items, "maxItems": most}


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_ADDRESS = _object(street=_TEXT, city=_TEXT, postal_code=_short(10), country=_TEXT)
_ITEM = _object(description=_TEXT, quantity=_COUNT, unit_price=_NUMBER)

# (what is asked for, the schema of the answer)
REQUESTS: list[tuple[str, Schema]] = [
    (
        "Extract the person: Maria Lopez, 34, is a nurse from Valencia and speaks three languages.",
        _object(first_name=_TEXT, last_name=_TEXT, age=_COUNT, occupation=_TEXT, home_town=_TEXT),
    ),
    (
        "Is this review positive? 'The battery died after two days and nobody answered my mails.'",
        _object(
            sentiment=_one_of("positive", "neutral", "negative"),
            confidence=_NUMBER,
            reason=_short(80),
        ),
    ),
    (
        "Get the weather in Paris tomorrow.",
        _object(
            name=_one_of("get_weather"),
            arguments=_object(
                location=_TEXT, date=_TEXT, unit=_one_of("celsius", "fahrenheit"), hourly=_FLAG
            ),
        ),
    ),
    (
        "Make up an address in Germany.",
        _object(name=_TEXT, address=_ADDRESS, is_business=_FLAG),
    ),
    (
        "Write an invoice for two chairs and one table.",
        _object(
            invoice_number=_short(12),
            customer_name=_TEXT,
            items=_list(_ITEM, 3),
            total_amount=_NUMBER,
            currency=_one_of("EUR", "USD", "GBP"),
        ),
    ),
    (
        "Give me a recipe for pancakes.",
        _object(
            title=_TEXT,
            servings=_COUNT,
            preparation_minutes=_COUNT,
            ingredients=_list(_object(name=_TEXT, amount=_TEXT), 4),
            difficulty=_one_of("easy", "medium", "hard"),
        ),
    ),
    (
        "Plan a meeting about the budget for next Tuesday.",
        _object(
            event_title=_TEXT,
            start_time=_TEXT,
            duration_minutes=_COUNT,
            participants=_list(_TEXT, 3),
            is_recurring=_FLAG,
        ),
    ),
    (
        "Classify this ticket: 'I cannot log in since the update, the page stays white.'",
        _object(
            category=_one_of("account", "billing", "bug", "question"),
            priority=_one_of("low", "normal", "high", "urgent"),
            summary=_short(100),
            needs_human=_FLAG,
        ),
    ),
    (
        "Describe the film Casablanca.",
        _object(
            title=_TEXT,
            release_year={"type": "integer", "minimum": 1900, "maximum": 2100},
            director=_TEXT,
            genres=_list(_TEXT, 3),
            rating=_NUMBER,
            sequel={"anyOf": [{"type": "null"}, _TEXT]},
        ),
    ),
    (
        "Make up a product for a kitchen shop.",
        _object(
            product_name=_TEXT,
            price=_NUMBER,
            in_stock=_FLAG,
            tags=_list(_short(15), 4),
            dimensions=_object(width=_NUMBER, height=_NUMBER, depth=_NUMBER),
        ),
    ),
    (
        "List the three largest cities of Japan.",
        _list(_object(city=_TEXT, country=_TEXT, population=_COUNT), 3),
    ),
    (
        "Search the orders of customer 4711 that were shipped last month.",
        _object(
            tool_name=_one_of("search_orders"),
            parameters=_object(
                customer_id=_COUNT,
                status=_one_of("open", "shipped", "cancelled"),
                from_date=_TEXT,
                to_date=_TEXT,
                max_results=_COUNT,
            ),
        ),
    ),
    (
        "What are the facts in: 'Water boils at 100 degrees at sea level, lower in the mountains.'",
        _object(facts=_list(_object(statement=_TEXT, is_certain=_FLAG), 3)),
    ),
    (
        "Make a quiz question about the solar system.",
        _object(
            question=_TEXT,
            choices=_list(_object(label=_one_of("A", "B", "C", "D"), text=_TEXT), 4),
            correct_label=_one_of("A", "B", "C", "D"),
            explanation=_short(120),
        ),
    ),
    (
        "Summarise: 'The committee met on Monday, agreed on the plan and postponed the vote.'",
        _object(headline=_short(60), summary=_TEXT, keywords=_list(_TEXT, 5), language=_short(2)),
    ),
    (
        "Configure a web server for a small site.",
        _object(
            server_name=_TEXT,
            listen_port=_COUNT,
            enable_https=_FLAG,
            log_level=_one_of("debug", "info", "warning", "error"),
            allowed_origins=_list(_TEXT, 3),
            timeout_seconds=_COUNT,
        ),
    ),
    (
        "Make up a patient who has a cold.",
        _object(
            patient=_object(full_name=_TEXT, date_of_birth=_TEXT, blood_type=_short(3)),
            symptoms=_list(_TEXT, 4),
            diagnosis=_TEXT,
            follow_up_required=_FLAG,
        ),
    ),
    (
        "Translate 'good morning' into French and Spanish.",
        _object(
            source_text=_TEXT,
            translations=_list(
                _object(language_code=_one_of("fr", "es", "de"), translated_text=_TEXT), 2
            ),
        ),
    ),
    (
        "Where is the Eiffel Tower?",
        _object(
            place_name=_TEXT,
            coordinates=_object(latitude=_NUMBER, longitude=_NUMBER),
            city=_TEXT,
            country_code=_short(2),
        ),
    ),
    (
        "Review this function: def add(a, b): return a - b",
        _object(
            has_bug=_FLAG,
            severity=_one_of("none", "minor", "major"),
            line_number=_COUNT,
            explanation=_short(120),
            suggested_fix=_TEXT,
        ),
    ),
]
