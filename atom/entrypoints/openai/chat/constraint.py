"""What a request says its text must look like, in every spelling that clients use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from atom.entrypoints.openai.chat.protocol import (
    GenerationRequest,
    ResponseFormat,
    StructuredOutputsFields,
)
from atom.entrypoints.openai.http.errors import MAX_MESSAGE, bad_request
from atom.quoting import excerpt
from atom.structured_output.outputs_params import StructuredOutputsParams
from atom.structured_output.params import StructuredOutput

_GUIDED: dict[str, Callable[[Any], StructuredOutput]] = {
    "guided_json": StructuredOutput.json_schema,
    "guided_regex": StructuredOutput.regex,
    "guided_choice": StructuredOutput.choice,
    "guided_grammar": StructuredOutput.ebnf,
}
# SGLang's; empty ones ask for nothing.
_OF_SGLANG: dict[str, Callable[[Any], StructuredOutput]] = {
    "json_schema": StructuredOutput.json_schema,
    "regex": StructuredOutput.regex,
    "ebnf": StructuredOutput.ebnf,
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
    if body.response_format is not None and body.response_format.type != "text":
        given["response_format"] = partial(_response_format, body.response_format)
    for name, build in _GUIDED.items():
        if (value := getattr(body, name)) is not None:
            given[name] = partial(build, value)
    for name, build in _OF_SGLANG.items():
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
    if format.type == "json_object":
        if format.json_schema is not None:
            raise ValueError("json_schema is for the type 'json_schema'")
        return StructuredOutput.json_object()
    if format.json_schema is None:
        raise ValueError("the type 'json_schema' needs json_schema, with a schema")
    return StructuredOutput.json_schema(format.json_schema.schema_)
