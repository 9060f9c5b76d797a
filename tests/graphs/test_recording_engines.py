"""Engines that record their steps say what engines that run op by op say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
from models import checkpoints
from spec_decode import block_bench, draft_bench
from spec_decode.engines import PROMPTS, create_engine, generate, params
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.graphs.recorded import Recordable, StepRecorder
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.native.program import Program

pytestmark = pytest.mark.skipif(
    native_build().reason is not None, reason=str(native_build().reason)
)
# Heads that native attention takes on every processor.
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def target(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    folder = tmp_path_factory.mktemp("target")
    checkpoints.llama(folder, vocab_size=len(byte_level_tokenizer), **SIZES)
    byte_level_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def draft(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    raw = dict(draft_bench.MHA) | SIZES | {"vocab_size": len(byte_level_tokenizer)}
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    folder = tmp_path_factory.mktemp("draft")
    block = block_bench.DRAFTS["speculators dspark"].changed(
        hidden_size=64,
        vocab_size=len(byte_level_tokenizer),
        aux_hidden_state_layer_ids=[0, 2, 3],
    )
    block_bench.write_draft(folder / "dspark", block)
    return draft_bench.write_draft(folder, raw, draft_bench.draft_tensors(raw))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kind of work was replayed."""
    counts: Counter[str] = Counter()
    replay, run = Program.replay, StepRecorder.run
    kind = [""]

    def counted_run(
        self: StepRecorder,
        known: dict[Hashable, Any],
        which: Hashable,
        work: Callable[[], Recordable[Any]],
    ) -> Any:
        kind[0] = work().name
        return run(self, known, which, work)

    def counted_replay(self: Program) -> None:
        counts[kind[0]] += 1
        replay(self)

    monkeypatch.setattr(StepRecorder, "run", counted_run)
    monkeypatch.setattr(Program, "replay", counted_replay)
    return counts


def options(method: str, draft: Path) -> dict[str, Any]:
    if method == "none":
        return {}
    if method == "suffix":
        return {"method": "suffix", "num_speculative_tokens": 3}
    if method == "dspark":
        return {"method": method, "draft_model": str(draft / method), "num_speculative_tokens": 4}
    eagle = {"method": "eagle3", "draft_model": str(draft), "num_speculative_tokens": 3}
    if method == "everything":
        eagle |= {"speculative_lookup": True, "speculative_adaptive": True}
    return eagle


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["none", "suffix", "eagle3", "dspark", "everything"])
def test_tokens_are_those_of_steps_run_op_by_op(
    method: str, dtype: str, target: Path, draft: Path, replays: Counter[str]
) -> None:
    """And, since a row does not depend on its batch, those without speculation."""
    settings = ("greedy", "top-p", "penalties") if dtype == "float32" else ("greedy", "warm")

    def all_tokens(engine: LLM) -> list[list[list[int]]]:
        alone = [generate(engine, params(s), PROMPTS[:1]) for s in settings]
        return alone + [generate(engine, params(s), PROMPTS) for s in settings]

    with create_engine(target, dtype=dtype, enforce_eager=True) as engine:
        expected = all_tokens(engine)
    assert not replays
    with create_engine(target, dtype=dtype, **options(method, draft)) as engine:
        assert all_tokens(engine) == expected
    # A lookup's drafts differ in number, and steps of another number of rows are others.
    least = 2 if method in ("suffix", "everything") else 10
    for name in ("a step", "a step that samples"):
        assert replays[name] + replays[f"{name} at rest"] > least
    if method != "everything":
        assert (replays["drafting"] > 0) == (method not in ("none", "suffix"))


def test_a_steady_batch_is_replayed(target: Path, replays: Counter[str]) -> None:
    with create_engine(target) as engine:
        generate(engine, params("greedy", max_tokens=64), PROMPTS[:1])
    # All but the prompt's.
    assert replays["a step"] == 64 - 1


def test_ops_that_cannot_be_recorded_are_named(
    target: Path,
    replays: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ATOM_OP_RMS_NORM", "torch")
    caplog.set_level("INFO")
    with create_engine(target) as engine:
        tokens = generate(engine, params("greedy"), PROMPTS[:2])
    assert not replays
    said = [r.getMessage() for r in caplog.records if "op by op" in r.getMessage()]
    why = "runs op by op: aten.pow.Tensor_Scalar in rms_norm is no kernel that a program could hold"
    assert said == [f"a step {why}", f"a step up to its logits {why}"]
    monkeypatch.delenv("ATOM_OP_RMS_NORM")
    with create_engine(target, enforce_eager=True) as engine:
        assert generate(engine, params("greedy"), PROMPTS[:2]) == tokens


def test_a_failing_replay_fails_its_requests_alone(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, fails = Program.replay, [True]

    def failing(self: Program) -> None:
        if fails:
            fails.pop()
            raise IndexError("out of luck")
        replay(self)

    with create_engine(target) as engine:
        expected = generate(engine, params("greedy"), PROMPTS[:3])
        monkeypatch.setattr(Program, "replay", failing)
        assert generate(engine, params("greedy"), PROMPTS[:3]) == expected
        assert not fails


@pytest.fixture
def many(target: Path) -> Callable[[int], LLM]:
    return lambda num_threads: create_engine(target, num_threads=num_threads)


def test_threads_change_no_token(many: Callable[[int], LLM]) -> None:
    with many(1) as one, many(3) as three:
        tokens = generate(one, params("warm"), PROMPTS)
        assert generate(three, params("warm"), PROMPTS) == tokens
