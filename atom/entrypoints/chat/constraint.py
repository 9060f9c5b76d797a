"""What a request says its text must look like, in every spelling that clients use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from atom.entrypoints.chat.protocol import (
    GenerationRequest,
    ResponseFormat,
    StructuredOutputsFields,
)
from atom.entrypoints.http.errors import MAX_MESSAGE, bad_request
from atom.quoting import excerpt
from atom.structured_output.outputs_params import StructuredOutputsParams, structural_tag
from atom.structured_output.params import StructuredOutput

_GUIDED: dict[str, Callable[[Any], StructuredOutput]] = {
    "guided_json": StructuredOutput.json_schema,
    "guided_regex": StructuredOutput.regex,
    "guided_choice": StructuredOutput.choice,
    "guided_grammar": StructuredOutput.ebnf,
}
# SGLang's and llama.cpp's; empty ones ask for nothing.
_TOP_LEVEL: dict[str, Callable[[Any], StructuredOutput]] = {
    "json_schema": StructuredOutput.json_schema,
    "regex": StructuredOutput.regex,
    "ebnf": StructuredOutput.ebnf,
    "grammar": StructuredOutput.ebnf,
    "structural_tag": structural_tag,
}


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
    format = body.response_format
    if format is not None and (format.type != "text" or _fields(format)):
        given["response_format"] = partial(_response_format, format)
    for name, build in _GUIDED.items():
        if (value := getattr(body, name)) is not None:
            given[name] = partial(build, value)
    for name, build in _TOP_LEVEL.items():
        if value := getattr(body, name):
            given[name] = partial(build, value)
    if body.structured_outputs is not None:
        given |= _structured_outputs(body.structured_outputs)
    return given


def _structured_outputs(
    asked: StructuredOutputsFields,
) -> dict[str, Callable[[], StructuredOutput]]:
    kinds = asked.model_dump(
        by_alias=True, include={"json_", *StructuredOutputsParams.__struct_fields__}
    )
    return {
        f"structured_outputs.{name}": StructuredOutputsParams(**{name: value}).constraint
        for name, value in kinds.items()
        if value is not None and value is not False
    }


def _response_format(format: ResponseFormat) -> StructuredOutput:
    given = _fields(format)
    wrong = next((name for name in given if format.type not in _OF_TYPES[name]), None)
    if wrong is not None:
        kinds = " or ".join(map(repr, _OF_TYPES[wrong]))
        raise ValueError(f"{wrong} is for the type {kinds}, not {format.type!r}")
    match format.type:
        case "grammar":
            return StructuredOutput.ebnf(_needed(format.grammar, "grammar"))
        case "regex":
            return StructuredOutput.regex(_needed(format.pattern, "pattern"))
        case "structural_tag":
            return structural_tag(given)
    if format.json_schema is not None and format.schema_ is not None:
        raise ValueError("json_schema and schema say the same; send one")
    if format.json_schema is not None:
        return StructuredOutput.json_schema(format.json_schema.schema_)
    if format.schema_ is not None:
        return StructuredOutput.json_schema(format.schema_)
    if format.type == "json_object":
        return StructuredOutput.json_object()
    raise ValueError("the type 'json_schema' needs json_schema, with a schema")


def _fields(format: ResponseFormat) -> dict[str, Any]:
    given = format.model_dump(by_alias=True, exclude_none=True)
    return {name: value for name, value in given.items() if name in _OF_TYPES}


def _needed(value: str | None, name: str) -> str:
    if value is None:
        raise ValueError(f"the type needs {name}")
    return value


# The fields of a response format, and the types that they are for.
_OF_TYPES = {
    "json_schema": ("json_schema",),
    "schema": ("json_object", "json_schema"),
    "grammar": ("grammar",),
    "pattern": ("regex",),
    "format": ("structural_tag",),
    "structures": ("structural_tag",),
    "triggers": ("structural_tag",),
}
