"""Block drafters: all drafts come from one pass over a block of masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from atom.config import ConfigError, EngineConfig
from atom.kv_cache.base import KVCacheBuilder, storage_dtype
from atom.kv_cache.builders import attention_layers
from atom.kv_cache.paged import PagedCache
from atom.model_loader.drafts.block import load_block_draft
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_loader.source import ModelSource
from atom.model_ops.kernels.torch.speculation import place_blocks
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM
from atom.models.block_draft.draft import BlockDraft
from atom.spec_decode.base import Lookahead, Proposal, Proposer, VerifiedStep
from atom.spec_decode.chain import ChainStart
from atom.spec_decode.choice import Chosen, DraftChoice, create_choice, together
from atom.spec_decode.mask_rows import MaskRows, PlaceOp, by_draft
from atom.speculative_options import SpeculativeOptions


class BlockProposer:
    """Proposes up to `num_speculative_tokens` drafts from a block of the draft's own size.

    Every step writes the draft's keys and values of all tokens that the target just computed, its
    context. Rows of rejected drafts lie behind the newest token, where the block is written, and
    each block is overwritten by the next: neither is ever read as context. The block has as many
    rows as in training, however many drafts are asked for, so drafts do not depend on their number.
    Where a sequence is about to end, rows that have no slot are seen by none.
    """

    reads_steps = True
    reads_hidden_states = False

    def __init__(
        self,
        draft: BlockDraft,
        kv_cache_builder: KVCacheBuilder,
        num_speculative_tokens: int,
        block_size: int,
        max_model_len: int,
        place: PlaceOp = place_blocks,
        choice: DraftChoice | None = None,
    ) -> None:
        self.lookahead = Lookahead(
            num_speculative_tokens,
            expected_acceptance=draft.config.expected_acceptance,
            num_slots=max(draft.config.block_size, num_speculative_tokens),
        )
        self.draft_model: nn.Module | None = draft
        self.aux_layer_ids = draft.aux_layer_ids
        self.kv_cache_builders: Sequence[KVCacheBuilder] = (kv_cache_builder,)
        self._draft = draft
        self._choice = choice or DraftChoice(draft.target_ids)
        self._rows = MaskRows(draft.config.mask_token_id, block_size, max_model_len, place)

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        model_input = step.model_input
        states = self._draft.fuse(step.model_output.aux_hidden_states)
        self._draft.write_context(states, model_input.positions, model_input.attention)
        if num_drafts == 0 or not len(step.last_rows):
            return Proposal(step.next_token_ids.new_empty((len(step.last_rows), num_drafts)))
        anchors = step.next_token_ids[step.last_rows]
        start = self._rows.start(step, anchors, self._draft.config.block_size)
        return self._run(start, num_drafts)

    def _run(self, start: ChainStart, num_drafts: int) -> Proposal:
        """The pass over the blocks, and a walk along them."""
        draft, choice = self._draft, self._choice
        config, count = draft.config, len(start.token_ids)
        states = by_draft(draft(*self._rows.place(start, config.block_size)), count)
        first = 0 if config.samples_anchor else 1
        states = states[first : first + num_drafts]
        guide = start.guide
        if start.race is None and guide is None and not choice.confident and not draft.walks:
            # No logits, which every rank would need all of.
            greedy = draft.head.argmax(states.flatten(0, 1), draft.target_ids)
            return Proposal(greedy.view(num_drafts, count).t().contiguous())
        logits = draft.compute_logits(states.flatten(0, 1)).view(num_drafts, count, -1)
        drafts: list[Chosen] = []
        previous, carried = start.token_ids, draft.begin_path(states[0])
        for i in range(num_drafts):
            row = logits[i]
            if guide is not None:
                # Before the head, which may look at the best tokens alone.
                guide.restrict(row, choice.token_ids)
            scores, carried = draft.score(row, states[i], previous, carried)
            chosen = choice.choose(scores, start.race, start.positions, ahead=2 + i)
            if guide is not None:
                guide.take(chosen.token_ids)
            if choice.confident and config.confidence is not None:
                chosen = replace(chosen, confidences=draft.confidence(states[i], previous))
            drafts.append(chosen)
            previous = chosen.token_ids
        return together(drafts)


def create_block(
    options: SpeculativeOptions,
    config: EngineConfig,
    target: CausalLM,
    source: ModelSource,
    context: LayerContext,
) -> Proposer:
    """A proposer with a block drafter, of the kind that the method names.

    Raises:
        ConfigError: for more drafts than a block has.
    """
    assert options.model is not None
    said = options.aux_layer_convention, options.quantization
    loaded_for = DraftTarget(target, source, context, config.model, *said)
    draft = load_block_draft(options.model, loaded_for, options.method)
    if options.num_speculative_tokens > draft.config.max_drafts:
        raise ConfigError(
            f"num_speculative_tokens={options.num_speculative_tokens} is more than the "
            f"{draft.config.max_drafts} drafts that {options.model} makes of a block of "
            f"{draft.config.block_size}"
        )
    block_size = config.cache.block_size
    storage = storage_dtype(config.cache, context)
    layers = attention_layers(draft)
    return BlockProposer(
        draft,
        PagedCache(layers, block_size, storage, context.device, prefix="block_draft_"),
        options.num_speculative_tokens,
        block_size,
        context.max_model_len,
        context.ops.resolve("place_blocks", context.dtype),
        create_choice(
            options,
            context,
            draft.config.draft_vocab_size,
            draft.target_ids,
            draft.config.temperature_scale,
        ),
    )
