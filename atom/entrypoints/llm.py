"""`LLM`: the offline API."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from atom.config import EngineConfig
from atom.entrypoints.chat.template import ChatTemplates, Message
from atom.entrypoints.engine_metrics import EngineMetric, engine_metrics
from atom.entrypoints.offline.interrupts import interrupts_held
from atom.entrypoints.offline.prompts import (
    Prompt,
    content_of,
    images_of,
    marked_images,
    one_each,
    prompt_list,
    refuse_adapter,
)
from atom.messages import RequestFailedError, RequestRefusedError
from atom.model_engine.arg_utils import choose_draft, engine_config
from atom.model_engine.llm_engine import LLMEngine
from atom.model_engine.processes.launched import run_as_follower_if_launched
from atom.model_engine.replicas.mailbox import merge
from atom.multimodal.items import Video, side_by_side
from atom.multimodal.media import MediaLoader, VideoSource
from atom.multimodal.policy import MediaPolicy
from atom.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from atom.pooling.source import PoolingSource, pooling_source
from atom.sampling_params import SamplingParams
from atom.text.control_tokens import ControlTokens

if TYPE_CHECKING:
    from PIL.Image import Image

    from atom.entrypoints.offline.pooling import OfflinePooling

Params = SamplingParams | Sequence[SamplingParams] | None
# Whether there is a progress bar, or what makes it instead of tqdm.
Progress = bool | Callable[..., Any]


class WrongTaskError(ValueError):
    """The model does something else than what is asked of it; the message says what."""


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
    """A model to generate with, or to embed or score with, in this process.

    Every call and every iterator gets the outputs of its own requests, whichever of them makes
    the engine step; requests of a suspended iterator go on while others are read. One thread uses
    it at a time. Ctrl-C takes effect between two steps, a second one at once; either way the
    engine stays usable. As a context manager it shuts the engine down at the end.

    Args:
        model: folder, `.gguf` file or hub id; the embedded model when None.
        no_speculation: leave the draft out that comes with the package, where there is one for
            the model and nothing else is said about speculation.
        engine_options: further ones by name, as `atom.config` declares them. Here `max_logprobs`
            is -1 by default: a request may ask for the whole vocabulary's.

    Raises:
        TypeError: for unknown engine arguments.
        ConfigError: when the model or an option cannot be honoured.
        SystemExit: in a process that a launcher started as another rank than 0, once rank 0 ends.
    """

    def __init__(
        self, model: str | None = None, *, no_speculation: bool = False, **engine_options: Any
    ) -> None:
        given = {"max_logprobs": -1, "model": model, **engine_options}
        config = engine_config(**choose_draft(given, no_speculation))
        if (status := run_as_follower_if_launched(config)) is not None:
            raise SystemExit(status)
        source = pooling_source(config)
        self._pooling = None if source is None else _create_pooling(config, source)
        self._engine = LLMEngine(config) if source is None else None
        self._chat_templates: dict[str | None, ChatTemplates] = {}
        self._request_ids = itertools.count()
        # Of all requests that were begun and neither finished nor left.
        self._mail: dict[str, _Mail] = {}

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    @property
    def engine(self) -> LLMEngine:
        """What generates.

        Raises:
            WrongTaskError: when the model embeds or scores.
        """
        if self._engine is None:
            raise WrongTaskError(
                f"{self._pooler.engine.description}, and generates none: call embed() or score()"
            )
        return self._engine

    @property
    def _pooler(self) -> OfflinePooling:
        if self._pooling is None:
            raise WrongTaskError(
                f"{self.engine.model_name} generates text, and neither embeds nor scores: call "
                f"generate() or chat()"
            )
        return self._pooling

    @cached_property
    def _media(self) -> MediaLoader:
        return MediaLoader(MediaPolicy())

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.engine.tokenizer)

    @property
    def tokenizer(self) -> Any:
        return self.get_tokenizer()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, transformers' kind."""
        if self._pooling is not None:
            return self._pooling.engine.loaded.tokenizer
        return self.engine.transformers_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What calls without sampling parameters use: the model's generation config."""
        return SamplingParams(**self.engine.sampling_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Params = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all in one batch; the results are in the prompts' order.

        Args:
            prompts: one or many; each text, token ids, or a dict as vLLM takes it, in which
                `multi_modal_data` holds under `image` one or a list of what `MediaLoader.load`
                takes, in the order of the prompt's placeholders, and under `video` one or a list of
                videos: frames, or a dict of `frames` and `fps`, as `VideoSource` has them.
            sampling_params: for all prompts, or one for each; `get_default_sampling_params()`
                when None.
            use_tqdm: whether to show progress, or what makes the bar instead of tqdm.
            priority: one per prompt; lower runs earlier.
            prompt_token_ids: instead of `prompts`.

        Raises:
            RequestRefusedError: when a prompt could never run as given; nothing is generated.
            MediaError: for an image that is none, or not allowed; nothing is generated.
            GenerationError: when prompts met errors of their own on the way; it has the others'
                results.
            EngineDeadError: when nothing can run any more.
            EngineAsleepError: between `sleep` and `wake_up`.
        """
        refuse_adapter(lora_request)
        batch = prompt_list(prompts, prompt_token_ids)
        given = sampling_params or self.get_default_sampling_params()
        params = one_each("sampling_params", given, len(batch))
        priorities = one_each("priority", priority or 0, len(batch))
        return self._run(list(zip(batch, params, priorities, strict=True)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        sanitize_control_tokens: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or many in one batch.

        Args:
            messages: as OpenAI's API has them; contents are text, or parts of text and, where the
                model reads images, of type `image_url`, or `image` with a Pillow image, an array,
                bytes or a path, and, where it reads videos, `video` and `video_url` as frames, with
                `fps`.
            sampling_params: as for `generate`, but when None there is no limit of tokens.
            tools: OpenAI's descriptions of functions, which the template tells the model, or the
                system message where the template knows none.
            sanitize_control_tokens: special tokens that messages and tools spell stay text.

        Raises:
            ValueError: when the model has no chat template and none is given, or for contents
                of other types.
            RequestRefusedError: when a prompt could never run as given; nothing is generated.
            GenerationError, EngineDeadError, EngineAsleepError: as `generate`.
        """
        refuse_adapter(lora_request)
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        prompts = [
            self._chat_prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                sanitize_control_tokens=sanitize_control_tokens,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
            sampling_params.max_tokens = None
        return self.generate(prompts, sampling_params, use_tqdm)

    def render_chat(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        sanitize_control_tokens: bool = True,
        **template_args: Any,
    ) -> list[int]:
        """The token ids of a conversation, rendered by the model's chat template; see `chat`.

        Images are the placeholders that the template writes.
        """
        if self.engine.image_processor is not None:
            conversation, _ = marked_images(conversation)
        return self._render_chat(
            conversation, tools, chat_template, sanitize_control_tokens, template_args
        )[0]

    def _chat_prompt(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template: str | None,
        sanitize_control_tokens: bool,
        **template_args: Any,
    ) -> Prompt:
        """A conversation as a prompt, with its images."""
        images: list[Any] = []
        if self.engine.image_processor is not None:
            conversation, images = marked_images(conversation)
        token_ids, order = self._render_chat(
            conversation, tools, chat_template, sanitize_control_tokens, template_args
        )
        if not images:
            return token_ids
        given = [images[i] for i in order]
        data = {
            "image": [image for image in given if not isinstance(image, VideoSource)],
            "video": [video for video in given if isinstance(video, VideoSource)],
        }
        return {"prompt_token_ids": token_ids, "multi_modal_data": data}

    def _render_chat(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template: str | None,
        sanitize_control_tokens: bool,
        template_args: Mapping[str, Any],
    ) -> tuple[list[int], list[int]]:
        """Token ids, and the numbers of the images in them."""
        templates = self._chat_templates.get(chat_template)
        if templates is None:
            templates = ChatTemplates(self.engine.tokenizer, chat_template)
            self._chat_templates[chat_template] = templates
        template = templates.choose(with_tools=bool(tools))
        if template is None:
            raise ValueError("the model has no chat template, and none was given")
        text, order = template.render_images(
            conversation,
            tools,
            {"add_generation_prompt": True, **template_args},
            sanitizes=sanitize_control_tokens,
        )
        # The template has written the special tokens already.
        return self._control_tokens.encode(text, add_special_tokens=False)[1], order

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding what is new since the last time.

        Leaving the iterator early aborts the request. Several iterators may be read in turns.
        Without `sampling_params` those of `get_default_sampling_params` apply.

        Raises:
            RequestRefusedError: when the prompt can never run as given.
            RequestFailedError: when computing it raised an error, twice.
            EngineDeadError: when nothing can run any more.
            EngineAsleepError: between `sleep` and `wake_up`.
        """
        params = sampling_params or self.get_default_sampling_params()
        request_id = str(next(self._request_ids))
        try:
            self._add(request_id, prompt, params, stream=True)
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

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each text or list of token ids, in their order.

        Args:
            dimensions: numbers to cut the vectors to, where the model allows it.
            prompt_name: of a text of the checkpoint to put before each, such as `query`.
            truncate_prompt_tokens: tokens to cut longer inputs to; -1 for the model's limit.
            use_activation: whether vectors get length 1; None for what the checkpoint says.

        Raises:
            WrongTaskError: when the model does not embed.
            RequestRefusedError: for an input that the model cannot take.
            RequestFailedError: when computing one raised an error.
        """
        return self._pooler.embed(
            prompts, dimensions, prompt_name, truncate_prompt_tokens, use_activation
        )

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool = True,
    ) -> list[ScoringRequestOutput]:
        """How well each text of `data_2` answers that of `data_1`: by a model that scores pairs, or
        as the cosine of their vectors.

        Args:
            data_1: one text, or as many as the others.
            instruction: what the task is, for models that are told.
            truncate_prompt_tokens: as `embed`.
            use_activation: whether a model's answer passes through its sigmoid, if it has one.

        Raises:
            WrongTaskError: when the model generates.
            RequestRefusedError, RequestFailedError: as `embed`.
        """
        return self._pooler.score(
            data_1, data_2, instruction, truncate_prompt_tokens, use_activation
        )

    def reset_prefix_cache(self) -> bool:
        """Forget the KV of earlier prompts; false, with nothing done, while requests are live."""
        return self.engine.reset_prefix_cache()

    def get_metrics(self) -> list[EngineMetric]:
        """The engine's counts since it started or woke up, by the names of the server's."""
        return engine_metrics(self.engine.core.stats)

    def sleep(self, level: int = 1) -> None:
        """Release the weights and the KV cache until `wake_up`; both levels do the same.

        Raises:
            ValueError: for another level than 1 and 2.
            RuntimeError: when requests are unfinished.
        """
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {level!r}")
        self.engine.sleep()

    def wake_up(self) -> None:
        """Load the weights again, with an empty KV cache; nothing when awake."""
        self.engine.wake_up()

    def shutdown(self) -> None:
        if self._pooling is not None:
            self._pooling.engine.shutdown()
        else:
            self.engine.shutdown()

    def _run(
        self, requests: list[tuple[Prompt, SamplingParams, int]], use_tqdm: Progress
    ) -> list[RequestOutput]:
        places = {str(next(self._request_ids)): place for place in range(len(requests))}
        results: list[RequestOutput | None] = [None] * len(requests)
        errors: dict[int, RequestRefusedError | RequestFailedError] = {}
        try:
            for request_id, (prompt, params, priority) in zip(places, requests, strict=True):
                self._add(request_id, prompt, params, priority=priority)
            num_left = len(requests)
            create_bar = use_tqdm if callable(use_tqdm) else tqdm
            hidden = None if use_tqdm else True  # None shows it on terminals alone
            with create_bar(total=num_left, desc="Prompts", disable=hidden) as progress:
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
        with interrupts_held(self.engine):
            self._mail[request_id] = _Mail()
            self.engine.add_request(
                request_id,
                content_of(prompt),
                params,
                stream=stream,
                priority=priority,
                images=side_by_side(self._load, images_of(prompt)),
            )

    def _load(self, given: Any) -> Image | Video:
        if isinstance(given, VideoSource):
            return self._media.load_video(given)
        return self._media.load(given)

    def _step(self) -> list[str]:
        """Run one batch and deliver what it brought; the ids of those who got something."""
        with interrupts_held(self.engine):
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
        with interrupts_held(self.engine):
            for request_id in request_ids:
                self._mail.pop(request_id, None)
                self.engine.abort(request_id)


def _create_pooling(config: EngineConfig, source: PoolingSource) -> OfflinePooling:

    from atom.entrypoints.offline.pooling import OfflinePooling
    from atom.pooling.engine import PoolingEngine

    return OfflinePooling(PoolingEngine(config, source))
