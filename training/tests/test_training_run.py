"""Whole runs on a tiny target: synthesise, train, resume, export, evaluate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_train import trainer
from atom_train.cli import main
from atom_train.trainer import read_log


def run(*args: object) -> None:
    assert main([str(arg) for arg in args]) == 0


ENGINE = ("--dtype", "float32", "--kv-cache-memory", "32MB", "--num-threads", "1")
SYNTHESIZE = ("--self-synthesized", 24, "--max-new-tokens", 60, "--max-repetition", 1.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """A target that can be learnt in seconds: its next token hangs mostly on the last one."""
    folder = tmp_path_factory.mktemp("target") / "model"
    shutil.copytree(tiny_llama_dir, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.mul_(0.01)
        if "lm_head" in name:
            tensor.mul_(3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    folder = tmp_path_factory.mktemp("data") / "texts"
    prompts = folder.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"q": f"What is {i}?"}) + "\n" for i in range(12)))
    run("synthesize", "--model", target, "--output", folder,
        "--prompts", f"{prompts}:q", *SYNTHESIZE, "--temperatures", 0, 0.5,
        "--max-num-seqs", 16, "--keep-features", *ENGINE)  # fmt: skip
    return folder


TRAIN = (
    "--draft-vocab-size", 256, "--rows-per-batch", 64, "--accumulate", 2, "--warmup", 0.1,
    "--log-every", 2, "--save-every", 4, "--lr", 3e-3, "--lr-fc", 1e-3, "--lr-head", 1e-3,
    "--held-out", 0.1,
)  # fmt: skip


def train(target: Path, data: Path, output: Path, *more: object) -> None:
    run("train", "--model", target, "--data", data, "--output", output, *TRAIN, *more, *ENGINE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path, target: Path) -> Path:
    """A run of one epoch, which tests only read."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(target, data, folder, "--epochs", 1)
    return folder


def losses(folder: Path) -> list[tuple[int, list[float]]]:
    return [(line["step"], line["loss"]) for line in read_log(folder / trainer.LOG)]


def test_a_draft_learns_its_targets_texts(
    data: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    train(target, data, output, "--epochs", 6, "--num-negatives", 64, "--workers", 2)
    curve = losses(output)
    assert sum(curve[-1][1]) < 0.5 * sum(curve[0][1])
    run("export", output, tmp_path / "draft", "--dtype", "float32")
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert int(tensors["t2d"].sum()) == 256 == len(tensors["lm_head.weight"])
    capsys.readouterr()
    prompts = data.parent / "prompts.jsonl"
    run("evaluate", "--model", target, "--prompts", f"{prompts}:q", "--max-tokens", 60,
        "--method", "eagle3", "--draft-model", tmp_path / "draft",
        "--num-speculative-tokens", 3, *ENGINE)  # fmt: skip
    line = capsys.readouterr().out
    assert "12 prompts" in line
    assert _acceptance(line) > 50


def test_a_killed_run_resumes_with_the_same_curve(
    data: Path, target: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "killed"
    save = trainer.save_checkpoint

    def die(*_: object) -> None:
        raise RuntimeError("killed")

    def save_once(*args: object) -> Path:
        monkeypatch.setattr(trainer, "save_checkpoint", die)
        return save(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer, "save_checkpoint", save_once)
    args = ("train", "--model", target, "--data", data, "--output", killed, *TRAIN)
    assert main([str(a) for a in (*args, "--epochs", 1, *ENGINE)]) == 2
    monkeypatch.setattr(trainer, "save_checkpoint", save)
    # It had logged on past its checkpoint, the last line only half.
    with (killed / trainer.LOG).open("a") as file:
        file.write('{"step": 6, "loss"')
    train(target, data, killed, "--epochs", 1)
    assert losses(killed) == losses(whole)
    newest = [sorted(folder.glob("checkpoint-*"))[-1] for folder in (whole, killed)]
    expected, got = (load_file(path) for path in newest)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    other = [str(a) for a in (*args, "--epochs", 2, *ENGINE)]
    assert main(other) == 2, "another schedule is another run"
    for change in (("--attention", "mla"), ("--draft-vocab-size", "100")):
        changed = [str(a) for a in (*args, "--epochs", 1, *change, *ENGINE)]
        assert main(changed) == 2, "another network is another run"


def test_features_may_be_computed_online(data: Path, target: Path, tmp_path: Path) -> None:
    """Kept while decoding, or computed from the finished text: the same curve."""
    bare = tmp_path / "bare"
    shutil.copytree(data, bare)
    manifest = json.loads((bare / "manifest.json").read_text())
    aux = manifest["aux_layer_ids"]
    (bare / "manifest.json").write_text(json.dumps(manifest | {"aux_layer_ids": None}))
    train(target, data, tmp_path / "a", "--epochs", 0.2)
    more = ("--aux-layer-ids", *aux, "--workers", 2)
    train(target, bare, tmp_path / "b", "--epochs", 0.2, *more)
    kept, computed = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert len(kept) == len(computed) > 0
    for (_, a), (_, b) in zip(kept, computed, strict=True):
        assert a == pytest.approx(b, rel=2e-3)


def test_a_synthesis_resumes(target: Path, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    few = ("--self-synthesized", 12, "--max-new-tokens", 30, "--max-repetition", 1.0)
    common = ("synthesize", "--model", target, *few, "--max-num-seqs", 4, *ENGINE)
    run(*common, "--output", whole)
    run(*common, "--output", halves, "--max-tokens", 100)
    run(*common, "--output", halves)
    texts = []
    for folder in (whole, halves):
        manifest = json.loads((folder / "manifest.json").read_text())
        by_index = {}
        for name in manifest["shards"]:
            shard = load_file(folder / name)
            pieces = shard["token_ids"].split(shard["offsets"].diff().tolist())
            by_index |= dict(
                zip(shard["indices"].tolist(), map(torch.Tensor.tolist, pieces), strict=False)
            )
        texts.append(by_index)
    assert texts[0] == texts[1]
    assert main([str(a) for a in (*common, "--output", halves, "--top-p", 0.5)]) == 2


def test_a_draft_is_trained_further(
    data: Path, target: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = tmp_path / "second"
    train(target, data, second, "--epochs", 1, "--initial-draft", whole)
    before, after = losses(whole), losses(second)
    assert after[0][1][0] < 0.9 * before[0][1][0]
    newest = [load_file(sorted(folder.glob("checkpoint-*"))[-1]) for folder in (whole, second)]
    for name in ("vocabulary", "whitening"):
        assert torch.equal(newest[0][name], newest[1][name])
    args = ["train", "--model", target, "--data", data, "--output", tmp_path / "third", *ENGINE]
    capsys.readouterr()
    for change, field in (
        (("--attention", "mla"), "architectures"),
        (("--draft-vocab-size", 100), "draft_vocab_size"),
        (("--aux-layer-ids", 0, 2), "eagle_config"),
    ):
        more = (*args, "--initial-draft", whole, *change)
        assert main([str(a) for a in more]) == 2
        assert field in capsys.readouterr().err


def test_an_exported_draft_is_trained_further(
    data: Path, target: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("export", whole, tmp_path / "first", "--dtype", "float32")
    card = tmp_path / "first" / "config.json"
    stated = {"tokens_per_forward": 2.5, "num_speculative_tokens": 3, "data": "some"}
    measured = {"draft_temperature_scale": 0.8, "expected_acceptance_length": stated}
    card.write_text(json.dumps(json.loads(card.read_text()) | measured))
    more = ("--initial-draft", tmp_path / "first", "--epochs", 1e-6, "--lr", 0, "--lr-fc", 0)
    train(target, data, tmp_path / "again", *more, "--lr-head", 0)
    run("export", tmp_path / "again", tmp_path / "second", "--dtype", "float32")
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("first", "second"))
    assert first.keys() == second.keys()
    for name in first.keys() - {"fc.weight"}:
        assert torch.equal(first[name], second[name])
    # Whitened for training, and folded back.
    torch.testing.assert_close(first["fc.weight"], second["fc.weight"], atol=2e-5, rtol=1e-4)
    whitened = load_file(sorted((tmp_path / "again").glob("checkpoint-*"))[-1])
    assert not torch.equal(whitened["weight.fc.weight"], first["fc.weight"])
    train(target, data, tmp_path / "run", "--epochs", 1, "--initial-draft", tmp_path / "first")
    before, after = losses(whole), losses(tmp_path / "run")
    assert after[0][1][0] < 0.9 * before[0][1][0]
    (tmp_path / "second" / "model.safetensors").unlink()
    args = ("train", "--model", target, "--data", data, "--output", tmp_path / "x", *ENGINE)
    assert main([str(a) for a in (*args, "--initial-draft", tmp_path / "second")]) == 2
    assert "is no exported draft" in capsys.readouterr().err


def test_the_log_counts_kept_drafts_at_each_temperature(whole: Path) -> None:
    measured = read_log(whole / trainer.LOG)[-1]["held_out"]
    assert set(measured) <= {"0.0", "0.5"}
    for shares in (m["accepted"] for m in measured.values()):
        assert 1 >= shares[0] >= shares[1] >= shares[2] >= 0


def test_a_latent_draft_trains(data: Path, target: Path, tmp_path: Path) -> None:
    train(target, data, tmp_path / "run", "--epochs", 2, "--attention", "mla")
    curve = losses(tmp_path / "run")
    assert sum(curve[-1][1]) < sum(curve[0][1])
    run("export", tmp_path / "run", tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]


def test_a_block_drafter_trains(data: Path, target: Path, tmp_path: Path) -> None:
    more = ("--draft", "block", "--depth", 4, "--markov-rank", 16)
    train(target, data, tmp_path / "run", "--epochs", 2, *more)
    curve = losses(tmp_path / "run")
    assert len(curve[0][1]) == 4
    assert sum(curve[-1][1]) < 0.8 * sum(curve[0][1])
    run("export", tmp_path / "run", tmp_path / "draft", "--dtype", "float32")
    train(
        target, data, tmp_path / "on", "--epochs", 1, *more, "--initial-draft", tmp_path / "draft"
    )
    assert losses(tmp_path / "on")[0][1][0] < curve[0][1][0]


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory, data: Path, target: Path) -> Path:
    """Texts that no draft is trained on."""
    texts = tmp_path_factory.mktemp("unseen") / "texts"
    run("synthesize", "--model", target, "--output", texts,
        "--prompts", f"{data.parent / 'prompts.jsonl'}:q", *SYNTHESIZE, "--temperatures", 1, 0,
        "--samples-per-prompt", 4, "--max-num-seqs", 16, *ENGINE)  # fmt: skip
    return texts


# A power of two: a draft of such logits at such a scale rounds as the draft itself does.
QUIETER = 1 / 16


@pytest.mark.parametrize("more", [(), ("--draft", "block", "--depth", 3, "--markov-rank", 16)])
def test_a_draft_is_calibrated(
    data: Path,
    target: Path,
    unseen: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[object, ...],
) -> None:
    """A draft of small logits races as the draft itself, at a scale that is as small: the same
    drafts are right in the texts, and the engine keeps the same ones.
    """
    train(target, data, tmp_path / "run", "--epochs", 2, *more)
    itself, quiet = tmp_path / "itself", tmp_path / "quiet"
    for folder in (itself, quiet):
        run("export", tmp_path / "run", folder, "--dtype", "float32")
    tensors = load_file(quiet / "model.safetensors")
    for name in {"lm_head.weight", "markov_head.markov_w2.weight"} & tensors.keys():
        tensors[name] *= QUIETER
    save_file(tensors, quiet / "model.safetensors", {"format": "pt"})
    before = json.loads((quiet / "config.json").read_text())
    scales = (1 / 8, 1, 4, 16)
    smaller = tuple(scale * QUIETER for scale in scales)
    capsys.readouterr()

    def calibrate(draft: Path, *options: object) -> str:
        run("calibrate", draft, "--model", target, "--data", unseen, *ENGINE, *options)
        return capsys.readouterr().out

    expected = calibrate(itself, "--dry-run", "--scales", *scales)
    assert "nothing is written" in expected
    assert json.loads((itself / "config.json").read_text()) == before
    untouched = _evaluated(data, target, quiet, bool(more), capsys)
    said = calibrate(quiet, "--scales", *smaller)
    assert "texts at T = 1" in said
    assert "it was 1" in said
    measured = _rows(said, smaller)
    assert measured == _rows(expected, scales)
    written = json.loads((quiet / "config.json").read_text())
    best = written.pop("draft_temperature_scale")
    assert written == before
    tokens, below, *_ = measured[smaller.index(best)]
    assert float(below) == 0
    # At four times its scale and more a draft is all but noise.
    assert all(float(tokens) > 1.05 * float(row[0]) for row in measured[2:])
    (itself / "config.json").write_text(
        json.dumps({**before, "draft_temperature_scale": best / QUIETER})
    )
    kept = _evaluated(data, target, quiet, bool(more), capsys)
    assert kept == _evaluated(data, target, itself, bool(more), capsys)
    assert _acceptance(kept) > 1.5 * _acceptance(untouched)


def _rows(said: str, scales: tuple[float, ...]) -> list[list[str]]:
    """For each scale the tokens per forward, how far they are below the best, and the rest."""
    lines = [line.split() for line in said.splitlines()]
    return [next(line[1:] for line in lines if line[:1] == [f"{scale:g}"]) for scale in scales]


def _evaluated(
    data: Path, target: Path, draft: Path, is_block: bool, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the engine keeps at T = 1."""
    run("evaluate", "--model", target, "--prompts", f"{data.parent / 'prompts.jsonl'}:q",
        "--max-tokens", 60, "--temperature", 1, "--method", "dspark" if is_block else "eagle3",
        "--draft-model", draft, "--num-speculative-tokens", 3, *ENGINE)  # fmt: skip
    return capsys.readouterr().out


def _acceptance(evaluated: str) -> float:
    """In per cent."""
    return float(evaluated.split("acceptance ")[1].split("%")[0])


def test_wrong_use_is_refused(
    data: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*args: object) -> str:
        assert main([str(a) for a in args]) == 2
        return capsys.readouterr().err

    train_args = ("train", "--model", target, "--data", data, "--output", tmp_path / "r")
    assert "needs --accumulate 3" in refused(*train_args, "--workers", 3)
    block = (*train_args, "--draft", "block")
    assert "--attention is for --draft eagle3" in refused(*block, "--attention", "mha")
    assert "--layers is for --draft block" in refused(*train_args, "--layers", 2)
    assert "does not fit a target" in refused(*train_args, "--draft-vocab-size", 10**6, *ENGINE)
    assert "multiple of log_every" in refused(*train_args, "--save-every", 7)
    assert "holds no checkpoint" in refused("export", tmp_path, tmp_path / "x")
    prompts = f"{data.parent / 'prompts.jsonl'}:q"
    assert "nothing to evaluate" in refused("evaluate", "--prompts", prompts)
    assert "nothing to answer" in refused("synthesize", "--output", tmp_path / "s")
    train(target, data, tmp_path / "run", "--epochs", 1e-6)
    draft = tmp_path / "draft"
    run("export", tmp_path / "run", draft)
    measure = ("calibrate", draft, "--model", target, "--data", data, *ENGINE)
    assert "no text was sampled at temperature 1, but at [0.0, 0.5]" in refused(*measure)
    assert "must be positive" in refused(*measure, "--temperature", 0)
    assert "--limit must be an integer of at least 1, got -1" in refused(*measure, "--limit", -1)
    assert "--depth must be an integer of at least 1, got 0" in refused(*measure, "--depth", 0)
    assert "takes no speculative option" in refused(*measure, "--method", "suffix")
    assert "the texts do not say" in refused(*_without(data, tmp_path, "answers", measure))
    assert "was sampled with --top-p 0.9" in refused(*_without(data, tmp_path, "top-p", measure))
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "norm_output": True}))
    assert "no draft that training makes for this target: norm_output" in refused(*measure)


def _without(
    data: Path, folder: Path, what: str, command: tuple[object, ...]
) -> tuple[object, ...]:
    """A command that reads texts which do not say where answers start, or are of a top-p."""
    texts = folder / f"without {what}"
    shutil.copytree(data, texts)
    if what == "answers":
        for shard in texts.glob("*.safetensors"):
            tensors = load_file(shard)
            del tensors["answer_starts"]
            save_file(tensors, shard)
    else:
        manifest = json.loads((texts / "manifest.json").read_text())
        manifest["settings"]["top_p"] = 0.9
        (texts / "manifest.json").write_text(json.dumps(manifest))
    return (*(texts if part == data else part for part in command), "--temperature", 0.5)
