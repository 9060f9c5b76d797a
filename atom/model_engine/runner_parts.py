"""Builds a `ModelRunner` from the parts of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import torch

from atom.batch import LaunchedStep, RankStep, ScheduledBatch, StepOutput
from atom.kv_cache.block_tables import BlockTables
from atom.kv_cache.builders import attention_layers
from atom.kv_cache.canary import KVCanary
from atom.kv_cache.windows import WindowedBlockTables
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.rank import Rank
from atom.model_engine.rank_parts import RankParts
from atom.model_engine.step.carried import CarriedRows
from atom.model_engine.step.input_buffers import NothingCarried, StepInput
from atom.model_engine.step.input_builder import InputBuilder
from atom.model_engine.step.planned_graphs import draft_numbers
from atom.model_engine.step.recorded_steps import RecordedSteps
from atom.model_engine.step.step_graphs import StepGraphs
from atom.model_engine.step.step_images import NoImages, StepImages
from atom.model_engine.step.step_runner import StepRunner
from atom.models.vision.encoder_cache import EncoderCache
from atom.sampling.ops import SamplingOps
from atom.sampling.rows import SamplingRows
from atom.sampling.sampler import Sampler
from atom.sampling.synthetic import SyntheticAcceptance


class Launcher(Protocol):
    """Launches steps."""

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """As `ModelRunner.launch`."""
        ...


class WatchedInputs(InputBuilder):
    """Keeps the newest step's inputs.

    Attributes:
        newest: None before the first step.
    """

    newest: StepInput | None = None

    def build(self, batch: ScheduledBatch) -> StepInput:
        self.newest = super().build(batch)
        return self.newest


class WatchedRunner:
    """Runs steps and shows them to the canary, in the order in which their results are read."""

    def __init__(self, runner: ModelRunner, canary: KVCanary) -> None:
        assert isinstance(runner.inputs, WatchedInputs)
        self._launch = runner.launch
        self._inputs = runner.inputs
        self._canary = canary

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """As the runner's; its results are checked once they are there."""
        launched = self._launch(batch)
        if batch.sequences:
            assert self._inputs.newest is not None
            # The next step will write its own in their place.
            tables = self._inputs.newest.model_input.attention.block_tables.clone()
        else:
            tables = torch.empty(0, 0, dtype=torch.int32)

        def collect() -> StepOutput:
            output = launched.collect()
            self._canary.check(batch, tables.cpu().numpy(), output.sequences)
            return output

        return msgspec.structs.replace(launched, collect=collect)


def create_runner(
    rank: Rank, parts: RankParts, publish: Callable[[RankStep], RankStep] | None = None
) -> ModelRunner:
    """A runner with inputs and sampling rows of its own.

    Args:
        publish: as for `ModelRunner`.
    """
    ops = SamplingOps.resolve(rank.context.ops, rank.vocab_size)
    rows = SamplingRows(
        rank.config.scheduler.max_num_seqs,
        rank.vocab_size,
        rank.source.eos_token_ids,
        rank.context.device,
        parts.grammars,
    )
    sampler = _create_sampler(rank, parts, rows, ops)
    carried = _create_carried(rank, parts)
    inputs = _create_inputs(rank, parts, sampler, carried)
    steps = _create_steps(rank, parts, sampler, inputs)
    return ModelRunner(inputs, steps, sampler, parts.drafter, publish, parts.states)


def create_watch(rank: Rank, parts: RankParts, runner: ModelRunner, num_blocks: int) -> Launcher:
    """What launches a runner's steps: itself, or a canary around it. Its caches must be bound."""
    cache = rank.config.cache
    if cache.debug_kv_canary is None:
        return runner
    layers = attention_layers(parts.model).values()
    canary = KVCanary(
        # Other layers have other blocks.
        [layer.kv_cache for layer in layers if parts.windows is None or layer.window is None],
        num_blocks,
        cache.block_size,
        checks_successors=parts.proposer.lookahead.kv_depends_on_successor,
        raises=cache.debug_kv_canary == "raise",
    )
    return WatchedRunner(runner, canary)


def _create_sampler(rank: Rank, parts: RankParts, rows: SamplingRows, ops: SamplingOps) -> Sampler:
    length = rank.config.synthetic_acceptance_length
    return Sampler(
        parts.model.compute_logits,
        rows,
        rank.vocab_size,
        rank.context.device,
        ops,
        rank.groups.tp,
        others_wait=not rank.groups.is_alone,
        synthetic=None if length is None else SyntheticAcceptance(length),
        choose_greedily=_greedy_choice(rank, parts),
        ragged_most=_ragged_most(parts),
    )


def _create_carried(rank: Rank, parts: RankParts) -> NothingCarried:
    if not rank.overlaps:
        return NothingCarried()
    ops = rank.context.ops
    return CarriedRows(
        rank.config.scheduler.max_num_seqs,
        parts.drafter.max_drafts,
        rank.context.device,
        ops.resolve("take_carried", torch.float32),
        ops.resolve("leave_carried", torch.float32),
        rank.groups.tp,
    )


def _create_inputs(
    rank: Rank,
    parts: RankParts,
    sampler: Sampler,
    carried: NothingCarried,
) -> InputBuilder:
    scheduler = rank.config.scheduler
    create = InputBuilder if rank.config.cache.debug_kv_canary is None else WatchedInputs
    block_size, graphs = rank.config.cache.block_size, parts.graphs
    # The last bound of graphs has room for padding behind the longest context.
    longest = 0 if graphs is None else graphs.plan.table_width
    width = max(-(-rank.context.max_model_len // block_size), longest)
    if parts.windows is None:
        tables = BlockTables(scheduler.max_num_seqs, width, rank.context.device)
    else:
        tables = WindowedBlockTables(scheduler.max_num_seqs, width, parts.windows)
    return create(
        sampler,
        tables,
        graphs,
        max_num_tokens=scheduler.max_num_batched_tokens,
        block_size=block_size,
        drafts=parts.proposer.reads_steps,
        in_place=parts.recorder is not None,
        carried=carried,
        take=rank.context.ops.resolve("take_inputs", rank.context.dtype),
        ragged_len=_ragged_most(parts) + 1,
        selects_rows=parts.recorder is not None and not parts.proposer.reads_hidden_states,
        images=_create_images(rank, parts),
    )


def _create_images(rank: Rank, parts: RankParts) -> NoImages:
    encoder, context = parts.model.image_encoder, rank.context
    if encoder is None:
        return NoImages()
    num_bytes = rank.config.cache.mm_cache_memory
    cache = EncoderCache(encoder, num_bytes, context.dtype, context.device)
    return StepImages(cache, context.device, parts.proposer.reads_images)


def _create_steps(
    rank: Rank, parts: RankParts, sampler: Sampler, inputs: InputBuilder
) -> StepRunner:
    if parts.recorder is not None:
        return RecordedSteps(parts.recorder, parts.forward, sampler, parts.proposer)
    if parts.graphs is None:
        return StepRunner(parts.forward, sampler, parts.proposer)
    return StepGraphs(
        parts.graphs,
        inputs,
        sampler,
        parts.proposer,
        draft_numbers(rank, parts.proposer),
        synthetic=rank.config.synthetic_acceptance_length is not None,
    )


def _greedy_choice(rank: Rank, parts: RankParts) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """How ranks find the tokens of greedy rows together; None on a rank that has all logits."""
    return None if rank.groups.tp.size == 1 else parts.model.output_head.choose_greedily


def _ragged_most(parts: RankParts) -> int:
    """Steps with other numbers of drafts are recorded as one, if they have as many in all."""
    return 0 if parts.recorder is None else parts.drafter.max_drafts
