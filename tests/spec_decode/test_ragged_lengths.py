"""Numbers of drafts that differ by sequence: the same tokens, op by op, in graphs and recorded."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from graphs.test_graphs_in_engine import graphed_engine
from models import checkpoints
from spec_decode import engines
from spec_decode.engines import PROMPTS, create_engine, generate, params
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.graphs.recorded import StepRecorder
from atom.graphs.runner import GraphRunner
from atom.model_engine.step.step_graphs import StepGraphs
from atom.model_ops.kernels.native.build import native_build
from atom.spec_decode import factory
from atom.spec_decode.draft_policy import Candidates, DraftNumbers, FixedDrafts

K = 3
NATIVE = pytest.mark.skipif(native_build().reason is not None, reason="needs the native kernels")


class Ragged(FixedDrafts):
    """All drafts are made, and any number of each sequence's are verified, or numbers with the same
    sum, turn by turn.
    """

    same_total = False
    kept: ClassVar[Counter[int]]

    def __init__(self, choices: Sequence[int], *_: Any, made: int, **__: Any) -> None:
        super().__init__(made, choices[-1])
        self._rng = random.Random(0)

    def fit(self, numbers: DraftNumbers, made: Sequence[Candidates]) -> list[int]:
        counts = [i % (K + 1) for i in range(len(made))]
        self._rng.shuffle(counts)
        if not self.same_total:
            counts = [self._rng.randint(0, each.count) for each in made]
        self.kept.update(counts)
        return counts


@pytest.fixture
def ragged(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """The numbers of adaptive engines."""
    kept: Counter[int] = Counter()
    monkeypatch.setattr(factory, "AdaptiveDrafts", Ragged)
    monkeypatch.setattr(Ragged, "kept", kept, raising=False)
    return kept


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    folder = tmp_path_factory.mktemp("ragged")
    for kind in ("llama", "deepseek_v3"):
        engines.write_target(kind, folder / kind, byte_level_tokenizer)
    for draft in ("mha", "peagle", "dspark", "dflash2"):
        engines.write_draft(draft, folder / draft, len(byte_level_tokenizer))
    return folder


def speculation(draft: str, folder: Path) -> dict[str, Any]:
    common = {"num_speculative_tokens": K, "speculative_adaptive": True}
    if draft in ("mtp", "suffix"):
        return {**common, "method": draft}
    return {**common, "method": engines.method_of(draft), "draft_model": str(folder / draft)}


@pytest.mark.parametrize(
    ("draft", "graphs"),
    [
        *((draft, True) for draft in ("mha", "peagle", "dspark", "dflash2", "mtp", "suffix")),
        *((draft, False) for draft in ("mha", "dspark")),
    ],
)
def test_tokens_are_those_without_speculation(
    draft: str, graphs: bool, folder: Path, ragged: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = folder / ("deepseek_v3" if draft == "mtp" else "llama")
    options = speculation(draft, folder)
    plain = create_engine(target)
    if graphs:
        engine, _ = graphed_engine(monkeypatch, target, **options)
    else:
        engine = create_engine(target, **options)
    for name in ("greedy", "top-k min-p"):
        assert generate(engine, params(name)) == generate(plain, params(name)), name
    assert set(ragged) == set(range(K + 1))


@pytest.mark.usefixtures("ragged")
def test_graphs_serve_as_many_steps_as_with_equal_lengths(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: Counter[bool] = Counter()
    run = StepGraphs.run

    def counted(runner: StepGraphs, sequences: Any, step: Any, *how: Any, **more: Any) -> Any:
        steps[step.graph is not None] += 1
        return run(runner, sequences, step, *how, **more)

    monkeypatch.setattr(StepGraphs, "run", counted)

    def share(**options: Any) -> float:
        engine, _ = graphed_engine(monkeypatch, folder / "llama", **options)
        steps.clear()
        generate(engine, params("warm"))
        return steps[True] / steps.total()

    options = speculation("mha", folder)
    equal = share(**{**options, "speculative_adaptive": False})
    assert share(**options) >= equal > 0.8


@pytest.mark.parametrize(("draft", "most"), [("mha", 3), ("suffix", 6), ("lookup", 15)])
def test_steps_are_padded_to_the_next_length(
    draft: str, most: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where numbers of drafts vary there are graphs between one query and all."""
    lens: list[tuple[int, int]] = []
    fit = GraphRunner.fit

    def noted(self: GraphRunner, count: int, query_len: int, num_cached: int) -> Any:
        graph = fit(self, count, query_len, num_cached)
        if graph is not None:
            lens.append((query_len, graph.query_len))
        return graph

    monkeypatch.setattr(GraphRunner, "fit", noted)
    options: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": most}
    if draft != "suffix":
        options = {**speculation("mha", folder), "speculative_adaptive": draft == "mha"}
        options["speculative_lookup"] = draft == "lookup"
    if draft == "mha":
        monkeypatch.setattr(factory, "AdaptiveDrafts", Ragged)
        monkeypatch.setattr(Ragged, "kept", Counter(), raising=False)
    engine, _ = graphed_engine(monkeypatch, folder / "llama", **options)
    generate(engine, params("greedy"), PROMPTS[-4:])
    captured = {"mha": (1, 2, 3, 4), "suffix": (1, 2, 4, 7), "lookup": (1, 2, 4, 8, 16)}[draft]
    assert all(own == min(n for n in captured if n >= wanted) for wanted, own in lens)
    assert len({own for _, own in lens}) >= 3


@NATIVE
@pytest.mark.usefixtures("ragged")
def test_programs_serve_all_steps_with_as_many_drafts(
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that verify the same number in all are one program, whoever the drafts belong to."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    checkpoints.llama(tmp_path / "target", vocab_size=len(byte_level_tokenizer), **sizes)
    byte_level_tokenizer.save_pretrained(tmp_path / "target")
    raw = engines.draft_bench.MHA | sizes | {"vocab_size": len(byte_level_tokenizer)}
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    tensors = engines.draft_bench.draft_tensors(raw)
    engines.draft_bench.write_draft(tmp_path / "mha", raw, tensors)
    monkeypatch.setattr(Ragged, "same_total", True)
    is_usual: list[bool] = []
    take = StepRecorder.take_usual

    def counted(self: StepRecorder) -> bool:
        is_usual.append(take(self))
        return is_usual[-1]

    monkeypatch.setattr(StepRecorder, "take_usual", counted)

    def tokens(engine: LLM) -> list[list[int]]:
        return generate(engine, params("greedy", max_tokens=60), PROMPTS[:8])

    with create_engine(tmp_path / "target", enforce_eager=True) as plain:
        expected = tokens(plain)
    with create_engine(tmp_path / "target", **speculation("mha", tmp_path)) as engine:
        assert tokens(engine) == expected
    # Until the first sequences end, only block tables that grow wider make new programs.
    assert sum(is_usual[3:25]) >= 18
