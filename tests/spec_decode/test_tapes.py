"""Tapes say the same again, and where two begin to differ."""

from __future__ import annotations

from pathlib import Path

import tapes
from transformers import PreTrainedTokenizerFast


def test_tapes(tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    """One target with and without drafts, in every way to run steps."""

    def record(folder: str) -> tapes.Tapes:
        methods = {"llama": ("none", "mha")}
        return dict(
            tapes.record(tmp_path / folder, byte_level_tokenizer, methods, ("seeded",), (3,))
        )

    first = record("first")
    assert len(first) == 2 * 2 * len(tapes.RUNS)
    assert tapes.differences(first, record("second")) == []
    # How steps run changes neither their tokens nor their drafts.
    for name, tape in first.items():
        assert len(tape) > 10
        assert tape == first[name.replace("op by op", "recorded").replace("graphs", "recorded")]
    other = {name: [*tape] for name, tape in first.items()}
    changed = [*other][3]
    other[changed][7] = "[[1], [2], [3]] abc"
    [found] = tapes.differences(first, other)
    assert found.startswith(f"{changed}: step 7: ")
    del other[changed]
    assert tapes.differences(first, other) == [f"{changed}: only on one side"]
