"""`/v1/chat/completions`: messages through the template, and the choices' spelling."""

from __future__ import annotations

import time
import uuid
from typing import Any

from atom.entrypoints.detokenizer import Vocabulary
from atom.entrypoints.openai.errors import bad_request
from atom.entrypoints.openai.generation import Choice, Generation
from atom.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from atom.entrypoints.openai.params import check_stream_fields, includes_usage, sampling_params
from atom.entrypoints.openai.protocol import ChatCompletionRequest
from atom.entrypoints.openai.tokenization import Prompt, PromptEncoder
from atom.outputs import CompletionOutput, RequestOutput
from atom.sampling_params import SamplingParams


async def prepare_chat(
    body: ChatCompletionRequest, model: str, encoder: PromptEncoder
) -> Generation:
    """Render, tokenise and validate.

    Raises:
        ApiError: 400 for what cannot be generated as asked.
    """
    check_stream_fields(body)
    field_names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        field_names["max_tokens"] = "max_completion_tokens"
    params = _params(body, field_names)
    prompt = await encoder.encode_chat(body, add_special_tokens=bool(body.add_special_tokens))
    return Generation(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        model=model,
        created=int(time.time()),
        prompts=[prompt],
        params=[params],
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        stream=bool(body.stream),
        include_usage=includes_usage(body),
        field_names=field_names,
    )


def _params(body: ChatCompletionRequest, field_names: dict[str, str]) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise bad_request(
            f"max_completion_tokens ({newer}) and max_tokens ({older}) are one limit; send one",
            "max_completion_tokens",
        )
    return sampling_params(
        body,
        field_names,
        max_tokens=older if newer is None else newer,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


class ChatFormat:
    """Choices of a chat completion."""

    response_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatCompletionRequest, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        self._wants_prompt_logprobs = body.prompt_logprobs is not None

    def open(self, index: int, prompt: Prompt, request: RequestOutput) -> Choice | None:
        del prompt, request
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def delta(self, index: int, output: CompletionOutput) -> Choice | None:
        logprobs = self._format_logprobs(output)
        if not (output.text or output.finish_reason or logprobs):
            return None
        choice = {
            "index": index,
            "delta": {"content": output.text} if output.text or logprobs else {},
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        return choice

    def whole(
        self, index: int, prompt: Prompt, request: RequestOutput, output: CompletionOutput
    ) -> Choice:
        del prompt, request
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._format_logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def response_fields(self, requests: list[RequestOutput]) -> dict[str, Any]:
        if not self._wants_prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs(requests[0].prompt_logprobs)}

    def _format_logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if self._num_top is None or not output.logprobs:
            return None
        return chat_logprobs(self._vocabulary, self._num_top, output.token_ids, output.logprobs)
