"""One rank: its device, its part of the model, its caches and graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from atom.batch import LaunchedStep, Orders, ScheduledBatch, StepOutput
from atom.config import EngineConfig
from atom.distributed.ordered import in_order
from atom.distributed.place import ALONE, Place
from atom.graphs.recorded import create_recorder
from atom.graphs.runner import EagerRunner
from atom.kv_cache.base import (
    KVCacheBuilder,
    KVCacheMemoryError,
    num_spare_blocks,
    plan_kv_cache,
    storage_dtype,
)
from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.memory import kv_cache_budget
from atom.kv_cache.paged import PagedCache
from atom.messages import EngineLimits
from atom.model_engine.carried_rows import CarriedRows
from atom.model_engine.context_len import resolve_max_model_len
from atom.model_engine.expert_ranks import check_experts, expert_ranks, has_spread_experts
from atom.model_engine.input_builder import InputBuilder
from atom.model_engine.largest_steps import largest_steps
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.start_log import log_start
from atom.model_engine.step_graphs import StepGraphs
from atom.model_engine.worker_setup import (
    create_draft_graphs,
    create_grammars,
    create_graph_runner,
    dtype_name,
    fit_context,
    overlaps,
    resolve_dtype,
    take_threads,
)
from atom.model_loader.source import ModelSource, resolve_model
from atom.model_loader.weights import build_model
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.summary import describe_weights
from atom.model_ops.registry import OpTable
from atom.models.base import CausalLM
from atom.models.registry import create_model
from atom.platform import Platform, select_platform
from atom.sampling.decode_rows import KINDS, DecodeSampler
from atom.sampling.ops import SamplingOps
from atom.sampling.rows import SamplingRows
from atom.sampling.sampler import Sampler, SamplingFailedError
from atom.sampling.synthetic import SyntheticAcceptance
from atom.spec_decode.base import Proposer
from atom.spec_decode.drafter import Drafter
from atom.spec_decode.factory import create_drafter, create_proposer
from atom.structured_output.cache import GrammarCache

# (config, target model, its source, layer context) -> proposer
ProposerFactory = Callable[[EngineConfig, CausalLM, ModelSource, LayerContext], Proposer]


class Worker:
    """Runs the model on one device, alone or as a rank among others.

    The first rank is given batches (`launch`) and samples; the others do as it tells (`follow`).

    Attributes:
        ops: the implementations selected for the target's and the draft's ops.
        inputs: copies batches to the device.
        drafts_share_experts: whether the draft model has experts on other ranks.

    Args:
        place: this rank's.
        proposer_factory: creates the proposer; None for the configured one.
        publish: tells the other ranks what to do in this step, once this rank's inputs are built;
            returns what this rank does.
        source: the model, if it is resolved already.
    """

    can_be_interrupted = True
    patience_ms: int | None = None

    def __init__(
        self,
        config: EngineConfig,
        place: Place = ALONE,
        *,
        proposer_factory: ProposerFactory | None = None,
        publish: Callable[[Orders], Orders] | None = None,
        source: ModelSource | None = None,
    ) -> None:
        started = time.perf_counter()
        # When the last step ended.
        self._ended = started
        self._place = place
        platform = select_platform(config.device)
        if platform.is_gpu:
            torch.cuda.set_device(place.local_rank)
        self._is_gpu = platform.is_gpu
        is_ahead = overlaps(config, platform)
        self.depth = 2 if is_ahead else 1
        self._threads = take_threads(config, place, platform)
        source = source or resolve_model(config.model)
        dtype = resolve_dtype(config.model.dtype, source)
        text_config = source.hf_config.get_text_config()
        context_len = resolve_max_model_len(text_config, config.model.max_model_len)
        context = _create_context(config, place, platform, dtype, context_len)
        storage = storage_dtype(config.cache, context)
        self.ops: OpTable = context.ops
        self._model = build_model(
            partial(create_model, source.hf_config), source, context, config.model
        )
        check_experts(config, place, platform, source.name, self._model)
        self._proposer = (proposer_factory or create_proposer)(config, self._model, source, context)
        # Ranks load at their own speed. Whoever failed is noticed here: the first collective on a
        # GPU would wait for it for ever.
        place.control.exchange([0])
        self.drafts_share_experts = has_spread_experts(self._proposer.draft_model)
        self._model.set_aux_layer_ids(self._proposer.aux_layer_ids)
        self._graphs = create_graph_runner(
            config, self._model, self._proposer.lookahead, platform, context_len
        )
        self._grammars = create_grammars(config.model, source) if place.is_first else None
        self._draft_graphs = create_draft_graphs(config, self._proposer, self._graphs)
        # Ranks wait for each other in the middle of a step.
        self._recorder = None
        is_free = place.is_alone and not is_ahead and not config.graphs.enforce_eager
        if is_free and self._graphs is None:
            self._recorder = create_recorder(platform)
        self._drafter = create_drafter(
            config.speculative,
            self._proposer,
            captured=() if self._graphs is None else self._graphs.query_lens,
            # Other ranks must know the number of drafts before the step, and so must the next step.
            waiting_is_free=not platform.is_gpu and place.is_alone and not is_ahead,
            is_ahead=is_ahead,
            recorder=self._recorder,
            graphs=self._draft_graphs,
        )
        self.inputs, self._runner = self._create_runner(
            config, source, context, self._drafter, publish
        )
        self.eos_token_ids = source.eos_token_ids
        self.lookahead = self._proposer.lookahead
        builders: list[KVCacheBuilder] = [
            PagedCache(
                attention_layers(self._model), config.cache.block_size, storage, context.device
            ),
            *self._proposer.kv_cache_builders,
        ]
        num_blocks = self._allocate_kv_cache(config, source, context, builders)
        if self._runner.graphs is not None:
            self._runner.graphs.capture()
        self.limits = EngineLimits(
            max_model_len=fit_context(config, context_len, num_blocks, storage),
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            vocab_size=text_config.vocab_size,
            max_logprobs=(
                text_config.vocab_size if config.max_logprobs == -1 else config.max_logprobs
            ),
            kv_cache_dtype=dtype_name(storage),
            weights=describe_weights(self._model, source.quantization),
            runs_on=f"{dtype_name(dtype)} on {self.ops.summary()}",
            synthetic_acceptance_length=config.synthetic_acceptance_length,
        )
        if place.is_first:
            models = [m for m in (self._model, self._proposer.draft_model) if m is not None]
            seconds = time.perf_counter() - started
            own = self.limits, self.ops, platform, place.tensor.size
            log_start(source, models, *own, dtype, storage, seconds)

    @property
    def grammars(self) -> GrammarCache:
        """Compiled grammars; only the first rank has any."""
        assert self._grammars is not None, "only the first rank samples"
        return self._grammars

    def _create_runner(
        self,
        config: EngineConfig,
        source: ModelSource,
        context: LayerContext,
        drafter: Drafter,
        publish: Callable[[Orders], Orders] | None = None,
    ) -> tuple[InputBuilder, ModelRunner]:
        vocab_size = source.hf_config.get_text_config().vocab_size
        scheduler, device = config.scheduler, context.device
        rows = SamplingRows(
            scheduler.max_num_seqs, vocab_size, source.eos_token_ids, device, self._grammars
        )
        ops = SamplingOps.resolve(context.ops, vocab_size)
        synthetic = config.synthetic_acceptance_length
        # Steps with other numbers of drafts are recorded as one, if they have as many in all.
        ragged_most = 0 if self._recorder is None else drafter.max_drafts
        is_whole = self._place.tensor.size == 1
        choose_greedily = None if is_whole else self._model.output_head.choose_greedily
        sampler = Sampler(
            self._model.compute_logits,
            rows,
            vocab_size,
            device,
            ops,
            self._place.tensor,
            others_wait=not self._place.is_alone,
            synthetic=None if synthetic is None else SyntheticAcceptance(synthetic),
            choose_greedily=choose_greedily,
            ragged_most=ragged_most,
        )
        forward = self._graphs or EagerRunner(self._model.forward)
        carried = None
        if self.depth > 1:
            given = scheduler.max_num_seqs, drafter.max_drafts, device, context.ops
            carried = CarriedRows.create(*given, self._place.tensor)
        inputs = InputBuilder(
            forward,
            sampler,
            None if self._graphs is None else self._graphs.plan,
            max_num_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=context.max_model_len,
            block_size=config.cache.block_size,
            device=device,
            drafts=self._proposer.reads_steps,
            in_place=self._recorder is not None,
            carried=carried,
            ragged_len=ragged_most + 1,
        )
        graphs = None
        if self._graphs is not None:
            graphs = StepGraphs(
                self._graphs,
                inputs,
                DecodeSampler(self._model.compute_logits, rows, ops, choose_greedily),
                self._proposer,
                self._draft_graphs,
                # Other ranks know whether rows are greedy, and no more.
                KINDS if self._place.is_alone else KINDS[:1],
                synthetic=synthetic is not None,
            )
        parts = inputs, forward, sampler, drafter
        return inputs, ModelRunner(*parts, publish, self._recorder, carried, graphs)

    def _allocate_kv_cache(
        self,
        config: EngineConfig,
        source: ModelSource,
        context: LayerContext,
        builders: list[KVCacheBuilder],
    ) -> int:
        """Size the KV cache pool, allocate it and bind it to the attention layers. Returns its
        blocks.
        """

        def profile() -> None:
            self._allocate(builders, 1)
            self._run_largest_steps(config, source, context)

        def graph_bytes() -> int:
            return 0 if self._runner.graphs is None else self._runner.graphs.estimate_bytes()

        budget = kv_cache_budget(
            config.cache, context.ops.platform, profile, graph_bytes, self._place.num_local
        )
        plan = plan_kv_cache(
            budget,
            [builder.compute_block_bytes() for builder in builders],
            config.cache.block_size,
            config.scheduler.max_num_seqs * context.max_model_len,
            num_spare_blocks(context.device),
        )
        num_blocks = min(own for (own,) in self._place.control.exchange([plan.num_blocks]))
        self._allocate(builders, num_blocks)
        return num_blocks

    def _run_largest_steps(
        self, config: EngineConfig, source: ModelSource, context: LayerContext
    ) -> None:
        """Run the steps that need the most memory, with a pool of one block.

        Raises:
            KVCacheMemoryError: when the device runs out of memory.
        """
        # Always the full number of drafts, and these steps do not count in choosing their number.
        most = self._drafter.max_drafts
        drafter = Drafter(self._proposer, "largest", None, None, waiting_is_free=False)
        _, runner = self._create_runner(config, source, context, drafter)
        vocab_size = source.hf_config.get_text_config().vocab_size
        try:
            for batch in largest_steps(config, context.max_model_len, most, vocab_size):
                if self._place.is_first:
                    runner.launch(batch).collect()
                else:
                    runner.follow(Orders.of(batch, drafter.max_drafts))
        except (torch.OutOfMemoryError, SamplingFailedError) as failed:
            error = failed.cause if isinstance(failed, SamplingFailedError) else failed
            if not isinstance(error, torch.OutOfMemoryError):
                raise error from None
            scheduler = config.scheduler
            raise KVCacheMemoryError(
                f"the device has no memory for the largest step that the options allow "
                f"({scheduler.max_num_batched_tokens} tokens, {scheduler.max_num_seqs} sequences "
                f"of up to {context.max_model_len} tokens, {most} drafts each): {error}; lower "
                f"--max-num-batched-tokens, --max-num-seqs or --max-model-len"
            ) from error

    def _allocate(self, builders: list[KVCacheBuilder], num_blocks: int) -> None:
        for builder in builders:
            builder.allocate_kv_cache_tensors(num_blocks)
        bind_kv_caches(self._model, builders)
        if self._proposer.draft_model is not None:
            bind_kv_caches(self._proposer.draft_model, builders)

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        started = time.perf_counter()
        launched = self._runner.launch(batch)
        collect = partial(self._collect, batch, launched, started, time.perf_counter())
        return replace(launched, collect=collect)

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
        is_usual = self._recorder is None or self._recorder.take_usual()
        self._drafter.observe(batch, output, seconds if is_usual else None)
        if self._threads is not None:
            self._threads.step_ended(seconds)
        return output

    def follow(self, orders: Orders) -> None:
        """Take part in a step of the first rank."""
        self._runner.follow(orders)

    def shutdown(self) -> None:
        """Run no step any more. Graphs go first, as they keep the ranks' communicators."""
        if self._runner.graphs is not None:
            self._runner.graphs.release()
        if self._recorder is not None:
            self._recorder.release()
        if self._grammars is not None:
            self._grammars.shutdown()


def _create_context(
    config: EngineConfig, place: Place, platform: Platform, dtype: torch.dtype, context_len: int
) -> LayerContext:
    """What this rank's layers are built with."""
    # Of ranks on several machines this one sees only some.
    is_local = place.num_local >= place.tensor.size
    ranks = replace(place.tensor, peer_access=is_local)
    if config.sums_in_order:
        ranks = in_order(ranks)
    context = LayerContext.create(
        dtype, context_len, platform, ranks, batch_invariant=config.batch_invariant
    )
    # With its index: another thread's current device is the first one.
    device = torch.device("cuda", place.local_rank) if platform.is_gpu else context.device
    return replace(context, device=device, experts=expert_ranks(config, place, ranks))
