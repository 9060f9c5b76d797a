"""Decode steps of the engine on dummy weights: wall time, the device's share of it, and bytes."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _bytes import model_bytes

from atom.batch import LaunchedStep, ScheduledBatch, SequenceResult, StepOutput
from atom.config import EngineConfig
from atom.messages import EngineRequest
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.input_builder import InputBuilder
from atom.model_engine.worker import Worker
from atom.model_loader.source import ModelSource
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.moe import FusedMoE
from atom.models.base import CausalLM
from atom.sampling_params import SamplingParams
from atom.spec_decode.base import Proposer
from atom.spec_decode.factory import create_proposer

WARMUP_STEPS = 5
PROFILED_STEPS = 8
# Of a trace's events, those that keep the device busy.
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Setup:
    """Which engine to measure.

    Attributes:
        folders: of the target and of the draft.
        max_model_len: room for the prompt and every step.
    """

    folders: tuple[Path, Path]
    num_drafts: int
    eager: bool
    batch_sizes: tuple[int, ...]
    prompt_len: int
    max_model_len: int
    dtype: str
    kv_cache_dtype: str
    device: str
    num_threads: int | None = None
    load_format: str = "dummy"
    quantization: str | None = None
    kv_cache_memory: int | None = None

    def engine_config(self) -> EngineConfig:
        options: dict[str, Any] = {}
        if self.num_drafts:
            options = {
                "method": "eagle3",
                "draft_model": str(self.folders[1]),
                "num_speculative_tokens": self.num_drafts,
            }
        if self.quantization is not None:
            options["quantization"] = self.quantization
        if not self.eager:
            options["cudagraph_capture_sizes"] = list(self.batch_sizes)
        return engine_config(
            model=str(self.folders[0]),
            load_format=self.load_format,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            device=self.device,
            max_num_seqs=self.batch_sizes[-1],
            max_num_batched_tokens=max(4096, 2 * self.batch_sizes[-1]),
            max_model_len=self.max_model_len,
            enable_prefix_caching=False,
            enforce_eager=self.eager,
            num_threads=self.num_threads,
            kv_cache_memory=self.kv_cache_memory,
            seed=0,
            **options,
        )


class _Recorded:
    """An executor that remembers the last batch.

    Attributes:
        pretends: takes any token for the next one and computes nothing; the cache stays empty.
    """

    can_be_interrupted = True
    patience_ms: int | None = None
    depth = 1

    def __init__(self, inner: Worker) -> None:
        self._inner = inner
        self.limits = inner.limits
        self.eos_token_ids = inner.eos_token_ids
        self.lookahead = inner.lookahead
        self.grammars = inner.grammars
        self.inputs = inner.inputs
        self.last = ScheduledBatch([], [], [])
        self.pretends = False

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        self.last = batch
        if self.pretends:
            if batch.sequences:
                self.inputs.build(batch)
            tokens: list[list[int]] = [[1] if s.wants_sample else [] for s in batch.sequences]
            output = StepOutput([SequenceResult(token_ids) for token_ids in tokens])
            return LaunchedStep(lambda: output)
        return self._inner.launch(batch)

    def shutdown(self) -> None:
        self._inner.shutdown()


class DecodeEngine:
    """An engine whose sequences all decode, one step at a time.

    Attributes:
        ops: the table of what runs.
        model: the target.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        models: list[CausalLM] = []

        def factory(
            config: EngineConfig, model: CausalLM, source: ModelSource, context: LayerContext
        ) -> Proposer:
            models.append(model)
            return create_proposer(config, model, source, context)

        config = setup.engine_config()
        executor = Worker(config, proposer_factory=factory)
        self.ops: str = executor.ops.describe()
        (self.model,) = models
        self._executor = _Recorded(executor)
        self._core = EngineCore(config, self._executor)
        self._ids: list[str] = []

    @property
    def last_batch(self) -> ScheduledBatch:
        return self._executor.last

    @property
    def inputs(self) -> InputBuilder:
        return self._executor.inputs

    @property
    def num_cached_tokens(self) -> int:
        """How many tokens all sequences together may have."""
        limits = self._core.limits
        return limits.num_blocks * limits.block_size

    def start(self, batch_size: int, prompt_len: int | None = None, pretend: bool = False) -> None:
        """Compute `batch_size` prompts, until all of them decode.

        Args:
            prompt_len: instead of the setup's.
            pretend: compute nothing. Steps after it take as long as they would; their tokens mean
                nothing.
        """
        prompt_len = prompt_len or self._setup.prompt_len
        self._executor.pretends = pretend
        rng = random.Random(batch_size)
        room = self._core.limits.max_model_len - prompt_len
        params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
        self._ids = [f"{batch_size}-{i}" for i in range(batch_size)]
        vocab = self._core.limits.vocab_size
        for name in self._ids:
            prompt = [rng.randrange(vocab) for _ in range(prompt_len)]
            self._core.add_request(
                EngineRequest(id=name, prompt_token_ids=prompt, params=params, seed=batch_size)
            )
        waiting = set(self._ids)
        while waiting:
            report = self._core.step()
            report.check()
            waiting -= {o.id for o in report.outputs if o.token_ids}
        self._executor.pretends = False

    def step(self) -> int:
        """One step of all sequences; how many tokens it gave them.

        The tokens are on the host when it returns, so the device has done what they need.
        """
        outputs = self._core.step().outputs
        if len(outputs) != len(self._ids):
            raise RuntimeError(f"{len(outputs)} of {len(self._ids)} sequences were computed")
        return sum(len(output.token_ids) for output in outputs)

    def stop(self) -> None:
        self._core.abort(self._ids)
        self._core.step()

    def shutdown(self) -> None:
        self._core.shutdown()

    def step_bytes(self) -> int:
        """What the target's part of the last step had to move at least."""
        sequences = self._executor.last.sequences
        tokens = sum(len(s.token_ids) for s in sequences)
        cached = sum(s.context_len for s in sequences)
        return model_bytes(self.model).step(tokens, cached, self._visits())

    @torch.inference_mode()
    def _visits(self) -> list[int]:
        """Experts that some token of the last step visits, layer by layer.

        Computes that step again, eagerly: nothing looks into a graph. Its keys and values are
        written where they are already.
        """
        layers = [m for m in self.model.modules() if isinstance(m, FusedMoE)]
        visited: list[int] = []

        def count(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            visited.append(len(set(given[2].flatten().tolist())))

        hooks = [layer.register_forward_pre_hook(count) for layer in layers]
        if layers:
            self.model(self._executor.inputs.build(self._executor.last).model_input)
        for hook in hooks:
            hook.remove()
        return visited


def measure(engine: DecodeEngine, batch_size: int, steps: int) -> dict[str, Any]:
    """Median seconds and mean tokens of a step; bytes of one in the middle; device seconds."""
    engine.start(batch_size)
    for _ in range(WARMUP_STEPS):
        engine.step()
    seconds, tokens, half = [], [], steps // 2
    num_bytes = 0
    for i in range(steps):
        started = time.perf_counter()
        tokens.append(engine.step())
        seconds.append(time.perf_counter() - started)
        if i == half:
            num_bytes = engine.step_bytes()
    busy = _busy_seconds_of(engine)
    engine.stop()
    return {
        "seconds": statistics.median(seconds),
        "tokens": statistics.fmean(tokens),
        "bytes": num_bytes,
        "device_seconds": busy,
    }


def _busy_seconds_of(engine: DecodeEngine) -> float | None:
    """Seconds of a step in which the device works; None without a device."""
    if not torch.cuda.is_available() or next(engine.model.parameters()).device.type == "cpu":
        return None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED_STEPS):
                engine.step()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    total = busy_seconds(trace["traceEvents"])
    return total / PROFILED_STEPS if total else None


def busy_seconds(events: Sequence[Mapping[str, Any]]) -> float:
    """How long any kernel or copy runs: work side by side counts once. Times are in us."""
    spans = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("cat") in _DEVICE_WORK
    )
    total, reached = 0.0, float("-inf")
    for begin, end in spans:
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total / 1e6
