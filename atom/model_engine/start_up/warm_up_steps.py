"""Steps of every kind that runs op by op: what an engine runs before it takes requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from atom.batch import NewSequence, ScheduledBatch, ScheduledSequence
from atom.model_engine.start_up.largest_steps import dearest_params
from atom.model_ops.attention.metadata import MAX_DECODE_QUERIES
from atom.sampling.plan import KINDS
from atom.sampling_params import Needs, SamplingParams

# Tokens of prompts; the longest step is one more. Kernels are made for ranges of lengths, whose
# bounds depend on the model: two numbers of experts or heads are hardly ever nearer than these.
_PROMPTS = (17, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
# Prompts, or what is left of them, that decode ops take: their tiles are of ranges of rows.
_SHORT = (2, 4, 8, MAX_DECODE_QUERIES)
# The others whose beginning is long computed.
_ENDS = (17, 128, 1024)


@dataclass(frozen=True)
class StepLimits:
    """What bounds the steps of an engine.

    Attributes:
        context_len: tokens of the longest sequence.
        max_num_tokens, max_num_seqs: of a step.
        num_drafts: most drafts of a sequence.
        num_blocks: of the KV pool.
        overlaps: whether a step is launched before the results of the last one are read.
    """

    context_len: int
    max_num_tokens: int
    max_num_seqs: int
    num_drafts: int
    block_size: int
    num_blocks: int
    vocab_size: int
    max_logprobs: int
    overlaps: bool

    @property
    def last_prompt_token(self) -> int:
        """Where a prompt ends at most: two steps that verify drafts, one that has none, and more
        drafts, follow it.
        """
        return self.context_len - 3 * (1 + self.num_drafts) - 1

    @property
    def longest_prompt(self) -> int:
        """Of one step."""
        return min(self.last_prompt_token, self.max_num_tokens)


@dataclass(frozen=True)
class WarmUp:
    """Steps of the same sequences: prompts, drafts, none, and drafts beside another prompt.

    Attributes:
        batches: each may be launched before the results of the one before it are read.
        kind: as in `SamplePlan`.
        num_rows: of the sequences, from 0 on.
    """

    batches: list[ScheduledBatch]
    kind: Needs | None
    num_rows: int


def warm_ups(limits: StepLimits) -> Iterator[WarmUp]:
    """Prompts of several lengths, and each way to choose tokens.

    Blocks are any of the pool, also shared ones: what is computed means nothing. Nothing exceeds
    the limits; there is nothing where contexts have no room for three steps after a prompt.
    """
    longest = limits.longest_prompt
    if longest < 1:
        return
    kinds = dict(zip((*KINDS, None), _params_of_kinds(limits), strict=True))
    greedy, edited = KINDS[0], None

    def begin(lens: list[int], kind: Needs | None, start: int = 0) -> WarmUp:
        return _warm_up(limits, lens, kinds[kind], kind, start)

    for length in _lengths(longest, *_SHORT, *_PROMPTS, limits.max_num_tokens):
        yield begin([length], greedy)
    # The end of a long prompt, whose beginning is never computed.
    for length in _lengths(longest, *_SHORT, *_ENDS, limits.max_num_tokens):
        if start := limits.last_prompt_token - length:
            yield begin([length], greedy, start)
    first = min(_PROMPTS[0], longest)
    yield _unfinished_prompt(limits, first, kinds[greedy])
    most = max(min(limits.max_num_tokens // first, limits.max_num_seqs), 1)
    for kind in KINDS:
        yield begin([first] * most, kind)
    # A prompt alone may be shorter than a step.
    count = min(-(-limits.max_num_tokens // longest), limits.max_num_seqs)
    left = [min(longest, limits.max_num_tokens - i * longest) for i in range(count)]
    if count > 1:
        yield begin(left, greedy)
    for other in (*KINDS[1:], edited):
        yield begin([first], other)


def _lengths(longest: int, *lengths: int) -> list[int]:
    """Each once, and none longer than a prompt may be."""
    return sorted({min(length, longest) for length in lengths})


def _unfinished_prompt(limits: StepLimits, length: int, params: SamplingParams) -> WarmUp:
    """The first tokens of a longer prompt: nothing is sampled, a draft writes its cache alone."""
    step, new = _Rows(limits, params).prompt(length)
    begun = msgspec.structs.replace(step, wants_sample=False, successor_token=0)
    return WarmUp([ScheduledBatch([begun], [new], [])], KINDS[0], 1)


def _params_of_kinds(limits: StepLimits) -> list[SamplingParams]:
    """Of the `KINDS`, and with all that the host has a say in."""
    dearest = dearest_params(limits.max_logprobs, limits.context_len, limits.vocab_size)
    return [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01),
        msgspec.structs.replace(dearest, allowed_token_ids=[*range(min(limits.vocab_size, 8))]),
    ]


@dataclass
class _Rows:
    """Sequences as they go on, by row."""

    limits: StepLimits
    params: SamplingParams
    ends: list[int] = field(default_factory=list)

    def prompt(self, length: int, start: int = 0) -> tuple[ScheduledSequence, NewSequence]:
        """The last `length` tokens of a new sequence's prompt."""
        row, limits = len(self.ends), self.limits
        self.ends.append(start + length)
        most = min(start + length + 3 * (1 + limits.num_drafts), limits.context_len)
        count = -(-most // limits.block_size)
        first = row * count
        blocks = [(first + i) % limits.num_blocks for i in range(count)]
        ids = [i % limits.vocab_size for i in range(start + length)]
        name = f"warm-up-{row}"
        step = ScheduledSequence(name, row, ids[start:], start, blocks, count, wants_sample=True)
        return step, NewSequence(name, row, ids, [], self.params, row)

    def verify(self, row: int, num_drafts: int, num_blocks: int) -> ScheduledSequence:
        """Its newest token and drafts, as if all of the last ones had been accepted."""
        start = self.ends[row]
        self.ends[row] += 1 + num_drafts
        return ScheduledSequence(
            f"warm-up-{row}",
            row,
            [0] * (1 + num_drafts),
            start,
            [],
            num_blocks,
            wants_sample=True,
            num_drafts=num_drafts,
            # The host decides about rows with edits, so these wait.
            is_ahead=self.limits.overlaps and not self.params.logit_bias,
        )


def _warm_up(
    limits: StepLimits,
    lengths: list[int],
    params: SamplingParams,
    kind: Needs | None,
    start: int = 0,
) -> WarmUp:
    rows = _Rows(limits, params)
    prompts, new = map(list, zip(*(rows.prompt(n, start) for n in lengths), strict=True))
    batches = [ScheduledBatch(prompts, new, [])]
    drafts = min(limits.num_drafts, limits.max_num_tokens // len(lengths) - 1)
    verifying = [rows.verify(s.row, drafts, s.num_blocks) for s in prompts]
    batches.append(ScheduledBatch(verifying, [], []))
    if drafts:  # what follows may have none
        plain = [rows.verify(s.row, 0, s.num_blocks) for s in prompts]
        batches.append(ScheduledBatch(plain, [], []))
    # More queries than decode ops take, beside as many sequences as there is room for.
    length = min(MAX_DECODE_QUERIES + 1, limits.longest_prompt)
    room = min((limits.max_num_tokens - length) // (1 + drafts), limits.max_num_seqs - 1)
    beside = prompts[: max(min(room, len(prompts)), 0)]
    if beside and len(prompts) < limits.max_num_seqs:
        verifying = [rows.verify(s.row, drafts, s.num_blocks) for s in beside]
        prompt, known = rows.prompt(length)
        batches.append(ScheduledBatch([*verifying, prompt], [known], []))
    return WarmUp(batches, kind, len(rows.ends))
