"""Tokenizers built from GGUF metadata against the tokenizers that the metadata came from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf_files import metadata_of, tiny_model, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from atom.config import ConfigError
from atom.model_loader.errors import WeightError
from atom.model_loader.gguf.file import read_gguf
from atom.model_loader.gguf.tokenizer import write_tokenizer
from atom.model_loader.source import ModelSource

WriteTiny = Callable[..., Path]

TEXTS = [
    "",
    " ",
    "  two  spaces  ",
    "Hello, world!",
    "12345",
    "3.14159 and 2,718,281; x86_64, 0x7fff, ²³½, ٣٤٥, ⅷ",
    "It's what they've said; I'LL do it. don't",
    "def f(x):\n\treturn x ** 2  # squares\n\n\nif __name__ == '__main__':\r\n    print(f(12))",
    "Straße, naïve café, Ελληνικά, русский текст, 日本語の文章です。한국어 텍스트, العربية, हिन्दी",
    "emoji 😀🚀 👩‍👩‍👧‍👦 🇩🇪, combining e\u0301 and o\u0308, \u200b zero width, \ufffd",
    "a\u00a0b\u2003c\u3000d",
    "two  中文  spaces  before",
    'https://example.org/a?b=c&d=%20e#f {"k": [1, 2.5, null]}',
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|><|im_end|>x<|im_start|> <|im_end",
    "$a^2+b^2=c^2$ | `code` ~ <tag/> 100% #1 @me",
    "....!!!???---___\n\n \n\t\n",
]

_UNKNOWN_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


def load(path: Path, folder: Path) -> PreTrainedTokenizerBase:
    folder.mkdir(exist_ok=True)
    write_tokenizer(read_gguf(path), folder)
    return AutoTokenizer.from_pretrained(folder)


def with_splits(tokenizer: PreTrainedTokenizerBase, splitting: Any, nfc: bool = False) -> Tokenizer:
    """The same vocabulary behind another pre-tokenizer."""
    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.pre_tokenizer = splitting
    if nfc:
        copy.normalizer = normalizers.NFC()
    return copy


def llama3_like(digits: str) -> pre_tokenizers.Sequence:
    """As the `tokenizer.json` of Llama 3 and Qwen2 have it, down to the number of digits."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return isolated(pattern)


# As published for GPT-4o, Mistral Nemo, Kimi-K2 and DeepSeek-V3.
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|"
    r"'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|"
    r"'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def isolated(*patterns: str) -> pre_tokenizers.Sequence:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, encode])


def splitting_of(pre: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return {
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence([digits, byte_level]),
        "refact": pre_tokenizers.Sequence([digits, byte_level]),
        "command-r": pre_tokenizers.Sequence([digits, byte_level]),
        "llama-bpe": llama3_like("{1,3}"),
        "dbrx": llama3_like("{1,3}"),
        "glm4": llama3_like("{1,3}"),
        "qwen2": llama3_like(""),
        "qwen35": isolated(_QWEN35),
        "gpt-4o": isolated(_O200K),
        "minimax-m2": isolated(_O200K),
        "tekken": isolated(_TEKKEN),
        "kimi-k2": isolated(_KIMI),
        "deepseek-v3": isolated(*_DEEPSEEK3),
    }[pre]


_PRE_TOKENIZERS = (
    *("gpt-2", "smollm", "refact", "command-r", "llama-bpe", "dbrx", "glm4", "qwen2"),
    *("gpt-4o", "minimax-m2", "tekken", "kimi-k2", "deepseek-v3", "qwen35"),
)


@pytest.mark.parametrize("pre", _PRE_TOKENIZERS)
def test_pre_tokenizers(
    write_tiny: WriteTiny, tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast, pre: str
) -> None:
    changes = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
    ours = load(write_tiny(changes=changes), tmp_path / "tokenizer")
    is_normalised = pre in ("qwen2", "qwen35", "command-r")
    original = with_splits(byte_level_tokenizer, splitting_of(pre), nfc=is_normalised)

    @settings(max_examples=60)
    @given(st.one_of(st.sampled_from(TEXTS), st.text(max_size=40), st.from_regex(r"[a-z0-9 '\n]+")))
    def check(text: str) -> None:
        assert ours(text)["input_ids"] == original.encode(text).ids
        assert ours.decode(ours(text)["input_ids"]) == original.decode(
            original.encode(text).ids, skip_special_tokens=False
        )

    for text in TEXTS:
        check.hypothesis.inner_test(text)
    check()


def test_llama_cpp_default_splits_digits_by_three(write_tiny: WriteTiny, tmp_path: Path) -> None:
    tokenizer = load(write_tiny(changes={"tokenizer.ggml.pre": "default"}), tmp_path / "t")
    splits = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("ab 1234567, c")
    assert [piece for piece, _ in splits] == ["ab", "Ġ", "123", "456", "7", ",", "Ġc"]


@pytest.mark.parametrize("pre", ["deepseek-llm", "deepseek-coder"])
def test_deepseeks_first(write_tiny: WriteTiny, tmp_path: Path, pre: str) -> None:
    tokenizer = load(write_tiny(changes={"tokenizer.ggml.pre": pre}), tmp_path / "t")
    text = "ab 12 aB, ж中文\nx  "
    splits = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    pieces = [text[start:end] for _, (start, end) in splits]
    assert pieces == ["ab", " ", "1", "2", " aB", ",", " ж", "中文", "\n", "x", "  "]


@pytest.mark.parametrize("pre", ["superbpe", None])
def test_unknown_pre_tokenizers_are_named(
    write_tiny: WriteTiny, tmp_path: Path, pre: str | None
) -> None:
    path = write_tiny(changes={"tokenizer.ggml.pre": pre})
    with pytest.raises(ConfigError, match=rf"{pre or 'no pre-tokenizer'}.*Pass --tokenizer"):
        load(path, tmp_path / "t")


def test_other_tokenizer_models_are_named(write_tiny: WriteTiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer 't5' is not supported"):
        load(write_tiny(changes={"tokenizer.ggml.model": "t5"}), tmp_path / "t")


def test_incomplete_vocabularies(write_tiny: WriteTiny, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="330 tokens, but 2 token types"):
        load(write_tiny(changes={"tokenizer.ggml.token_type": [1, 1]}), tmp_path / "t")
    with pytest.raises(WeightError, match="the merges do not fit"):
        load(write_tiny(changes={"tokenizer.ggml.merges": ["zz qq"]}), tmp_path / "t")
    with pytest.raises(WeightError, match="the eos token is 9999 of 330"):
        load(write_tiny(changes={"tokenizer.ggml.eos_token_id": 9999}), tmp_path / "t")
    doubled = {"tokenizer.ggml.tokens": ["a"] * 3, "tokenizer.ggml.token_type": [1] * 3}
    with pytest.raises(WeightError, match="twice: a"):
        load(write_tiny(changes=doubled), tmp_path / "t")


def test_tokens_too_long_to_cut(write_tiny: WriteTiny, tmp_path: Path) -> None:
    tokens = ["x" * 5000, *(f"t{i}" for i in range(329))]
    with pytest.raises(WeightError, match="has 5000 characters; at most 4096 are read"):
        load(write_tiny(changes={"tokenizer.ggml.tokens": tokens}), tmp_path / "tokenizer")


def test_bos_and_eos(write_tiny: WriteTiny, tmp_path: Path) -> None:
    bos, eos = 1, 2
    plain = load(write_tiny(), tmp_path / "plain")("the")["input_ids"]
    assert bos not in plain
    changes = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    both = load(write_tiny(changes=changes), tmp_path / "both")
    assert both("the")["input_ids"] == [bos, *plain, eos]
    assert both("the", add_special_tokens=False)["input_ids"] == plain
    # Llama 3's files do not say that they want the bos token.
    llama3 = load(write_tiny(changes={"tokenizer.ggml.pre": "llama-bpe"}), tmp_path / "llama3")
    assert llama3("the")["input_ids"][0] == bos


def test_kinds_of_tokens(
    write_tiny: WriteTiny, tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    vocabulary = sorted(byte_level_tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary] + ["<think>", "[PAD0]", "[PAD1]"]
    types = [3, 3, 3] + [1] * (len(vocabulary) - 3) + [4, 5, 5]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    tokenizer = load(write_tiny(changes=changes), tmp_path / "t")
    assert len(tokenizer) == len(tokens) - 2
    ids = tokenizer("<think>x<|im_end|>")["input_ids"]
    assert ids[0] == tokens.index("<think>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>x"
    assert len(tokenizer("[PAD0]")["input_ids"]) > 1


def test_chat_templates_and_reloading(write_tiny: WriteTiny, tmp_path: Path) -> None:
    named = {"tokenizer.chat_template.tool_use": "tools: {{ messages[0]['content'] }} ü"}
    tokenizer = load(write_tiny(changes=named), tmp_path / "t")
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    tools = tokenizer.apply_chat_template(messages, chat_template="tool_use", tokenize=False)
    assert tools == "tools: hi ü"
    assert tokenizer.model_max_length == 256
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pad_token_id == 0
    tokenizer.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert all(again(text)["input_ids"] == tokenizer(text)["input_ids"] for text in TEXTS)


@pytest.fixture(scope="module")
def piece_model(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE model with byte fallback, as Llama 2 has it."""
    prefix = tmp_path_factory.mktemp("spm") / "pieces"
    sentences = [text for text in TEXTS if text.strip()] * 20
    sentences += [f"the quick brown fox number {i} jumps over the lazy dog" for i in range(200)]
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(sentences),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=0.99,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


def test_sentencepiece(tmp_path: Path, piece_model: sentencepiece.SentencePieceProcessor) -> None:
    count = piece_model.vocab_size()
    types = [
        2
        if piece_model.is_unknown(i)
        else 3
        if piece_model.is_control(i)
        else 6
        if piece_model.is_byte(i)
        else 1
        for i in range(count)
    ]
    model = tiny_model(vocab_size=count)
    metadata = metadata_of(model) | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [piece_model.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": [piece_model.get_score(i) for i in range(count)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": piece_model.bos_id(),
        "tokenizer.ggml.eos_token_id": piece_model.eos_id(),
        "tokenizer.ggml.unknown_token_id": piece_model.unk_id(),
    }
    tokenizer = load(write_gguf(tmp_path / "spm.gguf", model, metadata), tmp_path / "t")
    bos = piece_model.bos_id()
    for text in [t for t in TEXTS if t and not t.startswith("<|")]:
        ids = tokenizer(text)["input_ids"]
        assert ids == [bos, *piece_model.encode(text)], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    # Control tokens are found in the text, and what follows is a text of its own.
    eos = piece_model.eos_id()
    assert tokenizer("a</s>b")["input_ids"] == [
        bos,
        *piece_model.encode("a"),
        eos,
        *piece_model.encode("b"),
    ]


@pytest.fixture(scope="module")
def embedded(embedded_source: ModelSource) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(embedded_source.path)


@pytest.fixture(scope="module")
def original(embedded: PreTrainedTokenizerBase) -> Tokenizer:
    """The embedded vocabulary with the pre-tokenizer of the model's own `tokenizer.json`."""
    return with_splits(embedded, splitting_of("smollm"))


def test_embedded_digits_are_single_tokens(embedded: PreTrainedTokenizerBase) -> None:
    assert embedded.tokenize("12345") == ["1", "2", "3", "4", "5"]
    assert embedded.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]


def test_embedded_special_tokens(embedded: PreTrainedTokenizerBase) -> None:
    assert embedded("<|im_start|>user<|im_end|>")["input_ids"][::2] == [1, 2]
    assert (
        embedded("hello")["input_ids"] == embedded("hello", add_special_tokens=False)["input_ids"]
    )
    assert (embedded.bos_token_id, embedded.eos_token_id, embedded.pad_token_id) == (1, 2, 2)
    assert embedded.model_max_length == 8192
    assert len(embedded) == 49152
    assert embedded.is_fast


def test_embedded_chat_template(embedded: PreTrainedTokenizerBase) -> None:
    text = embedded.apply_chat_template(
        [{"role": "user", "content": "What is 2+2?"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


@settings(max_examples=200)
@given(st.one_of(st.sampled_from(TEXTS), st.text(max_size=60)))
def test_embedded_tokens_and_round_trips(
    embedded: PreTrainedTokenizerBase, original: Tokenizer, text: str
) -> None:
    ids = embedded(text)["input_ids"]
    assert ids == original.encode(text, add_special_tokens=False).ids
    # The vocabulary has no tokens for bytes that its training text never contained.
    if not _UNKNOWN_BYTES & set(text.encode()):
        assert embedded.decode(ids) == text


def test_embedded_tokenizer_files(embedded_source: ModelSource) -> None:
    config = json.loads((embedded_source.path / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is False
    assert config["eos_token"] == "<|im_end|>"
