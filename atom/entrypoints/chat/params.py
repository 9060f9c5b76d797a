"""From a request's fields to what the engine takes: the only conversion there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atom.entrypoints.chat.constraint import constraint_of
from atom.entrypoints.chat.generation import UsageChunks
from atom.entrypoints.chat.protocol import GenerationRequest
from atom.entrypoints.http.errors import bad_request, invalid_parameters
from atom.quoting import quote
from atom.sampling_params import SamplingParams

# Named alike, and meaning the same, in requests and in `SamplingParams`; a limit is resolved first
# and a constraint converted.
SHARED_FIELDS = frozenset(
    {*SamplingParams.__struct_fields__}
    & GenerationRequest.model_fields.keys() - {"max_tokens", "structured_outputs"}
)


def sampling_params(
    body: GenerationRequest,
    field_names: Mapping[str, str],
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    least_tokens: int = 1,
    **overrides: Any,
) -> SamplingParams:
    """The request's parameters.

    Args:
        field_names: the request's names of fields that `SamplingParams` calls otherwise.
        defaults: the model's, for what the request leaves out.
        max_tokens: None means up to the end of the context.
        least_tokens: what `max_tokens` has to be at least.
        overrides: instead of the request's fields; None leaves the default.

    Raises:
        ApiError: 400 that names the impossible field.
    """
    constraint = constraint_of(body)
    values = dict(defaults)
    values |= body.model_dump(include=set(SHARED_FIELDS - overrides.keys()), exclude_none=True)
    if values.get("stop") in ("", []):  # asks for nothing
        del values["stop"]
    values.update({name: value for name, value in overrides.items() if value is not None})
    if constraint is not None:
        values["structured_output"] = constraint.value
    for name in ("logprobs", "prompt_logprobs"):
        if (wanted := values.get(name)) is not None and wanted < 0:
            named = field_names.get(name, name)
            raise bad_request(f"{named} must be at least 0, got {quote(wanted)}", named)
    if max_tokens is not None and max_tokens < least_tokens:
        named = field_names.get("max_tokens", "max_tokens")
        raise bad_request(f"{named} must be at least {least_tokens}, got {max_tokens}", named)
    try:
        return SamplingParams(max_tokens=max_tokens, **values)
    except ValueError as error:
        raise invalid_parameters(error, field_names) from None


def check_stream_fields(body: GenerationRequest) -> None:
    """Refuse what has a meaning only without `stream`, or only with it."""
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs cannot be streamed", "prompt_logprobs")
    asked = body.stream_options
    if not body.stream and asked is not None and asked.include_speculation:
        name = "stream_options.include_speculation"
        raise bad_request(f"{name} has a meaning only with stream=true", name)


def usage_chunks(body: GenerationRequest) -> UsageChunks:
    """Which chunks of a stream hold the usage; without `stream` every answer does."""
    asked = body.stream_options
    if asked is None:
        return UsageChunks()
    return UsageChunks(
        bool(asked.include_usage),
        bool(asked.continuous_usage_stats),
        bool(asked.include_speculation),
    )
