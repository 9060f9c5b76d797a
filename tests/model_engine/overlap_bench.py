"""Engines whose steps overlap, beside those whose do not; and what their tests watch and change."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from spec_decode import engines
from spec_decode.engines import create_engine, params
from transformers import PreTrainedTokenizerFast

from atom import LLM, StructuredOutput
from atom.batch import LaunchedStep, Lookahead, ScheduledBatch, StepOutput
from atom.model_engine.executor import RanksExecutor
from atom.spec_decode.draft_policy import Candidates, DraftNumbers, FixedDrafts, Verification
from atom.spec_decode.proposers.base import NullProposer, Proposal, VerifiedStep

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3},
    "peagle": {"method": "eagle3", "num_speculative_tokens": 3},
    "dflash": {"method": "dflash", "num_speculative_tokens": 4},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
}
METHODS["adaptive"] = {**METHODS["eagle3"], "speculative_adaptive": True}
METHODS["suffix"] = {"method": "suffix", "num_speculative_tokens": 5, "suffix_cache_tokens": 2000}
METHODS["lookup"] = {**METHODS["eagle3"], "speculative_lookup": True}
METHODS["adaptive lookup"] = {**METHODS["lookup"], "speculative_adaptive": True}
PROMPTS = engines.PROMPTS[:6] + engines.PROMPTS[10:12]
MIXED = [
    params("greedy"),
    params("warm", logprobs=1, prompt_logprobs=0),
    params("penalties"),
    params("greedy", structured_output=StructuredOutput.regex("[a-f0-9]{20}"), ignore_eos=False),
    params("top-p", min_tokens=9, stop_token_ids=list(range(100, 300)), ignore_eos=False),
    params("warm", n=3, max_tokens=9),
    params("greedy", bad_word_ids=[[7], [8, 9]], logit_bias={5: 3.0}),
    params("greedy", speculation=False, max_tokens=2),
]


class Checkpoints:
    """Engines without overlap (`plain`) and with it (`ahead`)."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self.target = engines.Folders(folder, tokenizer)
        self.plain: Callable[[str], LLM] = cache(self.engine)
        self.ahead: Callable[[str], LLM] = cache(
            lambda method: self.engine(method, overlap=True, max_num_batched_tokens=48)
        )

    def engine(self, method: str, **options: Any) -> LLM:
        if METHODS[method].get("method") in ("eagle3", "dflash"):
            draft = method if method in ("peagle", "dflash") else "mha"
            options["draft_model"] = str(self.target(draft))
        target = self.target("deepseek_v3" if method == "mtp" else "llama")
        return create_engine(target, **METHODS[method], **options)


class KnowingProposer(NullProposer):
    """Drafts what greedy sequences will say, and something else at some positions.

    Args:
        texts: prompts with their outputs, by the number that ids begin with.
    """

    reads_steps = True

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__(Lookahead(3))
        longest = max(map(len, texts)) + 8
        self._texts = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        sampled = step.sampled
        own = range(len(step.sequences)) if sampled is None else sampled.tolist()
        ids = [int(step.sequences[i].id.partition("/")[0]) for i in own]
        texts = torch.tensor(ids) % len(self._texts)
        newest = step.model_input.positions[step.last_rows] + 1
        places = newest[:, None] + 1 + torch.arange(num_drafts)
        right = self._texts[texts[:, None], places.clamp(max=self._texts.shape[1] - 1)]
        return Proposal(torch.where((places + texts[:, None]) % 5 == 0, (right + 1) % 300, right))


def check_blocks(llm: LLM) -> None:
    llm.engine.core.block_pool.check_integrity()
    assert llm.engine.core.block_pool.num_used == 0
    assert not llm.engine.core.has_work


def check_wishes(plain: LLM, ahead: LLM) -> None:
    """Of requests that need the host and others beside them."""
    results = [engine.generate(PROMPTS, MIXED, use_tqdm=False) for engine in (plain, ahead)]
    for without, with_ in zip(*results, strict=True):
        for a, b in zip(without.outputs, with_.outputs, strict=True):
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
            assert [set(x) for x in a.logprobs or []] == [set(x) for x in b.logprobs or []]
    check_blocks(ahead)


class AnyDrafts(FixedDrafts):
    """Any number of drafts at any step.

    Attributes:
        events: what was called for which step, by its number.
        verified, seconds: what was observed.
    """

    def __init__(self, choices: Sequence[int], *_: Any, **__: Any) -> None:
        super().__init__()
        self._most = choices[-1]
        self._rng = random.Random(0)
        self.events: list[tuple[str, int]] = []
        self.chosen: list[DraftNumbers] = []
        self.verified: list[list[Verification]] = []
        self.seconds: list[float | None] = []

    def choose(self, num_looked_up: int, num_sequences: int) -> DraftNumbers:
        made = self._rng.randint(0, self._most)
        self.events.append(("choose", len(self.chosen)))
        # The number of the step, where nobody looks.
        self.chosen.append(DraftNumbers(made, made, made, -float(len(self.chosen))))
        return self.chosen[-1]

    def fit(self, numbers: DraftNumbers, made: Sequence[Candidates]) -> list[int]:
        self.events.append(("fit", self.chosen.index(numbers)))
        return super().fit(numbers, made)

    def observe(
        self, numbers: DraftNumbers, verified: Sequence[Verification], seconds: float | None
    ) -> None:
        self.events.append(("observe", self.chosen.index(numbers)))
        self.verified.append(list(verified))
        self.seconds.append(seconds)


class Watched:
    """Launches and collections of an engine, in order, and errors to raise at them."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.batches: list[ScheduledBatch] = []
        self.raises: Callable[[ScheduledBatch, str], BaseException | None] = lambda *_: None
        executor: Any = llm.engine.core.executor
        own = executor._worker if isinstance(executor, RanksExecutor) else executor
        runner = own._runner
        self._launch, counter = runner.launch, count()

        def launch(batch: ScheduledBatch) -> LaunchedStep:
            number = next(counter)
            self.batches.append(batch)
            self.check(batch, f"launch {number}")
            launched = self._launch(batch)

            def collect() -> StepOutput:
                output = launched.collect()
                self.check(batch, f"collect {number}")
                return output

            return LaunchedStep(collect, launched.num_drafts, launched.draft_source)

        monkeypatch.setattr(runner, "launch", launch)

    def check(self, batch: ScheduledBatch, event: str) -> None:
        self.events.append(event)
        if (error := self.raises(batch, event)) is not None:
            raise error
