"""Decode steps of the engine on dummy weights, overlapped as users run them where they can be."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from _bytes import model_bytes
from _trace import Timeline, mark_step, record

from atom.batch import LaunchedStep, ScheduledBatch, SequenceResult, StepOutput
from atom.config import EngineConfig
from atom.kv_cache.builders import attention_layers
from atom.messages import EngineRequest, EngineStats
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.step.input_builder import InputBuilder
from atom.model_engine.worker import Worker
from atom.model_loader.source import ModelSource
from atom.model_ops.attention.metadata import KVCacheTensor
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.moe import FusedMoE
from atom.models.base import CausalLM
from atom.sampling_params import SamplingParams
from atom.spec_decode.factory import create_proposer
from atom.spec_decode.proposers.base import Proposer

# Requests of `serve_others`.
_OTHERS = 8
# An FP8 number below this byte is finite and positive.
_FP8_BYTES = 0x70


@dataclass(frozen=True)
class Setup:
    """Which engine to measure.

    Attributes:
        folders: of the target and of the draft.
        max_model_len: room for the prompt and every step.
        overlap: whether steps overlap; None for the platform's default.
        serves: as a server starts, with the default limits and graphs for all batch sizes.
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
    overlap: bool | None = None
    serves: bool = False

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
        if self.overlap is not None:
            options["overlap"] = self.overlap
        if not self.serves:
            options["max_num_seqs"] = self.batch_sizes[-1]
            options["max_num_batched_tokens"] = max(4096, 2 * self.batch_sizes[-1])
            if not self.eager and self.device != "cpu":
                options["cudagraph_capture_sizes"] = list(self.batch_sizes)
        return engine_config(
            model=str(self.folders[0]),
            load_format=self.load_format,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            enable_prefix_caching=False,
            enforce_eager=self.eager,
            num_threads=self.num_threads,
            kv_cache_memory=self.kv_cache_memory,
            seed=0,
            **options,
        )


class _Recorded:
    """An executor that remembers the last batch, and how long its results were waited for.

    Attributes:
        depth: 1 while no step is launched before the results of the last one are read.
        pretends: takes any token for the next one and computes nothing; the cache stays as it is.
        marks: marks the beginning of each step in a trace.
        waited: seconds.
    """

    can_be_interrupted = True
    max_idle_ms: int | None = None

    def __init__(self, inner: Worker, device: torch.device) -> None:
        self._inner = inner
        self._device = device
        self.limits = inner.limits
        self.eos_token_ids = inner.eos_token_ids
        self.lookahead = inner.lookahead
        self.grammars = inner.grammars
        self.inputs = inner.inputs
        self.last = ScheduledBatch([], [], [])
        self.depth = inner.depth
        self.pretends = False
        self.marks = False
        self.waited = 0.0

    def overlap(self, overlaps: bool) -> None:
        """Whether steps overlap from now on, if they can."""
        self.depth = self._inner.depth if overlaps else 1

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        self.last = batch
        if self.pretends:
            if batch.sequences:
                self.inputs.build(batch)
            tokens: list[list[int]] = [[1] if s.wants_sample else [] for s in batch.sequences]
            output = StepOutput([SequenceResult(token_ids) for token_ids in tokens])
            return LaunchedStep(lambda: output)
        if self.marks:
            mark_step(self._device)
        launched = self._inner.launch(batch)
        # Its results are on their way by now.
        done: torch.cuda.Event | None = None
        if self._device.type != "cpu":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return msgspec.structs.replace(launched, collect=partial(self._collect, launched, done))

    def _collect(self, launched: LaunchedStep, done: torch.cuda.Event | None) -> StepOutput:
        started = time.perf_counter()
        if done is not None:
            done.synchronize()
        self.waited += time.perf_counter() - started
        return launched.collect()

    def shutdown(self) -> None:
        self._inner.shutdown()


class DecodeEngine:
    """An engine whose sequences all decode, one step at a time.

    Attributes:
        ops: the table of what runs.
        model: the target.
        device: where it runs.
        overlaps: whether each step is launched before the results of the last one are read.
        ready_seconds: from the resolved options to an engine that takes requests.
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
        started = time.perf_counter()
        executor = Worker(config, proposer_factory=factory)
        self.ops: str = executor.ops.describe()
        (self.model,) = models
        self.device: torch.device = next(self.model.parameters()).device
        self.overlaps: bool = executor.depth > 1
        self._executor = _Recorded(executor, self.device)
        self._core = EngineCore(config, self._executor)
        self.ready_seconds = time.perf_counter() - started
        self._ids: list[str] = []

    @property
    def last_batch(self) -> ScheduledBatch:
        return self._executor.last

    @property
    def inputs(self) -> InputBuilder:
        return self._executor.inputs

    @property
    def stats(self) -> EngineStats:
        return self._core.stats

    @property
    def waited_seconds(self) -> float:
        """How long the host has waited for results, all in all."""
        return self._executor.waited

    @property
    def num_layers(self) -> int:
        """Of the target, those with attention."""
        return len(attention_layers(self.model))

    @property
    def num_cached_tokens(self) -> int:
        """How many tokens all sequences together may have."""
        limits = self._core.limits
        return limits.num_blocks * limits.block_size

    def most_seqs(self, num_tokens: int) -> int:
        """How many sequences of so many tokens the cache holds, in whole blocks.

        A prompt starts only where each sequence that runs could have a block more.
        """
        limits = self._core.limits
        return limits.num_blocks // (1 - -num_tokens // limits.block_size)

    def start(self, batch_size: int, prompt_len: int | None = None, pretend: bool = False) -> None:
        """Compute `batch_size` prompts, until all of them decode.

        Args:
            prompt_len: instead of the setup's.
            pretend: compute nothing. Steps after it take as long as they would; their tokens mean
                nothing.
        """
        prompt_len = prompt_len or self._setup.prompt_len
        self._executor.pretends = pretend
        self._executor.overlap(not pretend)
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
        self._executor.overlap(True)
        if self.overlaps:
            self.settle()

    def fill_cache(self) -> None:
        """Random numbers in the target's KV cache, as after prompts that were computed."""
        for layer in attention_layers(self.model).values():
            cache = layer.kv_cache
            pools = (
                (cache.key, cache.value) if isinstance(cache, KVCacheTensor) else (cache.latent,)
            )
            for pool in pools:
                if pool.dtype.itemsize == 1:
                    pool.view(torch.uint8).random_(0, _FP8_BYTES)
                else:
                    pool.normal_()

    def settle(self) -> None:
        """Read all results, and run one step whose every token the host knows.

        Steps that follow overlap again.
        """
        self._executor.overlap(False)
        for _ in range(2):
            self._core.step()
        self._executor.overlap(True)

    def step(self) -> int:
        """Launch steps of all sequences, and read the tokens of one; how many it gave them."""
        outputs = self._core.step().outputs
        if len(outputs) != len(self._ids):
            raise RuntimeError(f"{len(outputs)} of {len(self._ids)} sequences were computed")
        return sum(len(output.token_ids) for output in outputs)

    def stop(self) -> None:
        self._core.abort(self._ids)
        self._core.step()

    def serve_others(self) -> None:
        """Serve a few requests as they come: prompts beside sequences that decode, some of these
        with fewer drafts, some with temperatures, some up to the longest context.
        """
        longest, vocab = self._core.limits.max_model_len, self._core.limits.vocab_size
        rng = random.Random(0)
        for i in range(_OTHERS):
            room, fills = 6 + 5 * i, i % 3 == 0
            params = SamplingParams(
                temperature=0.8 * (i % 2),
                max_tokens=None if fills else room,
                ignore_eos=True,
                num_speculative_tokens=1 if i % 4 == 1 else None,
            )
            num_prompt = max(longest - room, 1) if fills else min(5 + i, longest - room - 1)
            prompt = [rng.randrange(vocab) for _ in range(num_prompt)]
            self._core.add_request(
                EngineRequest(id=f"other {i}", prompt_token_ids=prompt, params=params, seed=i)
            )
            for _ in range(3):
                self._core.step().check()
        while self._core.has_work:
            self._core.step().check()

    def shutdown(self) -> None:
        self._core.shutdown()

    def trace(self, steps: int) -> Timeline:
        """What the device does in some more steps."""

        def work() -> None:
            self._executor.marks = True
            for _ in range(steps):
                self.step()
            self._executor.marks = False

        return record(work, self.device)

    def step_bytes(self) -> int:
        """What the target's part of the last step had to move at least; `settle` comes first."""
        return sum(self.step_bytes_by_class().values())

    def step_bytes_by_class(self) -> dict[str, int]:
        """The same by what reads it, as `ModelBytes.parts` has it."""
        sequences = self._executor.last.sequences
        tokens = sum(len(s.token_ids) for s in sequences)
        cached = sum(s.context_len for s in sequences)
        return model_bytes(self.model).parts(tokens, cached, self._visits())

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
