"""The demo: which draft it uses, and the table that compares speculation with none."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom.config import ConfigError
from atom.entrypoints.openai_server import create_parser
from atom.examples import simple_inference
from atom.examples.simple_inference import Answer, format_comparison
from atom.model_engine.arg_utils import (
    choose_draft,
    engine_config,
    with_shipped_draft,
    without_speculation,
)
from atom.model_loader.drafts import shipped as shipped_draft
from atom.stats import SpecDecodeStats, total


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for the folder of assets, with a draft in it."""
    draft = tmp_path / "smollm2-135m-eagle3"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    monkeypatch.setattr(shipped_draft, "_ASSETS", tmp_path)
    return draft


def test_the_shipped_draft_is_for_the_embedded_model(shipped: Path) -> None:
    options = with_shipped_draft({})
    assert (options["method"], options["draft_model"]) == ("eagle3", str(shipped))
    assert engine_config(**options).speculative is not None
    assert with_shipped_draft({"model": "another"}) == {"model": "another"}
    suffix = {"method": "suffix", "num_speculative_tokens": 2}
    assert with_shipped_draft(suffix) == suffix
    assert without_speculation(with_shipped_draft({"dtype": "float32"})) == {"dtype": "float32"}


def test_without_a_shipped_draft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shipped_draft, "_ASSETS", tmp_path)
    assert with_shipped_draft({}) == {}


def test_the_flag_that_turns_it_off(shipped: Path) -> None:
    assert choose_draft({}, no_speculation=True) == {}
    assert choose_draft({}, no_speculation=False)["draft_model"] == str(shipped)
    with pytest.raises(ConfigError, match="contradict"):
        choose_draft({"method": "mtp", "num_speculative_tokens": 1}, no_speculation=True)
    assert create_parser().parse_args(["--no-speculation"]).no_speculation
    assert not simple_inference.create_parser().parse_args([]).no_speculation


def answer(tokens: list[int], seconds: float, accepted: list[int] | None) -> Answer:
    drafts = None
    if accepted is not None:
        drafts = SpecDecodeStats(
            num_drafts=sum(accepted), num_draft_tokens=2 * sum(accepted), accepted_counts=accepted
        )
    return Answer(10, tokens, 0.1, seconds, "stop", drafts)


def test_comparison() -> None:
    fast = [answer([1, 2, 3, 4, 5], 1.0, [1, 0, 1]), answer([1, 2, 3], 1.0, None)]
    slow = [answer([1, 2, 3, 4, 5], 2.0, None), answer([1, 2, 4], 0.5, None)]
    lines = format_comparison(fast, slow).splitlines()
    total, first, second = (line.split() for line in lines[1:4])
    assert total == ["all", "20", "8", "3.0", "2.4", "1.25x", "50.0%", "2.00", "1", "of", "2"]
    assert first == ["1", "10", "5", "100", "4.0", "2.0", "2.00x", "50.0%", "2.00", "yes"]
    assert second[:7] == ["2", "10", "3", "100", "2.0", "4.0", "0.50x"]
    assert lines[3].endswith("up to token 2")
    assert "--dtype float32" in lines[4]
    assert len(format_comparison(fast[:1], slow[:1]).splitlines()) == 3


def test_slower_speculation_says_why() -> None:
    fast = [answer([1, 2, 3, 4, 5], 4.0, [1, 0, 1])]
    slow = [answer([1, 2, 3, 4, 5], 1.0, None)]
    said = format_comparison(fast, slow).splitlines()[-1]
    assert "slower than none on this machine now" in said
    assert "gives 2.00 tokens and takes 8.00 times as long" in said


def test_sums_of_statistics() -> None:
    a = SpecDecodeStats(num_drafts=3, num_draft_tokens=6, accepted_counts=[1, 1, 1])
    b = SpecDecodeStats(num_drafts=2, num_draft_tokens=2, accepted_counts=[0, 2])
    assert total([a, b]) == SpecDecodeStats(
        num_drafts=5, num_draft_tokens=8, accepted_counts=[1, 3, 1]
    )
    assert total([]) == SpecDecodeStats()
    assert total([a, b]).tokens_per_forward == 2


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_prompts_are_answered_twice(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str], temperature: str
) -> None:
    """Unseeded requests, too, are answered alike: both engines draw the same seeds."""
    flags = ["--model", str(tiny_llama_dir), "--dtype", "float32", "--num-threads", "1"]
    flags += ["--kv-cache-memory", "4MB", "--method", "suffix", "--num-speculative-tokens", "2"]
    flags += ["--max-tokens", "16", "--temperature", temperature, "--compare"]
    assert simple_inference.main(flags) == 0
    output = capsys.readouterr().out
    assert "once more without speculation" in output
    assert "3 of 3" in output
    assert output.count("yes") == 3


def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert simple_inference.main(["--no-speculation", "--method", "suffix"]) == 2
    assert "contradict" in capsys.readouterr().err
    assert simple_inference.main(["--model", "m", "--compare"]) == 2
    assert "needs a --method" in capsys.readouterr().err
