"""What a request says its text must look like, in the two spellings that clients use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from atom.entrypoints.openai.chat.protocol import GenerationRequest, ResponseFormat
from atom.entrypoints.openai.http.errors import MAX_MESSAGE, bad_request
from atom.quoting import excerpt
from atom.structured_output.params import StructuredOutput


@dataclass(frozen=True)
class Constraint:
    """`field` is the request's field that asks for `value`."""

    field: str
    value: StructuredOutput


def constraint_of(body: GenerationRequest) -> Constraint | None:
    """The constraint of a request; None when its text is free.

    Raises:
        ApiError: 400 for several constraints, or one that is malformed or cannot be enforced.
    """
    given = _given(body)
    if not given:
        return None
    if len(given) > 1:
        names = ", ".join(given)
        raise bad_request(f"{names} constrain the same text; send one", list(given)[1])
    [(field, build)] = given.items()
    try:
        return Constraint(field, build())
    except ValueError as error:
        message = str(error).removeprefix("structured_output: ")
        raise bad_request(f"{field}: {excerpt(message, MAX_MESSAGE)}", field) from error


def constraint_names(body: GenerationRequest) -> dict[str, str]:
    """What the engine calls `structured_output`, by the request's own name."""
    given = list(_given(body))
    return {"structured_output": given[0]} if given else {}


def _given(body: GenerationRequest) -> dict[str, Callable[[], StructuredOutput]]:
    given: dict[str, Callable[[], StructuredOutput]] = {}
    if body.response_format is not None and body.response_format.type != "text":
        given["response_format"] = partial(_response_format, body.response_format)
    if body.guided_json is not None:
        given["guided_json"] = partial(StructuredOutput.json_schema, body.guided_json)
    if body.guided_regex is not None:
        given["guided_regex"] = partial(StructuredOutput.regex, body.guided_regex)
    if body.guided_choice is not None:
        given["guided_choice"] = partial(StructuredOutput.choice, body.guided_choice)
    if body.guided_grammar is not None:
        given["guided_grammar"] = partial(StructuredOutput.ebnf, body.guided_grammar)
    return given


def _response_format(format: ResponseFormat) -> StructuredOutput:
    if format.type == "json_object":
        if format.json_schema is not None:
            raise ValueError("json_schema is for the type 'json_schema'")
        return StructuredOutput.json_object()
    if format.json_schema is None:
        raise ValueError("the type 'json_schema' needs json_schema, with a schema")
    return StructuredOutput.json_schema(format.json_schema.schema_)
