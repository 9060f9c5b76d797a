"""Drafts of recorded steps are those of steps that run op by op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_ops.batches import Part
from spec_decode import engines
from spec_decode.block_bench import step_of
from spec_decode.engines import PROMPTS, Folders, create_engine, generate, params
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.batch import Lookahead
from atom.graphs.recorded import StepRecorder
from atom.model_engine.step.recorded_steps import RecordedSteps
from atom.model_engine.worker import Worker
from atom.model_ops.kernels.native.build import native_build
from atom.spec_decode import factory
from atom.spec_decode.draft_policy import DraftNumbers, FixedDrafts
from atom.spec_decode.proposers.base import NullProposer, Proposal, VerifiedStep

pytestmark = pytest.mark.skipif(
    native_build().reason is not None, reason=str(native_build().reason)
)
K = 3
CASES = [
    ("llama", "mha"),
    ("llama", "peagle"),
    ("llama", "dflash"),
    ("llama", "dspark"),
    ("deepseek_v3", "mla"),
    ("deepseek_v3", "mtp"),
    ("deepseek_v3", "peagle"),
    ("deepseek_v3", "dspark"),
]
# Latents as wide as native attention takes on every processor.
FIELDS = {"mla": {"kv_lora_rank": 64}, "deepseek_v3": {"kv_lora_rank": 64}}


class Turns(FixedDrafts):
    """Numbers of drafts in turn, none at first."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self._numbers = [0, 0, 0]

    def choose(self, num_looked_up: int, num_sequences: int) -> DraftNumbers:
        if not self._numbers:
            self._numbers = [K, 1, K - 1, K, 0]
        number = self._numbers.pop(0)
        return DraftNumbers(number if num_looked_up < num_sequences else 0, number, number)


class Rarely(Turns):
    """K drafts in every third step."""

    def choose(self, num_looked_up: int, num_sequences: int) -> DraftNumbers:
        self._numbers = self._numbers or [0, 0, K]
        return super().choose(num_looked_up, num_sequences)


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Folders:
    return Folders(tmp_path_factory.mktemp("recorded-drafts"), byte_level_tokenizer, FIELDS)


def recorder_of(engine: LLM) -> StepRecorder | None:
    executor = engine.engine.core.executor
    assert isinstance(executor, Worker)
    return executor.parts.recorder


@pytest.mark.parametrize("adaptive", [False, True], ids=["greedy", "top-p in turns"])
@pytest.mark.parametrize(("target", "draft"), CASES)
def test_drafts_are_those_of_steps_run_op_by_op(
    target: str,
    draft: str,
    adaptive: bool,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In turns, the first ones of all are made in a recorded step."""
    options = folders.speculation(draft, K)
    monkeypatch.setattr(factory, "AdaptiveDrafts", Turns)
    sampling = params("top-p" if adaptive else "greedy", max_tokens=16)

    def tokens(**more: Any) -> list[list[int]]:
        everything = {**options, "speculative_adaptive": adaptive, **more}
        with create_engine(folders(target), **everything) as engine:
            texts = generate(engine, sampling, PROMPTS[:5])
            recorder = recorder_of(engine)
            assert (recorder is None) == ("enforce_eager" in more)
            if recorder is not None:
                assert not recorder._refused
                assert any(name == "drafting" for name, *_ in recorder._programs)
        return texts

    with engines.drafts_recorded(monkeypatch) as drafts:
        op_by_op, recorded = tokens(enforce_eager=True), tokens()
    assert recorded == op_by_op
    assert drafts[0] == drafts[1]
    assert sum(map(bool, drafts[0].values())) > 20


@pytest.mark.parametrize(("target", "draft"), CASES)
def test_drafts_after_rests_are_those_of_a_draft_that_always_ran(
    target: str, draft: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps at rest write the draft's cache, in the recording of the whole step."""
    options = folders.speculation(draft, K)
    monkeypatch.setattr(factory, "AdaptiveDrafts", Rarely)
    sampling = params("greedy", max_tokens=40)
    with engines.drafts_recorded(monkeypatch) as drafts:
        with create_engine(folders(target), **options) as always:
            expected = generate(always, sampling, PROMPTS[:3])
        with create_engine(folders(target), **options, speculative_adaptive=True) as rarely:
            assert generate(rarely, sampling, PROMPTS[:3]) == expected
            recorder = recorder_of(rarely)
            assert recorder is not None
            assert not recorder._refused
            assert any(name == "a step at rest" for name, *_ in recorder._programs)
    shared = [history for history, row in drafts[1].items() if row and drafts[0].get(history)]
    assert len(shared) >= 3
    for history in shared:
        row, other = drafts[1][history], drafts[0][history]
        count = min(len(row), len(other))
        assert row[:count] == other[:count]


class DerivingProposer(NullProposer):
    """Drafts what it derives from the step's metadata, by an op that no program can hold."""

    reads_steps = True

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        derive = step.model_input.attention.derive
        tokens = derive("tokens", lambda: step.next_token_ids[step.last_rows])
        return Proposal(tokens[:, None].cumsum(1))


@torch.inference_mode()
def test_what_a_recording_derived_is_derived_again() -> None:
    """Where the recording fails, and the same step runs op by op."""
    recorder = StepRecorder()
    nothing: Any = None
    steps = RecordedSteps(recorder, nothing, nothing, DerivingProposer(Lookahead(1)))
    step = step_of([Part(2, 0, [0])], [torch.zeros(2, 1)], [1234, 5678], [1], 4)
    proposal, replayed = steps._propose_recorded({}, step, 1, None)
    assert not replayed
    assert recorder._refused
    assert proposal.token_ids.tolist() == [[5678]]
