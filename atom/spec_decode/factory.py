"""From the configuration to a proposer, and to what asks it."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from atom.config import EngineConfig, SpeculativeOptions
from atom.kv_cache.base import storage_dtype
from atom.model_loader.drafts.eagle3 import load_draft
from atom.model_loader.drafts.mtp import load_mtp
from atom.model_loader.source import ModelSource
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM
from atom.spec_decode.adaptive import AdaptiveLength, spread_lengths
from atom.spec_decode.base import NullProposer, Proposer
from atom.spec_decode.drafter import Drafter
from atom.spec_decode.eagle import EagleProposer
from atom.spec_decode.eagle3_draft_builder import Eagle3DraftBuilder
from atom.spec_decode.length import DraftLength, FixedLength
from atom.spec_decode.lookup import HistoryLookup, Lookup, NullLookup
from atom.spec_decode.mtp import MTPCacheBuilder, MTPProposer
from atom.spec_decode.ngram import NgramProposer
from atom.speculative_methods import SPECULATIVE_METHODS

# (options, configuration, target, its source, layer context) -> a proposer
ProposerBuilder = Callable[
    [SpeculativeOptions, EngineConfig, CausalLM, ModelSource, LayerContext], Proposer
]


def create_proposer(
    config: EngineConfig, target: CausalLM, source: ModelSource, context: LayerContext
) -> Proposer:
    """The proposer that the configuration asks for.

    Raises:
        ConfigError: when the draft does not fit the target, or the target has no prediction
            layers, with the numbers.
    """
    options = config.speculative
    if options is None:
        return NullProposer()
    build = proposer_builder(options.method)
    return build(options, config, target, source, context)


def proposer_builder(method: str) -> ProposerBuilder:
    """What builds the proposer of a method in `SPECULATIVE_METHODS`."""
    module, _, name = SPECULATIVE_METHODS[method].builder.partition(":")
    builder: ProposerBuilder = getattr(importlib.import_module(module), name)
    return builder


def create_drafter(
    options: SpeculativeOptions | None, proposer: Proposer, *, captured: bool
) -> Drafter:
    """What asks `proposer` for drafts.

    Args:
        captured: whether steps are replayed from graphs. They are captured for one row per
            sequence and for all drafts (`GraphRunner`); any number between would run eagerly, so
            the adaptive length chooses between none and all.
    """
    most = proposer.lookahead.num_tokens
    if options is None:
        return Drafter(proposer, "none", NullLookup(), FixedLength(most))
    lookup: Lookup = NullLookup()
    if options.lookup:
        lookup = HistoryLookup(most, options.longest_ngram, options.shortest_ngram)
    length: DraftLength = FixedLength(most)
    if options.adaptive:
        length = AdaptiveLength((0, most) if captured else spread_lengths(most))
    return Drafter(proposer, options.method, lookup, length)


def create_eagle3(
    options: SpeculativeOptions,
    config: EngineConfig,
    target: CausalLM,
    source: ModelSource,
    context: LayerContext,
) -> Proposer:
    """Drafts of a model of its own, which reads the target's hidden states."""
    assert options.model is not None
    draft = load_draft(options.model, target, source, context, config.model)
    storage = storage_dtype(config.cache, context)
    builder = Eagle3DraftBuilder(draft, config.cache.block_size, storage, context.device)
    return EagleProposer(
        draft,
        builder,
        options.num_speculative_tokens,
        config.cache.block_size,
        context.max_model_len,
    )


def create_mtp(
    options: SpeculativeOptions,
    config: EngineConfig,
    target: CausalLM,
    source: ModelSource,
    context: LayerContext,
) -> Proposer:
    """Drafts of the target's own prediction layers."""
    mtp = load_mtp(target, source, context, config.model)
    storage = storage_dtype(config.cache, context)
    return MTPProposer(
        mtp,
        MTPCacheBuilder(mtp, config.cache.block_size, storage, context.device),
        options.num_speculative_tokens,
        config.cache.block_size,
        context.max_model_len,
    )


def create_ngram(options: SpeculativeOptions, *_: object) -> Proposer:
    """Drafts that are looked up in the text so far."""
    return NgramProposer(
        options.num_speculative_tokens, options.longest_ngram, options.shortest_ngram
    )
