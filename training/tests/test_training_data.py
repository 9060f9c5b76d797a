"""Prompts and datasets: what is read, what is refused and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from atom.bench.repetition import repeated_bigram_share
from atom_train.data.dataset import Dataset, Example, Manifest, draw_temperature, write_shard
from atom_train.data.prompts import ChatTemplate, DataError, PromptFile, plan_prompts
from atom_train.data.repetition import LoopDetector


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_messages_are_cut_after_the_last_user_turn(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    file = PromptFile(write_lines(tmp_path / "p.jsonl", json.dumps({"messages": messages}), ""))
    assert file.read() == [messages[:4]]


def test_a_field_holds_the_user_turn(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", '{"question": "why?"}')
    file = PromptFile.parse(f"{path}:question")
    assert file.read() == [[{"role": "user", "content": "why?"}]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object"),
        ('{"text": "x"}', "no list of 'messages'"),
        ('{"messages": []}', "no list of 'messages'"),
        ('{"messages": [{"role": "user"}]}', "role of"),
        ('{"messages": [{"role": "poet", "content": "x"}]}', "role of"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no user message"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    good = '{"messages": [{"role": "user", "content": "x"}]}'
    path = write_lines(tmp_path / "p.jsonl", good, line)
    with pytest.raises(DataError, match=f"line 2: .*{message}"):
        PromptFile(path).read()


def test_missing_fields_and_empty_files_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", '{"question": ""}')
    with pytest.raises(DataError, match="line 1: field 'question' holds no text"):
        PromptFile(path, "question").read()
    with pytest.raises(DataError, match="is empty"):
        PromptFile(write_lines(tmp_path / "e.jsonl", "")).read()
    with pytest.raises(DataError, match="cannot read"):
        PromptFile(tmp_path / "absent.jsonl").read()
    with pytest.raises(DataError, match="nothing to answer"):
        plan_prompts([], 0, 0)


def test_plans_are_reproducible(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", *(json.dumps({"q": str(i)}) for i in range(20)))
    file = PromptFile(path, "q")
    assert plan_prompts([file], 5, 1) == plan_prompts([file], 5, 1)
    assert plan_prompts([file], 5, 1) != plan_prompts([file], 5, 2)
    assert len(plan_prompts([file], 5, 1, samples_per_prompt=2)) == 45


def test_a_template_is_needed(byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    template = ChatTemplate.of(byte_level_tokenizer)
    ids = template.render([{"role": "user", "content": "hello"}])
    assert ids[: len(template.user_prefix)] == template.user_prefix
    assert byte_level_tokenizer.decode(ids[len(template.user_prefix) :]).startswith("hello")
    import copy

    bare = copy.deepcopy(byte_level_tokenizer)
    bare.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        ChatTemplate.of(bare)
    bare.chat_template = "nothing"
    with pytest.raises(DataError, match="leaves out the user's turn"):
        ChatTemplate.of(bare)


def test_repetition() -> None:
    assert repeated_bigram_share([1]) == 0
    assert repeated_bigram_share([1, 2, 3, 4]) == 0
    assert repeated_bigram_share([1, 2] * 10) == pytest.approx(17 / 19)
    detector = LoopDetector()
    looped = [detector.feed([t]) for t in [1, 2, 3] * 6]
    # Six tokens for the fourth time, once every three tokens.
    assert looped.index(True) == 6 + 3 * 3 - 1
    assert not LoopDetector().feed(range(1000))


def dataset(folder: Path, target: str = "tiny", tokens: int = 9, aux: bool = True) -> Path:
    folder.mkdir()
    ids = torch.arange(tokens, dtype=torch.int32)
    mask = torch.arange(tokens) >= 4
    features = torch.arange(2.0 * (tokens - 1)).view(-1, 2) if aux else None
    write_shard(folder / "a.safetensors", [Example(i, ids, mask, features) for i in (5, 3)])
    settings = {"target": target, "seed": 1, "temperatures": [0.0, 1.0]}
    manifest = Manifest(settings, [1] if aux else None, shards=["a.safetensors"])
    manifest.write(folder)
    return folder


def test_datasets_are_numbered_through(tmp_path: Path) -> None:
    folders = [dataset(tmp_path / "a"), dataset(tmp_path / "b")]
    read = Dataset.read(folders, "tiny", 9)
    assert [text.index for text in read.texts] == [0, 1, 2, 3]
    assert [(p.first, p.last) for p in read.places] == [(0, 8), (8, 16)] * 2
    assert read.aux_layer_ids == (1,)
    temperatures = [text.temperature for text in read.texts]
    assert temperatures == [draw_temperature(1, i, [0.0, 1.0]) for i in (5, 3)] * 2
    without = dataset(tmp_path / "c", aux=False)
    assert Dataset.read([folders[0], without], "tiny", 9).aux_layer_ids is None


def test_wrong_datasets_are_refused(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "a")
    with pytest.raises(DataError, match="written by 'tiny', the target is 'other'"):
        Dataset.read([folder], "other", 9)
    with pytest.raises(DataError, match="token ids outside the target's 8"):
        Dataset.read([folder], "tiny", 8)
    with pytest.raises(DataError, match="has 2 tokens, needs 3"):
        Dataset.read([dataset(tmp_path / "b", tokens=2)], "tiny", 9)
    with pytest.raises(DataError, match="is no dataset manifest"):
        Dataset.read([tmp_path], "tiny", 9)
    (folder / "a.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataError, match="is no shard"):
        Dataset.read([folder], "tiny", 9)
