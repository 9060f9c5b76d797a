"""The steps that take the most memory of all that the options allow, to be measured."""

from __future__ import annotations

from dataclasses import dataclass

from atom.batch import NewSequence, ScheduledBatch, ScheduledSequence
from atom.config import EngineConfig
from atom.sampling_params import SamplingParams


@dataclass(frozen=True)
class _Share:
    """One sequence's part of a step.

    Attributes:
        num_known: its tokens; those before the last `num_new` are in the cache.
        num_outputs: how many of them were generated.
        num_new: known tokens to compute.
        num_drafts: behind them, to verify.
    """

    num_known: int
    num_outputs: int
    num_new: int
    num_drafts: int = 0


def largest_steps(
    config: EngineConfig, context_len: int, num_drafts: int, vocab_size: int
) -> list[ScheduledBatch]:
    """Two steps that the scheduler could ask for, and that no other exceeds.

    The first has the most tokens: prompts that end at the end of the context fill what the other
    sequences, which verify drafts, leave of the token budget. The second has the most sampled rows
    and is a decoding step. All sequences share block 0, so that a pool of one block is enough;
    they ask for everything that sampling spends memory on. Each step has sequences of its own.

    Args:
        context_len: tokens of the longest sequence. num_drafts: most drafts of a sequence.
    """
    scheduler = config.scheduler
    budget, num_seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    shares = (
        _fill_tokens(budget, num_seqs, context_len, num_drafts),
        _verify(budget, num_seqs, context_len, num_drafts),
    )
    params = _dearest_params(config.max_logprobs, context_len, vocab_size)
    batches: list[ScheduledBatch] = []
    freed: list[int] = []
    for step in shares:
        scheduled, new = [], []
        for row, share in enumerate(step):
            reserved = min(share.num_known + share.num_drafts + num_drafts, context_len - 1)
            num_blocks = -(-reserved // config.cache.block_size)
            sequence, known = _schedule(row, share, num_blocks, params)
            scheduled.append(sequence)
            new.append(known)
        batches.append(ScheduledBatch(scheduled, new, freed))
        freed = list(range(len(step)))
    return batches


def _schedule(
    row: int, share: _Share, num_blocks: int, params: SamplingParams
) -> tuple[ScheduledSequence, NewSequence]:
    """A sequence in its first step, all its tokens and blocks number 0."""
    scheduled = ScheduledSequence(
        id=f"largest-{row}",
        row=row,
        token_ids=[0] * (share.num_new + share.num_drafts),
        start=share.num_known - share.num_new,
        new_block_ids=[0] * num_blocks,
        num_blocks=num_blocks,
        wants_sample=True,
        num_drafts=share.num_drafts,
    )
    prompt, outputs = [0] * (share.num_known - share.num_outputs), [0] * share.num_outputs
    return scheduled, NewSequence(scheduled.id, row, prompt, outputs, params, 0)


def _fill_tokens(budget: int, num_seqs: int, context_len: int, num_drafts: int) -> list[_Share]:
    """Prompts and sequences that verify; `budget` tokens, or as many as all sequences hold."""
    longest = context_len - 1
    rows = 1 + _most_drafts(context_len, num_drafts)
    # More prompts only where fewer leave a part of the budget: they have fewer sampled rows.
    num_prompts = 1
    while num_prompts < num_seqs:
        if num_prompts * longest + (num_seqs - num_prompts) * rows >= budget:
            break
        num_prompts += 1
    verifying = _verify(budget - num_prompts, num_seqs - num_prompts, context_len, num_drafts)
    left = budget - sum(share.num_new + share.num_drafts for share in verifying)
    prompts = []
    for _ in range(num_prompts):
        count = min(left, longest)
        prompts.append(_Share(longest, 0, count))
        left -= count
    return [*prompts, *verifying]


def _verify(budget: int, num_seqs: int, context_len: int, num_drafts: int) -> list[_Share]:
    """Sequences with one new token each, and drafts as far as `budget` tokens allow.

    The first one sits at the end of the context, so that what is sized by the longest is seen.
    """
    most = _most_drafts(context_len, num_drafts)
    left = budget - num_seqs
    shares = []
    for i in range(num_seqs):
        drafts = min(most, left)
        left -= drafts
        # The shortest has a prompt of one token, and its output where the context has room.
        num_known = min(2, context_len - 1) if i else context_len - 1 - drafts
        shares.append(_Share(num_known, min(1, num_known - 1), 1, drafts))
    return shares


def _most_drafts(context_len: int, num_drafts: int) -> int:
    """Drafts of a sequence of two tokens: all could be kept, and the token after them."""
    return max(min(num_drafts, context_len - 3), 0)


def _dearest_params(max_logprobs: int, context_len: int, vocab_size: int) -> SamplingParams:
    """Everything that takes memory for each row and token of the vocabulary."""
    return SamplingParams(
        temperature=1.0,
        # Almost the whole vocabulary is kept, so all of it has to be put in order.
        top_k=max(vocab_size - 1, 1),
        top_p=0.99,
        min_p=1e-6,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={0: 1.0},
        # End tokens are masked.
        min_tokens=context_len,
        max_tokens=None,
        logprobs=max_logprobs,
        prompt_logprobs=max_logprobs,
    )
