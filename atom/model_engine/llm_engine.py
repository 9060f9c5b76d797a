"""The engine in the caller's process, with tokenizer and detokenizer, run step by step."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atom.config import ConfigError, EngineConfig
from atom.messages import (
    ImageInput,
    RequestFailedError,
    RequestRefusedError,
    check_request,
    check_text,
)
from atom.model_engine.engine_core import EngineCore
from atom.model_loader.generation_config import describe_defaults
from atom.model_loader.source import resolve_model
from atom.model_loader.tokenizers.tokenizer import load_text_tokenizer, load_tokenizer
from atom.multimodal.items import ImageItem, Video, check_count, expand, side_by_side
from atom.multimodal.processors.table import create_image_processor, create_video_processor
from atom.outputs import RequestOutput
from atom.platform import release_cached_memory
from atom.quoting import quote
from atom.sampling_params import SamplingParams
from atom.text.output_processor import OutputProcessor, request_id_of
from atom.text.prepared_params import PreparedParams

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

    from atom.multimodal.processors.base import ImageProcessor

logger = logging.getLogger(__name__)


@dataclass
class EngineStep:
    """The results of one step.

    Attributes:
        outputs: deltas of streamed requests, and results of finished ones.
        errors: by request id, errors of requests that failed; these are aborted already.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    errors: dict[str, RequestRefusedError | RequestFailedError] = field(default_factory=dict)


class EngineAsleepError(RuntimeError):
    """The weights are released, and nothing can be computed until `wake_up`."""


class LLMEngine:
    """An `EngineCore` with a tokenizer and an `OutputProcessor`.

    Attributes:
        tokenizer: encodes, decodes and renders chats.
        sampling_defaults: the model's, for requests that do not give their own.
        image_processor, video_processor: the model's; None if it reads no images, or no videos.
    """

    sampling_defaults: dict[str, Any]

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        if (number := config.parallel.num_replicas) > 1:
            raise ConfigError(
                f"data_parallel_size={number} replicas need processes of their own, and this "
                "engine runs in yours; start a server (atom.entrypoints.openai_server) or an "
                "AsyncEngine, or one program for each device"
            )
        source = resolve_model(config.model)
        self.model_name = source.name
        self.sampling_defaults = source.sampling_defaults
        logger.info("%s", describe_defaults(source.sampling_defaults))
        self._source = source
        self.tokenizer = load_text_tokenizer(source, config.model)
        self.image_processor = create_image_processor(source, config.model, self.tokenizer)
        self.video_processor = create_video_processor(source, config.model, self.tokenizer)
        self._core: EngineCore | None = EngineCore(config, source=source)
        self._processor = OutputProcessor(self.tokenizer, config.seed)

    @functools.cached_property
    def transformers_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer as transformers reads it, which imports transformers."""
        return load_tokenizer(self._source, self._config.model)

    @property
    def core(self) -> EngineCore:
        """Raises EngineAsleepError: between `sleep` and `wake_up` there is none."""
        if self._core is None:
            raise EngineAsleepError("the engine sleeps: its weights are released; call wake_up()")
        return self._core

    @property
    def is_computing(self) -> bool:
        """Whether the model runs at this moment."""
        return self._core is not None and self._core.is_computing

    def sleep(self) -> None:
        """Release the weights and the KV cache, with all that was cached; asleep already is fine.

        Raises:
            RuntimeError: when requests are unfinished.
        """
        if self._core is None:
            return
        if self._core.has_work:
            raise RuntimeError("requests are unfinished; read or leave them before sleep()")
        self._core.shutdown()
        self._core = None
        gc.collect()
        release_cached_memory()

    def wake_up(self) -> None:
        """Load the weights again and allocate an empty KV cache; counts begin at zero.

        Raises:
            ConfigError, WeightError: when the model has gone; the engine sleeps on.
        """
        if self._core is None:
            self._core = EngineCore(self._config)

    def reset_prefix_cache(self) -> bool:
        """Forget the KV of all that nobody computes on; false when some request does."""
        return self.core.reset_prefix_cache()

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        priority: int = 0,
        images: Sequence[Image | Video] = (),
    ) -> None:
        """Queue a prompt; text is tokenised, and a grammar compiled, before this returns.

        Args:
            images: RGB, and videos, one for each placeholder in the prompt.

        Raises:
            RequestRefusedError: when it could never run as given.
            EngineDeadError: when the engine is dead.
            EngineAsleepError: between `sleep` and `wake_up`.
            TypeError, ValueError: for parameters or a priority that are none.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        if type(priority) is not int or not -(2**31) <= priority < 2**31:
            raise ValueError(f"priority must be an integer of 32 bits, got {quote(priority)}")
        core, prepared = self.core, PreparedParams(params)
        text: str | None = None
        token_ids = prompt
        if isinstance(prompt, str):
            check_text(prompt, "prompt")
            text, token_ids = prompt, self.tokenizer.encode(prompt)
        assert isinstance(token_ids, list)
        inputs: tuple[ImageInput, ...] = ()
        if images:
            token_ids, inputs = self._read_images(token_ids, images)
        check_request(token_ids, prepared.params, core.limits)
        if prepared.params.structured_output is not None:
            core.compile_grammar(prepared.params.structured_output)
        for request in self._processor.add_request(
            request_id,
            text,
            token_ids,
            prepared,
            stream=stream,
            priority=priority,
            images=inputs,
        ):
            core.add_request(request)

    def _read_images(
        self, token_ids: list[int], images: Sequence[Image | Video]
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """A prompt with the tokens of its images, and what the engine reads of them."""
        processor = self.image_processor
        if processor is None:
            raise RequestRefusedError(
                f"{self.model_name} reads no images, or was loaded to read none",
                "multi_modal_data",
            )
        options = self._config.model
        check_count(images, options.max_images, options.max_videos)
        items = side_by_side(functools.partial(self._read, processor), images)
        video = None if self.video_processor is None else self.video_processor.placeholder_id
        return expand(token_ids, items, processor.placeholder_id, video)

    def _read(self, processor: ImageProcessor, given: Image | Video) -> ImageItem:
        if not isinstance(given, Video):
            return processor.process(given)
        if self.video_processor is None:
            raise RequestRefusedError(
                f"{self.model_name} reads no videos, or was loaded to read none",
                "multi_modal_data",
            )
        return self.video_processor.process(given)

    @property
    def has_unfinished(self) -> bool:
        return self._core is not None and self._core.has_work

    def step(self) -> EngineStep:
        """Run one batch.

        Raises:
            EngineDeadError: when the engine is dead.
        """
        report = self.core.step()
        processed = self._processor.process(report.outputs)
        if processed.aborts:
            self.core.abort(processed.aborts)
        step = EngineStep(processed.outputs)
        for refused in report.refused:
            request_id = request_id_of(refused.id)
            self.abort(request_id)
            step.errors.setdefault(request_id, refused.error())
        return step

    def abort(self, request_id: str) -> None:
        """Abort a request; unknown ids are ignored."""
        if ids := self._processor.abort(request_id):
            self.core.abort(ids)

    def shutdown(self) -> None:
        if self._core is not None:
            self._core.shutdown()
