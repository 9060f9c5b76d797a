"""A step that raises: the batch is given back, and whoever is not at fault loses nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from spec_decode import engines
from spec_decode.engines import PROMPTS, create_engine, params
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.batch import LaunchedStep, ScheduledBatch, StepOutput
from atom.entrypoints.llm import GenerationError
from atom.kv_cache.base import KVCachePlan
from atom.messages import EngineDeadError, RequestFailedError
from atom.model_engine.start_up import kv_memory
from atom.model_engine.step.step_runner import ComputedStep

PROMPTS = [*PROMPTS[:5], *PROMPTS[10:12]]
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "suffix": {"method": "suffix", "num_speculative_tokens": 3},
    "eagle3": {
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "speculative_lookup": True,
        "speculative_adaptive": True,
    },
}
Raises = Callable[[ScheduledBatch], BaseException | None]


class Checkpoints:
    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self._target = engines.write_target("llama", folder / "target", tokenizer)
        self._draft = engines.write_draft("mha", folder / "draft", len(tokenizer))
        self.expected = cache(self._expected)

    def _expected(self, setting: str) -> list[list[int]]:
        return engines.generate(self.engine("none"), params(setting), PROMPTS)

    def engine(self, method: str, **overrides: Any) -> LLM:
        fields = {**METHODS[method], **overrides}
        if method == "eagle3":
            fields["draft_model"] = str(self._draft)
        return create_engine(self._target, **fields)


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("failed-steps"), byte_level_tokenizer)


def break_steps(monkeypatch: pytest.MonkeyPatch, llm: LLM, raises: Raises, when: str) -> None:
    """Have steps raise what `raises` says of their batches.

    That is before the step, while drafts are made, or after it all.
    """
    runner: Any = llm.engine.core.executor._runner  # type: ignore[attr-defined]
    launch, draft = runner.launch, ComputedStep.draft

    def broken(batch: ScheduledBatch) -> LaunchedStep:
        error = raises(batch)
        if error is None:
            return launch(batch)  # type: ignore[no-any-return]
        if when == "before":
            raise error

        def broken_draft(*args: Any) -> None:
            draft(*args)
            raise error

        with monkeypatch.context() as patch:
            if when == "drafting":
                patch.setattr(ComputedStep, "draft", broken_draft)
            launched = launch(batch)

        def collect() -> StepOutput:
            launched.collect()
            raise error

        return LaunchedStep(collect, launched.num_drafts, launched.draft_source)

    monkeypatch.setattr(runner, "launch", broken)


def at_steps(error: Callable[[], BaseException], *numbers: int) -> Raises:
    counter = count()
    return lambda _: error() if next(counter) in numbers else None


def check_blocks(llm: LLM) -> None:
    llm.engine.core.block_pool.check_integrity()
    assert llm.engine.core.block_pool.num_used == 0


@pytest.mark.parametrize("when", ["before", "drafting", "after"])
@pytest.mark.parametrize("method", METHODS)
def test_passing_trouble_changes_no_token(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, method: str, when: str
) -> None:
    llm = checkpoints.engine(method, max_num_batched_tokens=48)
    trouble = at_steps(lambda: ValueError("oops"), 0, 6, 15, 30)
    break_steps(monkeypatch, llm, trouble, when)
    for setting in ("warm", "penalties"):
        assert engines.generate(llm, params(setting), PROMPTS) == checkpoints.expected(setting)


@pytest.mark.parametrize("chunk", [8, 256])
@pytest.mark.parametrize("method", METHODS)
def test_the_one_at_fault_ends_alone(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, method: str, chunk: int
) -> None:
    """Steps fail that compute the fifth output of the second prompt."""
    llm = checkpoints.engine(method, max_num_batched_tokens=chunk, max_num_seqs=8)
    bad = PROMPTS[1]

    def raises(batch: ScheduledBatch) -> Exception | None:
        at_fault = any(
            s.id.startswith("1/") and s.start <= len(bad) + 4 < s.context_len
            for s in batch.sequences
        )
        return ValueError("a token that nobody likes") if at_fault else None

    break_steps(monkeypatch, llm, raises, "after")
    with pytest.raises(GenerationError, match="1 of 7 prompts failed; prompt 1") as caught:
        llm.generate(PROMPTS, params("top-p"), use_tqdm=False)
    expected = checkpoints.expected("top-p")
    results = [r and r.outputs[0].token_ids for r in caught.value.results]
    assert results == [expected[0], None, *expected[2:]]
    error = caught.value.errors[1]
    assert isinstance(error, RequestFailedError)
    assert "ValueError: a token that nobody likes" in str(error)
    check_blocks(llm)


def test_without_room_for_all_of_them(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = checkpoints.expected("warm")
    monkeypatch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(24, 0))
    llm = checkpoints.engine("suffix", max_model_len=96, max_num_seqs=3)
    break_steps(monkeypatch, llm, at_steps(lambda: OSError("oops"), *range(0, 90, 6)), "after")
    assert engines.generate(llm, params("warm"), PROMPTS) == expected


def test_a_stream_goes_on_after_an_interrupt(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = checkpoints.engine("eagle3")
    stream = llm.stream(PROMPTS[0], params("warm"))
    token_ids = list(next(stream).outputs[0].token_ids)
    with monkeypatch.context() as patch:
        break_steps(patch, llm, at_steps(KeyboardInterrupt, 2), "drafting")
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1:], params("warm"), use_tqdm=False)
    token_ids += [token for output in stream for token in output.outputs[0].token_ids]
    expected = checkpoints.expected("warm")
    assert token_ids == expected[0]
    assert engines.generate(llm, params("warm"), PROMPTS) == expected


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_waits_for_the_step_unless_pressed_again(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, presses: int
) -> None:
    llm = checkpoints.engine("none")
    counter, passed = count(), []

    def press(_: ScheduledBatch) -> None:
        number = next(counter)
        if number == 3:
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)
        passed.append(number)

    with monkeypatch.context() as patch, default_sigint():
        break_steps(patch, llm, press, "before")
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, params("warm"), use_tqdm=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (3 in passed) == (presses == 1)
    check_blocks(llm)
    assert engines.generate(llm, params("warm"), PROMPTS) == checkpoints.expected("warm")


@contextmanager
def default_sigint() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, whoever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "cause",
    ["HIP error: an illegal memory access was encountered", "Triton Error: misaligned address"],
)
def test_a_lost_device_ends_the_engine(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    """The device says so itself, whatever the first error was called."""
    llm = checkpoints.engine("none")
    stream = llm.stream(PROMPTS[0], params("warm"))
    next(stream)

    def synchronize() -> None:
        raise torch.AcceleratorError("HIP error: unspecified launch failure", 719)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    break_steps(monkeypatch, llm, at_steps(lambda: RuntimeError(cause), 3), "before")
    with pytest.raises(EngineDeadError, match=cause):
        llm.generate(PROMPTS, params("warm"), use_tqdm=False)
    with pytest.raises(EngineDeadError, match=cause):
        list(stream)
    with pytest.raises(EngineDeadError, match=cause):
        llm.generate(PROMPTS, params("warm"), use_tqdm=False)


def test_a_device_that_answers_is_not_lost(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = checkpoints.engine("none")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    error = torch.AcceleratorError("CUDA error: invalid configuration argument", 9)
    break_steps(monkeypatch, llm, at_steps(lambda: error, 3), "before")
    assert engines.generate(llm, params("warm"), PROMPTS) == checkpoints.expected("warm")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["schedule", "update"])
def test_half_a_bookkeeping_ends_the_engine(
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    where: str,
) -> None:
    """Rather than go on with tables of which nobody knows what they hold."""
    llm = checkpoints.engine("none")
    scheduler: Any = llm.engine.core._scheduler
    work, calls = getattr(scheduler, where), count()

    def broken(*args: Any) -> Any:
        result = work(*args)
        if next(calls) == 2:
            raise error("halfway")
        return result

    monkeypatch.setattr(scheduler, where, broken)
    seen = error if error is KeyboardInterrupt else EngineDeadError
    with pytest.raises(seen, match="halfway"):
        llm.generate(PROMPTS, params("warm"), use_tqdm=False)
    with pytest.raises(EngineDeadError, match=f"{error.__name__}: halfway"):
        llm.generate(PROMPTS, params("warm"), use_tqdm=False)


def test_few_steps_find_the_one_at_fault(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halving: about twice the logarithm of the number of sequences."""
    llm = checkpoints.engine("none", max_num_seqs=64)
    sizes: list[int] = []

    def raises(batch: ScheduledBatch) -> Exception | None:
        sizes.append(len(batch.sequences))
        return ValueError("oops") if any(s.id.startswith("37/") for s in batch.sequences) else None

    break_steps(monkeypatch, llm, raises, "before")
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(64)]
    with pytest.raises(GenerationError, match="1 of 64 prompts failed; prompt 37"):
        llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    assert sizes[:4] == [64, 32, 32, 16]
    assert len(sizes) < 20


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("in_a_row", [False, True])
def test_only_a_lasting_lack_of_memory_ends_the_engine(
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    in_a_row: bool,
) -> None:
    llm = checkpoints.engine("none")
    steps = (4, 5) if in_a_row else (4, 15)
    break_steps(monkeypatch, llm, at_steps(lambda: error("full"), *steps), "before")
    if in_a_row:
        with pytest.raises(EngineDeadError, match=f"{error.__name__}: full"):
            llm.generate(PROMPTS, params("warm"), use_tqdm=False)
    else:
        assert engines.generate(llm, params("warm"), PROMPTS) == checkpoints.expected("warm")
