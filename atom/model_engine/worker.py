"""One rank: its device, its part of the model, its caches and graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from atom.batch import LaunchedStep, RankStep, ScheduledBatch, StepOutput
from atom.config import EngineConfig
from atom.distributed.parallel_state import ALONE, ParallelGroups
from atom.distributed.stages import Stages
from atom.messages import EngineLimits, WindowLimits
from atom.model_engine.expert_ranks import has_spread_experts
from atom.model_engine.rank import Rank, dtype_name, take_device
from atom.model_engine.rank_parts import ProposerFactory, RankParts, build_parts
from atom.model_engine.runner_parts import create_runner, create_watch
from atom.model_engine.start_up.cpu_threads import take_threads
from atom.model_engine.start_up.kv_memory import allocate_kv_cache, fit_context
from atom.model_engine.start_up.start_log import log_start
from atom.model_engine.start_up.warm_up import warm_up
from atom.model_loader.source import ModelSource, resolve_model
from atom.model_ops.quant.summary import describe_weights
from atom.model_ops.registry import OpTable
from atom.spec_decode.factory import create_proposer
from atom.structured_output.cache import GrammarCache


class Worker:
    """Runs the model on one device, alone or as a rank among others.

    The first rank is given batches (`launch`) and samples; the others do as it tells (`follow`).

    Attributes:
        ops: the implementations selected for the target's and the draft's ops.
        parts: what the runner is made of.
        inputs: copies batches to the device.
        launcher: launches steps: the runner, or what watches them.
        drafts_share_experts: whether the draft model has experts on other ranks.

    Args:
        groups: this rank's.
        proposer_factory: creates the proposer; None for the configured one.
        publish: tells the other ranks what to do in this step, once this rank's inputs are built;
            returns what this rank does.
        source: the model, if it is resolved already.
        stages: told where this rank's start is.
    """

    can_be_interrupted = True
    max_idle_ms: int | None = None

    def __init__(
        self,
        config: EngineConfig,
        groups: ParallelGroups = ALONE,
        *,
        proposer_factory: ProposerFactory | None = None,
        publish: Callable[[RankStep], RankStep] | None = None,
        source: ModelSource | None = None,
        stages: Stages | None = None,
    ) -> None:
        started = time.perf_counter()
        stages = stages or Stages()
        stages.begin("preparing the device")
        platform = take_device(config, groups)
        self._is_gpu = platform.is_gpu
        if not self._is_gpu:
            stages.begin("loading the kernels, or compiling them")
        self._threads = take_threads(config.parallel, groups, platform)
        stages.begin("finding the model")
        source = source or resolve_model(config.model)
        rank = Rank.create(config, groups, platform, source)
        self.parts = build_parts(rank, proposer_factory or create_proposer, stages)
        self._runner = create_runner(rank, self.parts, publish)
        stages.begin("measuring memory for the KV cache")
        num_blocks, window = allocate_kv_cache(rank, self.parts, self._runner)
        if any(self._runner.steps.num_graphs):
            stages.begin("capturing graphs")
        self._runner.steps.capture()
        # On a CPU kernels are compiled before they are called.
        if self._is_gpu:
            stages.begin("warming up")
            warm_up(rank, self.parts, self._runner, num_blocks)
        self.launcher = create_watch(rank, self.parts, self._runner, num_blocks)
        stages.begin("ready")
        self.limits = _limits(rank, self.parts, num_blocks, window)
        self.depth = 2 if rank.overlaps else 1
        self.ops: OpTable = rank.context.ops
        self.inputs = self._runner.inputs
        self.eos_token_ids = source.eos_token_ids
        self.lookahead = self.parts.proposer.lookahead
        self.drafts_share_experts = has_spread_experts(self.parts.proposer.draft_model)
        # When the last step ended.
        self._ended = started
        if groups.is_first:
            log_start(rank, self.parts.models, self.limits, time.perf_counter() - started)

    @property
    def grammars(self) -> GrammarCache:
        """Compiled grammars; only the first rank has any."""
        assert self.parts.grammars is not None, "only the first rank samples"
        return self.parts.grammars

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        started = time.perf_counter()
        launched = self.launcher.launch(batch)
        collect = partial(self._collect, batch, launched, started, time.perf_counter())
        return LaunchedStep(collect, launched.num_drafts, launched.draft_source)

    def _collect(
        self, batch: ScheduledBatch, launched: LaunchedStep, started: float, away: float
    ) -> StepOutput:
        """Args:
        started, away: when the launch began and returned.
        """
        asked = time.perf_counter()
        output = launched.collect()
        ended = time.perf_counter()
        seconds = ended - asked + away - started
        if self._is_gpu:
            # A step begins when it is launched, or when the one before it has ended.
            seconds = ended - max(started, self._ended)
        self._ended = ended
        is_usual = self._runner.steps.took_usual_time()
        self.parts.drafter.observe(batch, output, seconds if is_usual else None)
        if self._threads is not None:
            self._threads.step_ended(seconds)
        return output

    def follow(self, rank_step: RankStep) -> None:
        """Take part in a step of the first rank."""
        self._runner.follow(rank_step)

    def shutdown(self) -> None:
        """Run no step any more. Graphs go first, as they keep the ranks' communicators."""
        self._runner.steps.release()
        if self.parts.grammars is not None:
            self.parts.grammars.shutdown()


def _limits(
    rank: Rank, parts: RankParts, num_blocks: int, window: WindowLimits | None
) -> EngineLimits:
    config, context, states = rank.config, rank.context, parts.states
    return EngineLimits(
        max_model_len=fit_context(rank, num_blocks),
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        vocab_size=rank.vocab_size,
        max_logprobs=rank.vocab_size if config.max_logprobs == -1 else config.max_logprobs,
        kv_cache_dtype=dtype_name(rank.storage),
        weights=describe_weights(parts.model, rank.source.quantization),
        runs_on=f"{dtype_name(context.dtype)} on {context.ops.summary()}",
        synthetic_acceptance_length=config.synthetic_acceptance_length,
        window=window,
        state_slots=states.num_slots if states.has_layers else None,
    )
