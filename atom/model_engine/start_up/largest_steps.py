"""The steps that need the most memory under the given options, for memory profiling."""

from __future__ import annotations

from dataclasses import dataclass

from atom.batch import NewSequence, ScheduledBatch, ScheduledSequence
from atom.config import DEFAULT_MAX_LOGPROBS, EngineConfig
from atom.model_ops.attention.metadata import MAX_DECODE_QUERIES, MOST_EXPANDED_TOKENS
from atom.sampling_params import SamplingParams

# Fewer new tokens are attended as decoding and verifying sequences are.
_LEAST_OF_A_PROMPT = MAX_DECODE_QUERIES + 1


@dataclass(frozen=True)
class _Share:
    """One sequence's part of a step.

    Attributes:
        num_known: its tokens; all but the last `num_new` are in the KV cache.
        num_outputs: how many of them are output tokens.
        num_new: known tokens to compute.
        num_drafts: draft tokens to verify after them.
    """

    num_known: int
    num_outputs: int
    num_new: int
    num_drafts: int = 0


def largest_steps(
    config: EngineConfig, context_len: int, num_drafts: int, vocab_size: int
) -> list[ScheduledBatch]:
    """Four batches that no batch of the scheduler exceeds in memory.

    The first has the most tokens: prompts that end at the maximum context length fill the token
    budget that the other sequences, which verify drafts, leave. The second has the most sampled
    rows and is a decode step. The third has prompts, with the longest that there may be and
    contexts of as many tokens as a prefill op expands at once, since the budget bounds new tokens,
    not cached ones; what they leave of it decodes. The fourth has as many prompts as there may be,
    of few tokens each and as many cached ones: attention ops take other ways for these. All block
    ids are 0, so a pool of one block suffices, and the sampling parameters enable everything that
    takes memory. The batches share no sequences.

    Args:
        context_len: tokens of the longest sequence.
        num_drafts: most drafts of a sequence.
    """
    scheduler = config.scheduler
    budget, num_seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    shares = (
        _fill_tokens(budget, num_seqs, context_len, num_drafts),
        _verify(budget, num_seqs, context_len, num_drafts),
        _expand(budget, num_seqs, context_len, num_drafts),
        _share_out(budget, num_seqs, context_len),
    )
    most_logprobs = config.max_logprobs if config.max_logprobs >= 0 else DEFAULT_MAX_LOGPROBS
    params = dearest_params(most_logprobs, context_len, vocab_size)
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
    """A new sequence whose token ids and block ids are all 0."""
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
    """Prompts and verifying sequences with `budget` tokens in all, or fewer if they have fewer."""
    longest = context_len - 1
    rows = 1 + _most_drafts(context_len, num_drafts)
    # As few prompts as fill the budget, since a prompt has fewer sampled rows than a verification.
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


def _expand(budget: int, num_seqs: int, context_len: int, num_drafts: int) -> list[_Share]:
    """Prompts whose contexts are the longest, or together `MOST_EXPANDED_TOKENS`; then others, and
    verifying sequences, as far as there are tokens left.
    """
    longest, least = context_len - 1, _LEAST_OF_A_PROMPT
    most = max(min(num_seqs, budget // least), 1)
    together = min(max(MOST_EXPANDED_TOKENS, longest), most * longest)
    count = -(-together // longest)
    # About equal, so that all of them can be prompts.
    contexts = [(together + i) // count for i in range(count)]
    while len(contexts) < most and budget - sum(c - 1 for c in contexts) >= least:
        contexts.append(longest)
    left = budget
    shares = []
    for i, context in enumerate(contexts):
        # With a cached token, if there can be one, and enough left for those behind to be prompts.
        num_new = max(min(context - 1, left - least * (len(contexts) - 1 - i)), 1)
        shares.append(_Share(context, 0, num_new))
        left -= num_new
    return [*shares, *_verify(left, min(num_seqs - len(shares), left), context_len, num_drafts)]


def _share_out(budget: int, num_seqs: int, context_len: int) -> list[_Share]:
    """Prompts with equal parts of the budget, and before them as many cached tokens."""
    longest = context_len - 1
    count = max(min(num_seqs, budget // _LEAST_OF_A_PROMPT), 1)
    shares = []
    for i in range(count):
        num_new = min((budget + i) // count, longest)
        shares.append(_Share(min(2 * num_new, longest), 0, num_new))
    return shares


def _verify(budget: int, num_seqs: int, context_len: int, num_drafts: int) -> list[_Share]:
    """Sequences with one new token each, and drafts up to `budget` tokens in all.

    The first has the longest context, which determines the size of some buffers.
    """
    most = _most_drafts(context_len, num_drafts)
    left = budget - num_seqs
    shares = []
    for i in range(num_seqs):
        drafts = min(most, left)
        left -= drafts
        # The others: a prompt of one token and an output token, if the context has room for it.
        num_known = min(2, context_len - 1) if i else context_len - 1 - drafts
        shares.append(_Share(num_known, min(1, num_known - 1), 1, drafts))
    return shares


def _most_drafts(context_len: int, num_drafts: int) -> int:
    """Drafts of a sequence of two known tokens: drafts and bonus token must fit in the context."""
    return max(min(num_drafts, context_len - 3), 0)


def dearest_params(max_logprobs: int, context_len: int, vocab_size: int) -> SamplingParams:
    """Sampling parameters that enable everything that takes memory per row and vocabulary entry."""
    return SamplingParams(
        temperature=1.0,
        # Keeps almost the whole vocabulary, so that all of it must be sorted.
        top_k=max(vocab_size - 1, 1),
        top_p=0.99,
        min_p=1e-6,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={0: 1.0},
        # Masks the end tokens.
        min_tokens=context_len,
        max_tokens=None,
        logprobs=max_logprobs,
        prompt_logprobs=max_logprobs,
    )
