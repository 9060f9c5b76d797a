"""`LLM`: the offline API."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from atom.model_engine.arg_utils import engine_config
from atom.model_engine.llm_engine import LLMEngine
from atom.outputs import RequestOutput
from atom.sampling_params import SamplingParams

# Text; token ids; or a dict with either "prompt" or "prompt_token_ids".
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


class LLM:
    """A model to generate with, in this process.

    Args:
        model: folder, `.gguf` file or hub id; the embedded model when None.
        engine_options: further ones by name, as `atom.config` declares them.

    Raises:
        TypeError: for unknown engine arguments.
        ConfigError: when the model or an option cannot be honoured.
    """

    def __init__(self, model: str | None = None, **engine_options: Any) -> None:
        self.engine = LLMEngine(engine_config(model=model, **engine_options))
        self._request_ids = itertools.count()

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, all in one batch; the results are in the prompts' order.

        Args:
            prompts: one or many; each text, token ids, or a dict as vLLM takes it.
            sampling_params: for all prompts, or one for each; the default is `SamplingParams()`.
            priority: one per prompt; lower runs earlier.

        Raises:
            RequestRefusedError: when a prompt could never run as given; nothing is generated.
        """
        batch = _prompt_list(prompts)
        params = _one_each("sampling_params", sampling_params or SamplingParams(), len(batch))
        priorities = _one_each("priority", priority or 0, len(batch))
        return self._run(list(zip(batch, params, priorities, strict=True)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or many in one batch.

        Raises:
            ValueError: when the model has no chat template and none is given.
            RequestRefusedError: when a prompt could never run as given; nothing is generated.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        prompts = [
            self.render_chat(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def render_chat(self, conversation: Sequence[Message], **template_args: Any) -> list[int]:
        """The token ids of a conversation, rendered by the model's chat template."""
        template_args.setdefault("add_generation_prompt", True)
        text = self.tokenizer.apply_chat_template(conversation, tokenize=False, **template_args)
        # The template has written the special tokens already.
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding what is new after each step.

        Leaving the iterator early aborts the request.
        """
        request_id = str(next(self._request_ids))
        self.engine.add_request(
            request_id, _content(prompt), sampling_params or SamplingParams(), stream=True
        )
        try:
            while self.engine.has_unfinished:
                yield from self.engine.step()
        finally:
            self.engine.abort(request_id)

    def shutdown(self) -> None:
        self.engine.shutdown()

    def _run(
        self, requests: list[tuple[Prompt, SamplingParams, int]], use_tqdm: bool
    ) -> list[RequestOutput]:
        ids = [str(next(self._request_ids)) for _ in requests]
        results: dict[str, RequestOutput] = {}
        try:
            for request_id, (prompt, params, priority) in zip(ids, requests, strict=True):
                self.engine.add_request(request_id, _content(prompt), params, priority=priority)
            with tqdm(total=len(ids), desc="Prompts", disable=not use_tqdm) as progress:
                while self.engine.has_unfinished:
                    for output in self.engine.step():
                        results[output.request_id] = output
                        progress.update()
        finally:
            for request_id in set(ids) - set(results):
                self.engine.abort(request_id)
        return [results[request_id] for request_id in ids]


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _content(prompt: Prompt) -> str | list[int]:
    """The text or the token ids of a prompt.

    Raises:
        TypeError: when it is neither.
    """
    value: Any = prompt
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not {"prompt", "prompt_token_ids"} & set(prompt):
            raise TypeError(
                f"a prompt dict holds either 'prompt' or 'prompt_token_ids', got {sorted(prompt)}"
            )
        value = next(iter(prompt.values()))
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not all(type(t) is int for t in value):
        raise TypeError(f"a prompt is text or token ids, got {value!r}")
    return list(value)


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{len(value)} {name} were given for {count} prompts")
    return list(value)
