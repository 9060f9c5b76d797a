"""`LLM`: the offline API."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tqdm import tqdm

from atom.messages import RequestFailedError, RequestRefusedError
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.llm_engine import LLMEngine
from atom.model_engine.mailbox import merge
from atom.outputs import RequestOutput
from atom.sampling_params import SamplingParams

# Text; token ids; or a dict with either "prompt" or "prompt_token_ids".
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


class GenerationError(RuntimeError):
    """Some prompts of a call ended with errors of their own; the others have finished.

    Attributes:
        results: in the prompts' order, None where there is an error.
        errors: for each prompt that has no result, by its place in the call.
    """

    def __init__(
        self,
        results: list[RequestOutput | None],
        errors: dict[int, RequestRefusedError | RequestFailedError],
    ) -> None:
        first = min(errors)
        super().__init__(
            f"{len(errors)} of {len(results)} prompts failed; prompt {first}: {errors[first]}"
        )
        self.results = results
        self.errors = errors


@dataclass
class _Mail:
    """What came for a request and waits for its owner: one output at most, since deltas merge."""

    output: RequestOutput | None = None
    error: RequestRefusedError | RequestFailedError | None = None

    def put(self, output: RequestOutput) -> None:
        if self.output is None:
            self.output = output
        else:
            merge(self.output, output)

    def take(self) -> RequestOutput | None:
        """All that came; None when nothing did. Raises the error that came behind it."""
        output, self.output = self.output, None
        if output is None and self.error is not None:
            raise self.error
        return output


class LLM:
    """A model to generate with, in this process.

    Every call and every iterator gets the outputs of its own requests, whichever of them makes
    the engine step; requests of a suspended iterator go on while others are read. One thread uses
    it at a time. Ctrl-C takes effect between two steps, a second one at once; either way the
    engine stays usable.

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
        # Of all requests that were begun and neither finished nor left.
        self._mail: dict[str, _Mail] = {}

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
            GenerationError: when prompts met errors of their own on the way; it has the others'
                results.
            EngineDeadError: when nothing can run any more.
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
            GenerationError, EngineDeadError: as `generate`.
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
        """Complete one prompt, yielding what is new since the last time.

        Leaving the iterator early aborts the request. Several iterators may be read in turns.

        Raises:
            RequestRefusedError: when the prompt can never run as given.
            RequestFailedError: when computing it raised an error, twice.
            EngineDeadError: when nothing can run any more.
        """
        request_id = str(next(self._request_ids))
        try:
            self._add(request_id, prompt, sampling_params or SamplingParams(), stream=True)
            finished = False
            while not finished:
                output = self._mail[request_id].take()
                if output is None:
                    self._step()
                    continue
                finished = output.finished
                yield output
        finally:
            self._forget([request_id])

    def shutdown(self) -> None:
        self.engine.shutdown()

    def _run(
        self, requests: list[tuple[Prompt, SamplingParams, int]], use_tqdm: bool
    ) -> list[RequestOutput]:
        places = {str(next(self._request_ids)): place for place in range(len(requests))}
        results: list[RequestOutput | None] = [None] * len(requests)
        errors: dict[int, RequestRefusedError | RequestFailedError] = {}
        try:
            for request_id, (prompt, params, priority) in zip(places, requests, strict=True):
                self._add(request_id, prompt, params, priority=priority)
            num_left = len(requests)
            hidden = None if use_tqdm else True  # None shows it on terminals alone
            with tqdm(total=num_left, desc="Prompts", disable=hidden) as progress:
                while num_left:
                    for request_id in places.keys() & self._step():
                        mail, place = self._mail[request_id], places[request_id]
                        if mail.error is not None:
                            errors[place] = mail.error
                        else:
                            results[place] = mail.take()
                        num_left -= 1
                        progress.update()
        finally:
            self._forget(places)
        if errors:
            raise GenerationError(results, errors) from errors[min(errors)]
        return [result for result in results if result is not None]

    def _add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        stream: bool = False,
        priority: int = 0,
    ) -> None:
        with _interrupts_held(self.engine.core):
            self._mail[request_id] = _Mail()
            self.engine.add_request(
                request_id, _content(prompt), params, stream=stream, priority=priority
            )

    def _step(self) -> list[str]:
        """Run one batch and deliver what it brought; the ids of those who got something."""
        with _interrupts_held(self.engine.core):
            step = self.engine.step()
            for output in step.outputs:
                if output.request_id in self._mail:
                    self._mail[output.request_id].put(output)
            for request_id, error in step.errors.items():
                if request_id in self._mail:
                    self._mail[request_id].error = error
        return [*(output.request_id for output in step.outputs), *step.errors]

    def _forget(self, request_ids: Iterable[str]) -> None:
        """Let go of requests, and abort those that have not ended."""
        with _interrupts_held(self.engine.core):
            for request_id in request_ids:
                self._mail.pop(request_id, None)
                self.engine.abort(request_id)


@contextmanager
def _interrupts_held(core: EngineCore) -> Iterator[None]:
    """Hold Ctrl-C back until the block is left; a second one does not wait for the model.

    Other threads than the main one get none, and a handler that is not Python's is left alone.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1 and core.is_computing:
            held.clear()
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])


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
