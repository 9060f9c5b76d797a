"""Creates the proposer and the drafter from the configuration."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from atom.batch import Lookahead
from atom.config import EngineConfig
from atom.distributed.parallel_state import SINGLE
from atom.graphs.recorded import StepRecorder
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_loader.source import ModelSource
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM
from atom.options.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeOptions
from atom.options.speculative_methods import SPECULATIVE_METHODS
from atom.spec_decode.draft_policy import AdaptiveDrafts, DraftPolicy, spread_numbers
from atom.spec_decode.drafter import Drafter
from atom.spec_decode.grammar import GrammarDrafter
from atom.spec_decode.proposers.base import NullProposer, Proposer
from atom.spec_decode.step_times import ROW_OF_CPU, ROW_OF_GPU
from atom.spec_decode.suffix_index import BYTES_PER_TOKEN
from atom.spec_decode.suffix_lookup import RecentOutputs, SuffixLookup

logger = logging.getLogger(__name__)

ProposerBuilder = Callable[[SpeculativeOptions, EngineConfig, DraftTarget], Proposer]


def create_proposer(
    config: EngineConfig, target: CausalLM, source: ModelSource, context: LayerContext
) -> Proposer:
    """Create the configured proposer.

    Raises:
        ConfigError: when the draft does not fit the target, or the target has no prediction layers,
            with the numbers.
    """
    options = config.speculative
    if options is None:
        return NullProposer()
    if options.draft_tensor_parallel_size == 1:
        context = replace(context, group=SINGLE, experts=SINGLE)
    aux, quantization = options.aux_layer_convention, options.quantization
    draft_target = DraftTarget(target, source, context, config.model, aux, quantization)
    return proposer_builder(options.method)(options, config, draft_target)


def proposer_builder(method: str) -> ProposerBuilder:
    """The function that builds the proposer of a method in `SPECULATIVE_METHODS`."""
    module, _, name = SPECULATIVE_METHODS[method].builder.partition(":")
    builder: ProposerBuilder = getattr(importlib.import_module(module), name)
    return builder


def create_drafter(
    options: SpeculativeOptions | None,
    proposer: Proposer,
    *,
    captured: Sequence[int],
    sync_is_free: bool,
    is_ahead: bool,
    recorder: StepRecorder | None,
    grammars: bool = True,
    caps: bool = False,
) -> Drafter:
    """Create the drafter: proposer, lookup, grammars and draft length.

    Args:
        captured: the numbers of queries per sequence that graphs exist for (`GraphRunner`), to
            which others are padded; none if steps are not replayed from graphs. The adaptive length
            then verifies as many drafts, and makes none, all of the proposer's, or as many as the
            lookup finds.
        sync_is_free: whether the device is the CPU, where a host sync costs nothing.
        is_ahead: whether steps are launched before it is known what the last one drafts.
        recorder: replays steps that recur; None if every step runs op by op.
        grammars: whether grammars draft, too.
        caps: whether nobody drafts more than the proposer may: each draft more takes a version of
            all recurrent states.
    """
    if options is None:
        return Drafter(proposer, "none", None, None, sync_is_free=sync_is_free)
    most = proposer.lookahead.num_tokens
    lookup: SuffixLookup | None = None
    if options.looks_up:
        recent = _recent_outputs(options.suffix_cache_tokens)
        if options.lookup and (captured or not options.adaptive) and not caps:
            # Steps on a CPU are recorded for each number of drafts; many numbers cost more than
            # long drafts bring.
            most = MAX_SPECULATIVE_TOKENS
        lookup = SuffixLookup("lookup" if options.lookup else options.method, most, recent)
    policy: DraftPolicy | None = None
    if options.adaptive:
        num_proposed = proposer.lookahead.num_tokens
        # Few numbers, since each is captured or recorded.
        numbers = {0, num_proposed} if captured else {*spread_numbers(num_proposed)}
        choices = sorted({*numbers, most})
        policy = AdaptiveDrafts(
            choices,
            options.method,
            "" if lookup is None else lookup.source,
            made=num_proposed if proposer.reads_steps else 0,
            padded=[n - 1 for n in captured] or (choices if is_ahead else ()),
            row_guess=ROW_OF_CPU if sync_is_free else ROW_OF_GPU,
            recording=None if recorder is None else lambda: 2 * recorder.seconds_to_record,
        )
    # On a GPU grammars draft no more than others: memory was measured, and kernels were compiled,
    # for steps that verify `most` of each sequence.
    is_free = sync_is_free and not (captured or caps)
    forced = GrammarDrafter(MAX_SPECULATIVE_TOKENS if is_free else most)
    return Drafter(
        proposer,
        options.method,
        lookup,
        policy,
        forced if grammars else None,
        sync_is_free=sync_is_free,
        is_ahead=is_ahead,
    )


def _recent_outputs(max_tokens: int) -> RecentOutputs | None:
    if not max_tokens:
        return None
    logger.info(
        "drafts are looked up in recent outputs of %d tokens, which take up to %d MB",
        max_tokens,
        max_tokens * BYTES_PER_TOKEN // 10**6,
    )
    return RecentOutputs(max_tokens)


def create_suffix(options: SpeculativeOptions, *_: object) -> Proposer:
    """A `NullProposer`: all drafts come from the lookup."""
    return NullProposer(Lookahead(options.num_speculative_tokens))
