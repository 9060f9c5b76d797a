"""The engine in the caller's own process: text in, text out, one step at a time."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from atom.config import EngineConfig
from atom.messages import RequestRefusedError, check_request
from atom.model_engine.engine_core import EngineCore
from atom.model_loader.source import resolve_model
from atom.model_loader.tokenizer import load_tokenizer
from atom.outputs import RequestOutput
from atom.sampling_params import SamplingParams
from atom.text.output_processor import OutputProcessor, request_id_of


class LLMEngine:
    """An `EngineCore` between a tokenizer and an output processor."""

    def __init__(self, config: EngineConfig) -> None:
        source = resolve_model(config.model)
        self.model_name = source.name
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(source, config.model)
        self.core = EngineCore(config)
        self._processor = OutputProcessor(self.tokenizer, config.seed)
        # Outputs of steps that raised.
        self._unreported: list[RequestOutput] = []

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        priority: int = 0,
    ) -> None:
        """Queue a prompt, tokenised here when it is text.

        Raises:
            RequestRefusedError: when it could never run as given.
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
        return self.core.has_work or bool(self._unreported)

    def step(self) -> list[RequestOutput]:
        """Run one batch; deltas of streamed requests and the results of finished ones.

        Raises:
            RequestRefusedError: when a request met the dead end of its grammar; it is aborted,
                and what else the step brought comes with the next one.
        """
        report = self.core.step()
        processed = self._processor.process(report.outputs)
        self.core.abort(processed.aborts)
        self._unreported += processed.outputs
        for refused in report.refused:
            self.abort(request_id_of(refused.id))
        if report.refused:
            raise RequestRefusedError(report.refused[0].message, report.refused[0].param)
        outputs, self._unreported = self._unreported, []
        return outputs

    def abort(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self.core.abort(self._processor.abort(request_id))

    def shutdown(self) -> None:
        self.core.shutdown()
