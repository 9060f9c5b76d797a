"""`/v1/completions`: prompts in four shapes, `echo`, and the choices' spelling."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from atom.entrypoints.chat.constraint import constraint_names
from atom.entrypoints.chat.generation import Choice, Generation, deadline_of
from atom.entrypoints.chat.logprobs import CompletionLogprobs, prompt_logprobs
from atom.entrypoints.chat.params import check_stream_fields, sampling_params, usage_chunks
from atom.entrypoints.chat.prompt import Prompt
from atom.entrypoints.chat.protocol import CompletionRequest
from atom.entrypoints.chat.tokenization import PromptEncoder
from atom.entrypoints.http.errors import ApiError, bad_request
from atom.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from atom.quoting import quote
from atom.sampling_params import SamplingParams
from atom.text.detokenizer import Vocabulary
from atom.text.prepared_params import PreparedParams
from atom.text.sequence_state import spelled_tokens

# Of one HTTP request; each is a sequence that waits in the engine's queue.
MAX_CHOICES = 1024


def prepare_completion(
    body: CompletionRequest, model: str, encoder: PromptEncoder, defaults: Mapping[str, Any]
) -> Generation:
    """Tokenise and validate.

    Args:
        defaults: the model's sampling parameters.

    Raises:
        ApiError: 400 for what cannot be generated as asked.
    """
    check_stream_fields(body)
    params = _params(body, defaults)
    given = parse_prompts(body.prompt)
    if len(given) * params.n > MAX_CHOICES:
        raise bad_request(
            f"{len(given)} prompts with n={params.n} make more than {MAX_CHOICES} choices; "
            f"send several requests",
            "prompt",
        )
    prompts = [
        encoder.encode(
            item, add_special_tokens=body.add_special_tokens is not False, param="prompt"
        )
        if isinstance(item, str)
        else Prompt(item)
        for item in given
    ]
    return Generation(
        id=f"cmpl-{uuid.uuid4().hex}",
        model=model,
        created=int(time.time()),
        prompts=prompts,
        params=PreparedParams(params),
        priority=body.priority or 0,
        deadline=deadline_of(body.timeout),
        cache_salt=body.cache_salt or "",
        stream=bool(body.stream),
        usage=usage_chunks(body),
        echoes=bool(body.echo),
        field_names=constraint_names(body),
    )


def parse_prompts(prompt: Any) -> list[str | list[int]]:
    """A string, strings, token ids or lists of token ids, as a list of prompts.

    Raises:
        ApiError: 400 for anything else.
    """
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(item) is str for item in prompt):
            return prompt
        if _is_token_ids(prompt):
            return [prompt]
        if all(isinstance(item, list) and _is_token_ids(item) for item in prompt):
            return prompt
    raise bad_request(
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of "
        "token ids, and not be empty",
        "prompt",
        "invalid_type",
    )


def _is_token_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def _params(body: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise _unsupported_best_of(body)
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens must be at least 1 without echo, got 0", "max_tokens")
    return sampling_params(
        body,
        {},
        defaults,
        max_tokens=body.max_tokens,
        least_tokens=0,
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
    )


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    if not body.echo or body.logprobs is None:
        return body.prompt_logprobs
    return max(body.logprobs, body.prompt_logprobs or 0)


def _unsupported_best_of(body: CompletionRequest) -> ApiError:
    return bad_request(
        f"best_of={quote(body.best_of)} is not supported; leave it out or equal to n "
        f"({quote(body.n or 1)})",
        "best_of",
        "unsupported_field",
    )


class CompletionFormat:
    """Choices of a text completion."""

    response_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, body: CompletionRequest, encoder: PromptEncoder, vocabulary: Vocabulary
    ) -> None:
        self._echo = bool(body.echo)
        self._num_logprobs = body.logprobs
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._skip_special_tokens = body.skip_special_tokens is not False
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        self._kept = spelled_tokens(vocabulary, stops)
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._logprobs: dict[int, CompletionLogprobs] = {}
        # Of each engine request: only its first output brings them, before some choices open.
        self._prompt_logprobs: dict[str, list[PositionLogprobs | None] | None] = {}

    def open(self, index: int, prompt: Prompt, request: RequestOutput) -> Choice | None:
        if not self._echo:
            return None
        positions = self._prompt_logprobs.setdefault(request.request_id, request.prompt_logprobs)
        text = self._prompt_text(prompt)
        return {
            "index": index,
            "text": text,
            "logprobs": self._format_logprobs(index, request.prompt_token_ids, positions, text),
            "finish_reason": None,
        }

    def delta(self, index: int, output: CompletionOutput) -> list[Choice]:
        choice = self._choice(index, output)
        has_logprobs = choice["logprobs"] is not None and output.token_ids
        return [choice] if output.text or output.finish_reason or has_logprobs else []

    def whole(
        self, index: int, prompt: Prompt, request: RequestOutput, output: CompletionOutput
    ) -> Choice:
        opening = self.open(index, prompt, request)
        choice = self._choice(index, output)
        if opening is not None:
            choice["text"] = opening["text"] + choice["text"]
            choice["logprobs"] = _joined(opening["logprobs"], choice["logprobs"])
        if self._wants_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(request.prompt_logprobs)
        return choice

    def _choice(self, index: int, output: CompletionOutput) -> Choice:
        choice = {
            "index": index,
            "text": output.text,
            "logprobs": self._format_logprobs(index, output.token_ids, output.logprobs),
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        return choice

    def response_fields(self, requests: list[RequestOutput]) -> dict[str, Any]:
        del requests
        return {}

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._encoder.decode(prompt.token_ids, skip_special_tokens=self._skip_special_tokens)

    def _format_logprobs(
        self,
        index: int,
        token_ids: list[int],
        positions: Sequence[PositionLogprobs | None] | None,
        prompt: str | None = None,
    ) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        columns = self._logprobs.get(index)
        if columns is None:
            columns = self._logprobs[index] = CompletionLogprobs(
                self._vocabulary, self._num_logprobs, self._skip_special_tokens, self._kept
            )
        return columns.format(token_ids, positions or [], prompt)


def _joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    if first is None or second is None:
        return None
    return {name: first[name] + second[name] for name in first}
