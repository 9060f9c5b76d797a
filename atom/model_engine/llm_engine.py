"""The engine in the caller's process, with tokenizer and detokenizer, run step by step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from atom.config import EngineConfig
from atom.messages import RequestFailedError, RequestRefusedError, check_request
from atom.model_engine.engine_core import EngineCore
from atom.model_loader.generation_config import describe_defaults
from atom.model_loader.source import resolve_model
from atom.model_loader.tokenizer import load_tokenizer
from atom.outputs import RequestOutput
from atom.sampling_params import SamplingParams
from atom.text.output_processor import OutputProcessor, request_id_of

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


class LLMEngine:
    """An `EngineCore` with a tokenizer and an `OutputProcessor`.

    Attributes:
        sampling_defaults: the model's, for requests that do not give their own.
    """

    sampling_defaults: dict[str, Any]

    def __init__(self, config: EngineConfig) -> None:
        source = resolve_model(config.model)
        self.model_name = source.name
        self.sampling_defaults = source.sampling_defaults
        logger.info("%s", describe_defaults(source.sampling_defaults))
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(source, config.model)
        self.core = EngineCore(config)
        self._processor = OutputProcessor(self.tokenizer, config.seed)

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        priority: int = 0,
    ) -> None:
        """Queue a prompt; text is tokenised, and a grammar compiled, before this returns.

        Raises:
            RequestRefusedError: when it could never run as given.
            EngineDeadError: when the engine is dead.
        """
        text: str | None = None
        token_ids = prompt
        if isinstance(prompt, str):
            text, token_ids = prompt, self.tokenizer.encode(prompt)
        assert isinstance(token_ids, list)
        check_request(token_ids, params, self.core.limits)
        if params.structured_output is not None:
            self.core.compile_grammar(params.structured_output)
        for request in self._processor.add_request(
            request_id, text, token_ids, params, stream=stream, priority=priority
        ):
            self.core.add_request(request)

    @property
    def has_unfinished(self) -> bool:
        return self.core.has_work

    def step(self) -> EngineStep:
        """Run one batch.

        Raises:
            EngineDeadError: when the engine is dead.
        """
        report = self.core.step()
        processed = self._processor.process(report.outputs)
        self.core.abort(processed.aborts)
        step = EngineStep(processed.outputs)
        for refused in report.refused:
            request_id = request_id_of(refused.id)
            self.abort(request_id)
            step.errors.setdefault(request_id, refused.error())
        return step

    def abort(self, request_id: str) -> None:
        """Abort a request; unknown ids are ignored."""
        self.core.abort(self._processor.abort(request_id))

    def shutdown(self) -> None:
        self.core.shutdown()
