"""Where the host has a say in some tokens, all but their choice is replayed from programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from graphs.test_recorded_drafts import CASES, K, Rarely, Turns, folders, recorder_of
from graphs.test_recording_engines import draft, replays, target
from spec_decode import engines
from spec_decode.engines import PROMPTS, Folders, create_engine, params

from atom import LLM, SamplingParams, StructuredOutput
from atom.model_ops.kernels.native.build import native_build
from atom.spec_decode import factory

__all__ = ["draft", "folders", "replays", "target"]
pytestmark = pytest.mark.skipif(
    native_build().reason is not None, reason=str(native_build().reason)
)
LAYERS = "a step up to its logits"
GUIDED = "drafting within grammars"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["xone", "xther"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def favour(_: list[int], outputs: list[int], logits: np.ndarray) -> np.ndarray:
    """A logits processor."""
    logits[len(outputs) % 50 + 100] += 3.0
    return logits


ENDS = {"stop_token_ids": list(range(100, 300)), "ignore_eos": False}
JSON = {"structured_output": StructuredOutput.json_schema(SCHEMA), "ignore_eos": False}
KINDS = {
    "penalties": [params("penalties"), params("greedy", repetition_penalty=1.4)],
    "bias": [params("greedy", logit_bias={5: 3.0, 300: 6.0}), params("warm", logit_bias={9: 9.0})],
    "logprobs": [params("greedy", logprobs=2), params("top-p", logprobs=0)],
    "prompt logprobs": [params("greedy", prompt_logprobs=1), params("warm", prompt_logprobs=0)],
    "min_tokens": [params("greedy", min_tokens=9, **ENDS), params("warm", min_tokens=18, **ENDS)],
    "json": [params("greedy", **JSON), params("warm", **JSON)],
    "bans": [params("greedy", bad_word_ids=[[7], [8, 9]]), params("warm", bad_word_ids=[[11]])],
    "allowed": [params("top-p", allowed_token_ids=list(range(200))), params("warm")],
    "processors": [params("greedy", logits_processors=[favour]), params("warm", logprobs=1)],
}
# Beside requests that are sampled from tensors alone.
PLAIN = [params("greedy"), params("top-p"), params("warm", max_tokens=40)]
METHODS = ["none", "eagle3", "dspark", "suffix", "turns", "rests", "adaptive", "everything"]


def outputs(engine: LLM, sampling: list[SamplingParams]) -> list[Any]:
    """Tokens and logprobs, with the bits of their numbers."""
    prompts = [PROMPTS[i] for i in (0, 12, 2, 5, 13)][: len(sampling)]
    made = engine.generate(prompts, sampling, use_tqdm=False)
    engine.engine.core.block_pool.check_integrity()
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in made]


def options(method: str, draft: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if method == "none":
        return {}
    if method == "suffix":
        return {"method": "suffix", "num_speculative_tokens": 3}
    if method == "dspark":
        return {"method": method, "draft_model": str(draft / method), "num_speculative_tokens": 4}
    chosen: dict[str, Any] = {"method": "eagle3", "draft_model": str(draft)}
    chosen["num_speculative_tokens"] = 3
    if method in ("turns", "rests"):
        monkeypatch.setattr(factory, "AdaptiveDrafts", Turns if method == "turns" else Rarely)
    if method != "eagle3":
        chosen["speculative_adaptive"] = True
    if method == "everything":
        chosen["speculative_lookup"] = True
    return chosen


@pytest.fixture(scope="module")
def expected(target: Path) -> Iterator[Callable[[str], list[Any]]]:
    """Op by op and without drafts."""
    with create_engine(target, enforce_eager=True) as engine:
        yield cache(lambda kind: outputs(engine, PLAIN + KINDS[kind]))


@pytest.mark.parametrize("method", METHODS)
def test_tokens_and_logprobs_are_those_of_steps_run_op_by_op(
    method: str,
    target: Path,
    draft: Path,
    expected: Callable[[str], list[Any]],
    replays: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Prompts are computed in parts, of which some recur.
    chosen = options(method, draft, monkeypatch) | {"max_num_batched_tokens": 24}
    with create_engine(target, **chosen) as engine:
        for kind, wanted in KINDS.items():
            replays.clear()
            assert outputs(engine, PLAIN + wanted) == expected(kind), kind
            assert replays[LAYERS] > 1 or kind == "prompt logprobs", kind
        recorder = recorder_of(engine)
        assert recorder is not None
        assert not recorder._refused
        names = {name for name, *_ in recorder._programs}
    if method in ("eagle3", "turns", "rests"):
        assert GUIDED in names
        assert "drafting" in names


@pytest.mark.parametrize("adaptive", [False, True], ids=["all", "in turns"])
@pytest.mark.parametrize(("target_kind", "draft_kind"), CASES)
def test_drafts_are_those_of_steps_run_op_by_op(
    target_kind: str,
    draft_kind: str,
    adaptive: bool,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a grammar, penalties and logprobs are among the sequences."""
    speculation = folders.speculation(draft_kind, K)
    monkeypatch.setattr(factory, "AdaptiveDrafts", Turns)
    mixed = [*PLAIN[1:], KINDS["json"][1], KINDS["penalties"][0], KINDS["logprobs"][1]]

    def tokens(**more: Any) -> list[Any]:
        everything = {**speculation, "speculative_adaptive": adaptive, **more}
        with create_engine(folders(target_kind), **everything) as engine:
            made = outputs(engine, mixed)
            if (recorder := recorder_of(engine)) is not None:
                assert not recorder._refused
                assert any(name == GUIDED for name, *_ in recorder._programs)
        return made

    with engines.drafts_recorded(monkeypatch) as drafts:
        op_by_op, recorded = tokens(enforce_eager=True), tokens()
    assert recorded == op_by_op
    assert drafts[0] == drafts[1]
    assert sum(map(bool, drafts[0].values())) > 20


@pytest.mark.parametrize("kind", ["logprobs", "json"])
def test_there_is_one_program_for_each_shape(
    kind: str, target: Path, draft: Path, replays: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a request is, and however many there are."""
    sampling = [
        params("greedy", max_tokens=60),
        msgspec.structs.replace(KINDS[kind][1], max_tokens=60),
    ]
    with create_engine(target, **options("eagle3", draft, monkeypatch)) as engine:
        recorder = recorder_of(engine)
        assert recorder is not None

        def programs() -> set[Any]:
            outputs(engine, sampling)
            return set(recorder._programs)

        first = programs()
        names = Counter(name for name, *_ in first)
        # Two sequences, and one at the end, with as many drafts as are verified.
        assert 0 < names[LAYERS] < 10
        assert programs() == programs() == first
    assert replays[LAYERS] > 3 * names[LAYERS]


@pytest.mark.parametrize("method", ["none", "eagle3"])
def test_a_choice_that_cannot_be_recorded_leaves_the_layers(
    method: str,
    target: Path,
    draft: Path,
    expected: Callable[[str], list[Any]],
    replays: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokens = expected("bias")
    caplog.set_level("INFO", logger="atom")
    monkeypatch.setenv("ATOM_OP_CHOOSE_TOKENS", "torch")
    with create_engine(target, **options(method, draft, monkeypatch)) as engine:
        assert outputs(engine, PLAIN + KINDS["bias"]) == tokens
    assert replays[LAYERS] > 20
    assert not replays["a step that samples"]
    assert (replays["drafting"] > 10) == (method == "eagle3")
    said = [r.getMessage() for r in caplog.records if "op by op" in r.getMessage()]
    assert said
    assert all(s.startswith("a step that samples runs op by op: aten.") for s in said)
    assert all(" in choose_tokens is no kernel" in s for s in said)


def test_drafts_are_not_recorded_behind_layers_that_are_not(
    target: Path, draft: Path, replays: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of their programs would be for hidden states that lie there once."""
    monkeypatch.setenv("ATOM_OP_SILU_AND_MUL", "torch")
    with create_engine(target, **options("eagle3", draft, monkeypatch)) as engine:
        outputs(engine, PLAIN + KINDS["bias"])
        recorder = recorder_of(engine)
        assert recorder is not None
        assert {name for name, _ in recorder._refused} >= {LAYERS, "a step that samples"}
        assert not recorder._programs
    assert not replays
