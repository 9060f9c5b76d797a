"""A language model of its own as the draft: with the target's tokens, and with others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import checkpoints
from spec_decode import engines
from spec_decode.engines import PROMPTS, SETTINGS, create_engine, generate, params
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.config import ConfigError
from atom.model_loader.drafts.tokenizer import map_tokens
from atom.model_loader.locate import embedded_model
from atom.stats import SpecDecodeStats

K = 3


def other_tokenizer(num_dropped: int) -> PreTrainedTokenizerFast:
    """The bytes in another order, without the last of them, and two longer tokens."""
    chars = sorted(BYTE_CHARS)[: len(BYTE_CHARS) - num_dropped]
    vocab = {"<unk>": 0, **{char: i + 1 for i, char in enumerate(reversed(chars))}}
    vocab |= {"th": len(vocab), "the": len(vocab) + 1}
    model = tokenizer_models.BPE(vocab, [("t", "h"), ("th", "e")])
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.add_special_tokens({"eos_token": "<|im_end|>"})
    return fast


def _byte_chars() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return list(ByteLevel.alphabet())


BYTE_CHARS = _byte_chars()


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {
        kind: engines.write_target(kind, root / kind, byte_level_tokenizer)
        for kind in ("llama", "deepseek_v3")
    }
    found["small"] = engines.write_target(
        "llama", root / "small", byte_level_tokenizer, num_hidden_layers=1, hidden_size=32
    )
    found["other"] = engines.write_target(
        "llama", root / "other", other_tokenizer(20), num_hidden_layers=1, hidden_size=32
    )
    return found


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> Callable[[str, str], list[list[int]]]:
    engines_of: dict[str, LLM] = {}

    def of(kind: str, setting: str) -> list[list[int]]:
        if kind not in engines_of:
            engines_of[kind] = create_engine(folders[kind])
        return generate(engines_of[kind], params(setting))

    return of


def with_draft(target: Path, draft: Path | str, **options: Any) -> LLM:
    drafting = {"method": "draft_model", "num_speculative_tokens": K, "draft_model": str(draft)}
    return create_engine(target, **{**drafting, **options})


def drafts_of(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[int, ...], list[int]]:
    """What is drafted after each history, but for drafts behind the end of an answer."""
    num_tokens, prompts = 8, PROMPTS[:6]
    with engines.drafts_recorded(monkeypatch) as recorded:
        engine = with_draft(target, draft)
    outputs = generate(engine, params("greedy", max_tokens=num_tokens), prompts)
    whole = [[*p, *tokens] for p, tokens in zip(prompts, outputs, strict=True)]
    ends = {tuple(text[: len(text) - left]) for text in whole for left in range(K, num_tokens + 1)}
    drafts = {history: made for history, made in recorded[0].items() if made and history in ends}
    assert len(drafts) > 15
    return drafts


def vocab_size(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def stats_of(engine: LLM) -> SpecDecodeStats:
    stats = engine.engine.core.stats.spec_decode
    assert stats is not None
    return stats


@pytest.mark.parametrize("target", ["llama", "deepseek_v3"])
@pytest.mark.parametrize(("draft", "k"), [("small", 1), ("other", 3), ("deepseek_v3", 7)])
def test_tokens_equal_those_without_speculation(
    target: str,
    draft: str,
    k: int,
    folders: dict[str, Path],
    expected: Callable[[str, str], list[list[int]]],
) -> None:
    engine = with_draft(folders[target], folders[draft], num_speculative_tokens=k)
    for setting in SETTINGS:
        assert generate(engine, params(setting)) == expected(target, setting), setting
    assert stats_of(engine).num_drafts > 0
    # It reads tokens alone, so the target's last layer computes only the rows of logits.
    worker: Any = engine.engine.core.executor
    assert worker.inputs._selects_rows


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole prompts"),
        pytest.param({"max_num_batched_tokens": 16}, id="chunks"),
        pytest.param({"overlap": True}, id="overlapped"),
        pytest.param({"enforce_eager": True}, id="op by op"),
    ],
)
@pytest.mark.parametrize("target", ["llama", "deepseek_v3"])
def test_a_target_that_drafts_for_itself_is_right_each_time(
    target: str, options: dict[str, Any], folders: dict[str, Path]
) -> None:
    """So the draft's cache has every token at its place, also those of prefixes that are found."""
    engine = with_draft(folders[target], folders[target], **options)
    for setting in ("greedy", "warm", "greedy"):
        generate(engine, params(setting))
    stats = stats_of(engine)
    assert stats.num_accepted_tokens >= 0.995 * stats.num_draft_tokens > 0
    assert stats.accepted_counts[K] > 100


def test_drafts_are_the_models_own_continuations(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = drafts_of(folders["llama"], folders["small"], monkeypatch)
    alone = create_engine(folders["small"])
    found = generate(alone, params("greedy", max_tokens=K), [list(h) for h in drafts])
    assert found == [*drafts.values()]


def test_with_other_tokens_drafts_are_continuations_of_the_mapped_text(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = drafts_of(folders["llama"], folders["other"], monkeypatch)
    sizes = [vocab_size(folders[name]) for name in ("other", "llama")]
    maps = map_tokens(folders["other"], folders["llama"], *sizes)
    alone = create_engine(folders["other"])
    prompts = [[maps.to_draft[t] for t in history] for history in drafts]
    first = [own[0] for own in generate(alone, params("greedy", max_tokens=1), prompts)]
    assert [maps.to_target[t] for t in first] == [own[0] for own in drafts.values()]


def test_tokens_are_mapped_by_their_texts(
    tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    ours, theirs = other_tokenizer(0), byte_level_tokenizer
    ours.save_pretrained(tmp_path / "draft")
    theirs.save_pretrained(tmp_path / "target")
    maps = map_tokens(tmp_path / "draft", tmp_path / "target", len(ours) + 2, len(theirs))
    assert maps.num_shared >= 257
    for char in BYTE_CHARS:
        mine, other = ours.convert_tokens_to_ids([char])[0], theirs.convert_tokens_to_ids([char])[0]
        assert (maps.to_target[mine], maps.to_draft[other]) == (other, mine)
    end, other_end = (
        ours.convert_tokens_to_ids("<|im_end|>"),
        theirs.convert_tokens_to_ids("<|im_end|>"),
    )
    assert (maps.to_target[end], maps.to_draft[other_end]) == (other_end, end)
    ids = {bytes(theirs.decode([i]).encode()): i for i in range(len(theirs))}
    the = ours.convert_tokens_to_ids("the")
    assert maps.to_target[the] == ids.get(b"the", ids.get(b"th", ids[b"t"]))
    longer = next(t for t in ids if len(t) > 2 and t not in (b"the", b"<unk>") and t.isalpha())
    assert maps.to_draft[ids[longer]] == ours.convert_tokens_to_ids([longer.decode()[-1]])[0]
    assert len(maps.to_target) == len(ours) + 2
    assert not maps.are_identical
    assert map_tokens(tmp_path / "target", tmp_path / "target", 330, 330).are_identical


def test_tiktoken_and_sentencepiece_read_the_same_texts(tmp_path: Path) -> None:
    import base64

    tiktoken, pieces = tmp_path / "tiktoken", tmp_path / "pieces"
    tiktoken.mkdir(), pieces.mkdir()
    texts = [b"a", b" the", "é".encode()[:1], "中".encode()]
    (tiktoken / "tiktoken.model").write_bytes(
        b"\n".join(base64.b64encode(t) + b" %d" % i for i, t in enumerate(texts))
    )
    added = {"4": {"content": "<|end|>"}}
    (tiktoken / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    vocab = [["\u2581the", 0.0], ["中", 0.0], ["<0xC3>", 0.0], ["a", 0.0]]
    content = {
        "model": {"type": "Unigram", "vocab": vocab},
        "decoder": {"type": "ByteFallback"},
        "added_tokens": [{"id": 4, "content": "<|end|>"}],
    }
    (pieces / "tokenizer.json").write_text(json.dumps(content))
    maps = map_tokens(pieces, tiktoken, 5, 5)
    assert maps.to_target == [1, 3, 2, 0, 4]
    assert maps.to_draft == [3, 0, 2, 1, 4]
    assert maps.num_shared == 5


def test_what_does_not_fit_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    target = folders["llama"]
    with pytest.raises(ConfigError, match="method draft_model needs a draft model"):
        create_engine(target, method="draft_model", num_speculative_tokens=3)
    with pytest.raises(ConfigError, match="draft_aux_layer_convention would have no effect"):
        with_draft(target, folders["small"], draft_aux_layer_convention="output")
    with pytest.raises(ConfigError, match="there is no folder"):
        with_draft(target, tmp_path / "nothing")
    stranger = checkpoints.llama(tmp_path / "stranger", vocab_size=40).folder
    vocab = {chr(0x4E00 + i): i for i in range(40)}
    fields = {"model": {"type": "BPE", "vocab": vocab}, "decoder": None, "added_tokens": []}
    (stranger / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="have no token in common"):
        with_draft(target, stranger)


def test_the_embedded_model_with_a_tiny_one(folders: dict[str, Path]) -> None:
    """Real text, another vocabulary; and the embedded model for itself, from its GGUF file."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "quantization": "none",
        "max_model_len": 256,
        "num_threads": 1,
    }
    greedy = SamplingParams(temperature=0, max_tokens=12)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    plain = LLM(**options, no_speculation=True)
    expected = plain.chat(question, greedy)[0].outputs[0].token_ids
    plain.shutdown()
    for draft, accepts in ((folders["other"], False), (embedded_model(), True)):
        drafting = {"method": "draft_model", "num_speculative_tokens": 3}
        with LLM(**options, **drafting, draft_model=str(draft)) as engine:
            assert engine.chat(question, greedy)[0].outputs[0].token_ids == expected
            stats = stats_of(engine)
            assert (stats.num_accepted_tokens == stats.num_draft_tokens > 0) is accepts
