"""Sets of tools, and what a user asks of them, made from seeds as vendors' verifiers have them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

_VERBS = ("get", "set", "find", "list", "create", "delete", "update", "send", "book", "convert")
_NOUNS = ("weather", "mail", "flight", "user", "invoice", "file", "route", "event", "price", "note")
_KEYS = (
    "city",
    "days",
    "unit",
    "limit",
    "query",
    "tags",
    "start",
    "end",
    "amount",
    "email",
    "größe",
    "path",
    "recursive",
    "filters",
    "priority",
    "标题",
)
_WORDS = (
    "Paris",
    "urgent",
    "report.pdf",
    "北京",
    "blue",
    "Zoë",
    "a\tb",
    'say "hi"',
    "C:\\tmp",
    "5",
)
_UNITS = (["celsius", "fahrenheit"], ["low", "normal", "high"], ["asc", "desc"], [1, 2, 5])


@dataclass(frozen=True)
class ToolRequest:
    """Attributes:
    tools: in OpenAI's shape.
    ask: what the user says, which names a tool and what it needs.
    wants: how many calls that takes.
    """

    tools: list[dict[str, Any]]
    ask: str
    wants: int


def tool_request(number: int) -> ToolRequest:
    """One to eight tools, some with names that are nearly alike, and one or two calls to make."""
    rng = random.Random(f"tools {number}")
    names = [f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}" for _ in range(rng.choice((1, 2, 3, 5)))]
    names += [
        f"{name}{suffix}" for name in names[:2] for suffix in rng.choice(((), ("s",), ("_v2",)))
    ]
    tools = [_tool(rng, name) for name in dict.fromkeys(names)]
    called = rng.sample(tools, min(rng.choice((1, 1, 2)), len(tools)))
    parts = [_ask(rng, tool["function"]) for tool in called]
    return ToolRequest(tools, " Then ".join(parts), len(called))


def _tool(rng: random.Random, name: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": f"Use it to {name.replace('_', ' ')}."}
    if rng.random() < 0.9:
        function["parameters"] = _object(rng, depth=0)
    return {"type": "function", "function": function}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    keys = rng.sample(_KEYS, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: _value(rng, depth) for key in keys},
        "required": [key for key in keys if rng.random() < 0.6],
    }
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "enum", "array", "nullable", "bounded"]
    kinds += ["object"] * (depth < 2)
    match rng.choice(kinds):
        case "enum":
            return {"enum": rng.choice(_UNITS)}
        case "array":
            return {"type": "array", "items": _value(rng, 2), "maxItems": 4}
        case "nullable":
            return {"anyOf": [{"type": rng.choice(("integer", "string"))}, {"type": "null"}]}
        case "bounded":
            return {"type": "integer", "minimum": 0, "maximum": rng.choice((10, 365))}
        case "object":
            return _object(rng, depth + 1)
        case kind:
            return {"type": kind, "description": f"The {kind}\nto use."}


def _ask(rng: random.Random, function: dict[str, Any]) -> str:
    schema = function.get("parameters") or {}
    given = [
        f"{key} {_example(rng, schema['properties'][key])}" for key in schema.get("required", ())
    ]
    return f"Call {function['name']}" + (f" with {', '.join(given)}." if given else ".")


def _example(rng: random.Random, schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return str(rng.choice(schema["enum"]))
    if "anyOf" in schema:
        return "null"
    match schema["type"]:
        case "integer" | "number":
            return str(rng.randint(0, 10))
        case "boolean":
            return rng.choice(("true", "false"))
        case "array":
            return f"[{_example(rng, schema['items'])}]"
        case "object":
            required = schema["required"]
            return (
                "{"
                + ", ".join(f"{k}: {_example(rng, schema['properties'][k])}" for k in required)
                + "}"
            )
        case _:
            return rng.choice(_WORDS)
