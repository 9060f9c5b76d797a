"""Rehearses the start of an engine on GPUs that are not there, on tensors without data.

All ranks build their models as for serving and choose their ops; the first runs the steps that
size the memory, plans its graphs and decodes. For a process of its own: kernels that were imported
for one platform do not run on another.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from atom.config import DEFAULT_GPU_MEMORY_UTILIZATION, EngineConfig
from atom.distributed.parallel_state import ALONE, SINGLE
from atom.kv_cache.base import KVCacheMemoryError, num_spare_blocks, plan_kv_cache
from atom.kv_cache.builders import CacheBuilders
from atom.model_engine.rank import Rank
from atom.model_engine.runner_parts import create_runner
from atom.model_engine.start_up.kv_memory import (
    allocate_pools,
    create_builders,
    window_need,
)
from atom.model_engine.start_up.largest_steps import largest_steps
from atom.model_engine.start_up.same_ops import differences
from atom.model_engine.start_up.warm_up import warm_up_limits
from atom.model_engine.start_up.warm_up_steps import warm_ups
from atom.model_loader.quantization import on_platform
from atom.model_loader.sketch import weight_bytes
from atom.model_loader.source import ModelSource
from atom.model_ops.kernels import probe
from atom.model_ops.moe import FusedMoE
from atom.model_ops.op_table.op_report import OpLine
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpTable
from atom.models.base import CausalLM
from atom.models.registry import create_model
from atom.plan.gpus import Gpu
from atom.plan.layouts import RUNTIME_BYTES, expected_visited
from atom.plan.rehearsal.libraries import KNOWN, pretended_library
from atom.plan.rehearsal.meter import Launches, Meter
from atom.plan.rehearsal.ranks import META, BuiltRank, Setting, held_weight_bytes
from atom.plan.rehearsal.registry import converting_once
from atom.plan.rehearsal.repeated import RepeatedLayers, decoder_layers
from atom.plan.rehearsal.triton_launches import list_launches
from atom.platform import Platform, PretendedGpu, pretend
from atom.spec_decode.drafter import Drafter

# What the table of ops would lose without a library.

# By what was asked.
Table = Mapping[str, OpLine]


def table_of(ops: OpTable) -> Table:
    """The choices made so far."""
    return {line.asked: line for line in ops.lines()}


def lost(whole: Table, without: Table) -> list[str]:
    """Ops that another implementation runs in `without`, one phrase each, with the reason."""
    found: dict[str, None] = {}
    for asked, better in whole.items():
        worse = without.get(asked)
        if worse is not None and worse.runs != better.runs:
            op = asked.partition(" ")[0]
            found[f"{op} runs by {worse.runs}, not {better.runs} ({worse.why})"] = None
    return list(found)


@dataclass(frozen=True)
class Memory:
    """Bytes of the first rank, which needs most.

    Attributes:
        room: that the engine may use.
        weights, draft: of the models, as their ops read them.
        buffers: that a rank keeps beside them.
        runtime: assumed for the driver, code and libraries.
        steps: the peak of the largest steps.
        graphs: of capturing and keeping them.
        block: of one block of the KV cache.
        num_blocks: that there is room for, or that are asked for; 0 if there is no room.
        shortfall: why there is no room for one context of the longest; None if there is.
    """

    room: int
    weights: int
    draft: int
    buffers: int
    runtime: int
    steps: int
    graphs: int
    block: int
    num_blocks: int
    shortfall: str | None

    @property
    def kv_cache(self) -> int:
        return self.block * self.num_blocks


@dataclass(frozen=True)
class Decoding:
    """A decode step of one sequence, with the drafts after it.

    Attributes:
        launches: of both, op by op; a graph has as many nodes.
        bytes_read: weights that the target reads, of the experts those that so many rows visit.
        draft_bytes_read: weights of the draft that all its passes read.
    """

    num_drafts: int
    launches: Launches
    bytes_read: int
    draft_bytes_read: int


@dataclass(frozen=True)
class Graphs:
    """Attributes:
    layers, choices, drafts: how many are captured.
    layers_launches, others_launches: of the largest of the first, and of the others together.
    """

    layers: int = 0
    choices: int = 0
    drafts: int = 0
    layers_launches: int = 0
    others_launches: int = 0


@dataclass(frozen=True)
class Rehearsed:
    """What a start would have shown.

    Attributes:
        num_ranks: that were built.
        context_len: tokens of the longest context.
        ops: the table of ops of the first rank.
        differing: what the ranks would not run alike, one phrase each.
        missing: libraries that would change which kernels run, one phrase for each op.
        stored: bytes of the checkpoint's weights that are read, over all ranks once.
        kernels: of Triton, that these steps alone compile.
    """

    config: EngineConfig
    gpu: Gpu
    installed: frozenset[str]
    num_ranks: int
    context_len: int
    ops: str
    differing: list[str]
    missing: list[str]
    memory: Memory
    graphs: Graphs
    decoding: Decoding
    stored: int
    kernels: int

    @property
    def is_ready(self) -> bool:
        return self.memory.shortfall is None and not self.differing and not self.missing


class Rehearser:
    """A process that pretends to have GPUs of one kind; there is one a process.

    Raises:
        ConfigError: without Triton.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._platform = Platform(gpu.kind, gpu.arch, True)
        self._meter = Meter()
        self._registry = converting_once(OPS)
        gc.freeze()  # modules need not be looked through before each measurement
        pretend(PretendedGpu(self._platform, gpu.compute_units))
        list_launches(self._platform, self._meter)

    def rehearse(
        self,
        config: EngineConfig,
        source: ModelSource,
        installed: frozenset[str],
        num_built: int | None = None,
    ) -> Rehearsed:
        """Args:
        num_built: how many ranks are built, the first ones; None for all.

        Raises:
            ConfigError: when the model or an option cannot be honoured.
            OpUnavailableError: when no kernel runs for an op, or not the one demanded.
        """
        setting = Setting(config, source, self._platform, self._registry, self._meter)
        count = num_built or config.parallel.tensor_parallel_size
        self._meter.launches = Launches()
        tables = {}
        with self._having(installed), torch.inference_mode():
            first = BuiltRank.build(setting, 0)
            run = _FirstRank(first, self._gpu, self._meter)
            num_blocks = run.memory.num_blocks
            tables[0] = table_of(first.rank.context.ops)
            for number in range(1, count):
                tables[number] = _table(BuiltRank.build(setting, number), num_blocks)
        return Rehearsed(
            config=config,
            gpu=self._gpu,
            installed=installed,
            num_ranks=count,
            context_len=first.rank.context.max_model_len,
            ops=first.rank.context.ops.describe(),
            differing=differences(tables),
            missing=self._missing(setting, installed, num_blocks),
            memory=run.memory,
            graphs=run.graphs,
            decoding=run.decoding,
            stored=self._stored(setting),
            kernels=len(self._meter.launches.kernels),
        )

    def _having(self, installed: frozenset[str]) -> AbstractContextManager[None]:
        return probe.replaced(pretended_library(self._gpu, installed, self._meter))

    def _missing(self, setting: Setting, installed: frozenset[str], num_blocks: int) -> list[str]:
        """What each library that is not there would change if all others were."""
        every = frozenset(KNOWN[self._gpu.kind])
        if every <= installed:
            return []
        tables = {}
        for found in (every, *(every - {name} for name in sorted(every - installed))):
            with self._having(found):
                tables[found] = _table(BuiltRank.build(setting, 0), num_blocks)
        whole = tables.pop(every)
        return [
            f"without {', '.join(every - found)}: {phrase}"
            for found, table in tables.items()
            for phrase in lost(whole, table)
        ]

    def _stored(self, setting: Setting) -> int:
        """Bytes of the target's weights as stored, those of all ranks."""
        config, source = setting.config, setting.source
        rank = Rank.create(config, ALONE, setting.platform, source)
        table = OpTable(setting.platform, setting.registry, config.batch_invariant)
        quant = on_platform(source.quantization, setting.platform)
        context = replace(rank.context, ops=table, device=META, quant=quant, experts=SINGLE)
        model = create_model(source.hf_config, context, config.model.model_impl)
        return weight_bytes(model).stored


class _FirstRank:
    """What the first rank runs, as far as it has no data."""

    def __init__(self, built: BuiltRank, gpu: Gpu, meter: Meter) -> None:
        self._built = built
        self._gpu = gpu
        self._meter = meter
        before = meter.live
        RepeatedLayers(meter).count(decoder_layers(built.parts.model))
        with meter:
            self._runner = create_runner(built.rank, built.parts)
            buffers = meter.live - before
            builders = create_builders(built.rank, built.parts)
            allocate_pools(built.rank, builders, built.parts, 1, 1)
            steps = self._peak_of_largest_steps()
            self.graphs, graph_bytes = self._plan_graphs()
        self.memory = self._size(builders, buffers, steps, graph_bytes)
        num_blocks = max(self.memory.num_blocks, 1)
        # Not measured: a pool is as large as there is room.
        allocate_pools(built.rank, builders, built.parts, num_blocks, num_blocks)
        with meter:
            self.decoding = self._decode(num_blocks)

    def _peak_of_largest_steps(self) -> int:
        rank, parts = self._built.rank, self._built.parts
        drafter = Drafter(parts.proposer, "largest", None, None, sync_is_free=False)
        runner = create_runner(rank, replace(parts, drafter=drafter))
        context_len, most = rank.context.max_model_len, parts.drafter.max_drafts
        batches = largest_steps(rank.config, context_len, most, rank.vocab_size)
        return max(
            self._meter.peak_of(lambda batch=batch: runner.launch(batch).collect())  # type: ignore[misc]
            for batch in batches
        )

    def _plan_graphs(self) -> tuple[Graphs, int]:
        steps = self._runner.steps
        if not any(steps.num_graphs):
            return Graphs(), 0
        launches: list[int] = []

        def peak_of(work: Callable[[], object]) -> int:
            before = self._meter.launches.total
            peak = self._meter.peak_of(work)
            launches.append(self._meter.launches.total - before)
            return peak

        num_bytes = steps.estimate_graph_bytes(peak_of)
        return Graphs(*steps.num_graphs, *launches), num_bytes

    def _size(self, builders: CacheBuilders, buffers: int, steps: int, graphs: int) -> Memory:
        """As `kv_memory.allocate_kv_cache`."""
        rank, parts = self._built.rank, self._built.parts
        options, draft = rank.config.cache, parts.proposer.draft_model
        share = options.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
        whole = held_weight_bytes(*parts.models)
        states = builders.states.num_bytes
        room = int(self._gpu.memory * share)
        left = room - whole - buffers - states - RUNTIME_BYTES - steps - graphs
        if options.kv_cache_memory is not None:
            left = min(left, options.kv_cache_memory - states)
        blocks = [builder.compute_block_bytes() for builder in builders.others]
        window = window_need(rank, builders)
        size, context_len = options.block_size, rank.context.max_model_len
        in_context = -(-context_len // size)
        num_blocks, shortfall = 0, None
        try:
            builders.states.check(left)
            most = rank.config.scheduler.max_num_seqs * in_context * size
            spare = num_spare_blocks(rank.context.device)
            plan = plan_kv_cache(left, blocks, size, most, spare, window)
            num_blocks = plan.num_blocks
        except KVCacheMemoryError as error:
            shortfall = str(error)
        if shortfall is None and num_blocks < in_context:
            shortfall = (
                f"the KV cache has room for {num_blocks * size} tokens, and a context has up to "
                f"{context_len}: lower --max-model-len"
            )
        target = held_weight_bytes(parts.model)
        draft_bytes = whole - target if draft is not None else 0
        return Memory(
            room,
            target,
            draft_bytes,
            buffers + states,
            RUNTIME_BYTES,
            steps,
            graphs,
            builders.bytes_of(1, 1),
            num_blocks,
            shortfall,
        )

    def _decode(self, num_blocks: int) -> Decoding:
        """A short prompt, and the step that verifies its drafts and makes more."""
        rank, parts = self._built.rank, self._built.parts
        drafter = Drafter(parts.proposer, "decode", None, None, sync_is_free=False)
        runner = self._runner.rehearsing(drafter)
        limits = warm_up_limits(rank, parts.drafter.max_drafts, num_blocks)
        prompt, decode, *_ = next(warm_ups(limits)).batches
        before, self._meter.launches = self._meter.launches, Launches()
        runner.launch(prompt).collect()
        self._meter.launches = Launches()
        runner.launch(decode).collect()
        launches, self._meter.launches = self._meter.launches, before
        rows = 1 + limits.num_drafts
        return Decoding(
            limits.num_drafts,
            launches,
            _bytes_read(parts.model, _top_k(rank), rows),
            limits.num_drafts * self.memory.draft,
        )


def _top_k(rank: Rank) -> int:
    text = rank.source.hf_config.get_text_config().to_dict()
    return int(text.get("num_experts_per_tok") or 0)


def _bytes_read(model: CausalLM, top_k: int, rows: int) -> int:
    """Weights that a step of so many rows reads: of experts, those that rows choose by chance."""
    total = held_weight_bytes(model)
    if any(True for _ in model.output_head.parameters()):  # not the embedding's own
        total -= held_weight_bytes(model.token_embedding)
    if model.image_encoder is not None:
        total -= held_weight_bytes(model.image_encoder)
    for experts in (m for m in model.modules() if isinstance(m, FusedMoE)):
        held = held_weight_bytes(experts)
        visited = expected_visited(experts.num_experts, top_k, rows)
        total -= int(held * (1 - visited / experts.num_experts))
    return total


def _table(built: BuiltRank, num_blocks: int) -> Table:
    """What a rank would run, without running it."""
    create_runner(built.rank, built.parts)
    builders, count = create_builders(built.rank, built.parts), max(num_blocks, 1)
    allocate_pools(built.rank, builders, built.parts, count, count)
    return table_of(built.rank.context.ops)
