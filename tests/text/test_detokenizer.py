"""Detokenizers against `tokenizer.decode`, whatever the number of tokens per step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from atom.config import ModelOptions
from atom.model_loader.source import resolve_model
from atom.model_loader.tokenizers.tokenizer import load_tokenizer
from atom.text.detokenizer import (
    ByteLevelVocabulary,
    Vocabulary,
    WindowVocabulary,
    create_vocabulary,
)

FEW = settings(max_examples=150)


@pytest.fixture(scope="module")
def rich_tokenizer(byte_level_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """ByteLevel BPE with added tokens that are, and are not, spelled in its byte alphabet."""
    inner = Tokenizer.from_str(byte_level_tokenizer.backend_tokenizer.to_str())
    inner.add_tokens(
        [
            AddedToken("Ġadded", special=False),
            AddedToken("日本", special=False),
            AddedToken("a b", special=False),
            AddedToken("<|日|>", special=True),
            AddedToken("�", special=False),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """BPE with byte fallback and the decoder of Llama 2."""
    words = ["▁", "▁a", "▁Hello", "a", "b", "▁▁", ",", "�", "é", "▁日", "<0x>"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    inner = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def embedded_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the embedded model."""
    options = ModelOptions()
    return load_tokenizer(resolve_model(options), options)


def stream(
    vocabulary: Vocabulary,
    ids: Sequence[int],
    sizes: Sequence[int],
    skip: bool,
    kept: Sequence[str] = (),
) -> str:
    """Feed `ids` in steps of the given sizes, over and over."""
    detokenizer = vocabulary.detokenizer(skip_special_tokens=skip, kept=kept)
    text, start, steps = "", 0, itertools.cycle(sizes)
    while start < len(ids):
        size = next(steps)
        text += detokenizer.feed(ids[start : start + size])
        start += size
    return text + detokenizer.finish()


def decode(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], skip: bool) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)


SIZES = st.lists(st.integers(1, 16), min_size=1, max_size=8)


@FEW
@given(data=st.data(), sizes=SIZES, skip=st.booleans())
def test_byte_level_stream_is_the_full_decode(
    rich_tokenizer: PreTrainedTokenizerFast, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    # Ids past the end stand for the padding rows of a model's embedding.
    ids = data.draw(st.lists(st.integers(0, len(rich_tokenizer) + 3), max_size=60))
    vocabulary = create_vocabulary(rich_tokenizer)
    assert isinstance(vocabulary, ByteLevelVocabulary)
    assert stream(vocabulary, ids, sizes, skip) == decode(rich_tokenizer, ids, skip)


@FEW
@given(data=st.data(), sizes=SIZES, skip=st.booleans())
def test_stream_of_a_real_tokenizer_is_the_full_decode(
    embedded_tokenizer: PreTrainedTokenizerFast, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    vocabulary = create_vocabulary(embedded_tokenizer)
    assert isinstance(vocabulary, ByteLevelVocabulary)
    text_ids = embedded_tokenizer(data.draw(st.text(max_size=30)))["input_ids"]
    any_ids = data.draw(st.lists(st.integers(0, len(embedded_tokenizer) - 1), max_size=40))
    ids = [*text_ids, *any_ids]
    assert stream(vocabulary, ids, sizes, skip) == decode(embedded_tokenizer, ids, skip)


@FEW
@given(data=st.data(), sizes=SIZES)
def test_kept_special_tokens_stay(
    rich_tokenizer: PreTrainedTokenizerFast, data: st.DataObject, sizes: list[int]
) -> None:
    ids = data.draw(st.lists(st.integers(0, len(rich_tokenizer) - 1), max_size=40))
    kept = ["<|日|>", "<|im_start|>", "no token of this vocabulary"]
    kept_ids = [i for i in rich_tokenizer.convert_tokens_to_ids(kept[:2]) if i is not None]
    visible = [i for i in ids if i in kept_ids or decode(rich_tokenizer, [i, i], True)]
    expected = decode(rich_tokenizer, visible, False)
    for vocabulary in (create_vocabulary(rich_tokenizer), WindowVocabulary(rich_tokenizer)):
        assert stream(vocabulary, ids, sizes, True, kept) == expected


@FEW
@given(text=st.text(max_size=60), sizes=SIZES)
def test_real_text_never_breaks(
    rich_tokenizer: PreTrainedTokenizerFast, text: str, sizes: list[int]
) -> None:
    ids = rich_tokenizer(text.replace("<|", ""), add_special_tokens=False)["input_ids"]
    vocabulary = create_vocabulary(rich_tokenizer)
    detokenizer = vocabulary.detokenizer(skip_special_tokens=True)
    text = decode(rich_tokenizer, ids, True)
    seen, steps, start = "", itertools.cycle(sizes), 0
    while start < len(ids):
        size = next(steps)
        seen += detokenizer.feed(ids[start : start + size])
        start += size
        assert text.startswith(seen)  # nothing is ever taken back
    assert seen == text  # valid text has nothing left to flush
    assert detokenizer.finish() == ""


def test_every_kind_of_invalid_utf8(rich_tokenizer: PreTrainedTokenizerFast) -> None:
    edges = [0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xE0, 0xE1, 0xED, 0xEF, 0xF0]
    edges += [0xF1, 0xF4, 0xF5]
    id_of = {
        vocabulary_bytes: token_id
        for token_id in range(len(rich_tokenizer))
        if len(vocabulary_bytes := create_vocabulary(rich_tokenizer).token_bytes(token_id)) == 1
    }
    vocabulary = create_vocabulary(rich_tokenizer)
    for sequence in itertools.product(edges, repeat=3):
        ids = [id_of[bytes([byte])] for byte in sequence]
        assert stream(vocabulary, ids, [1], True) == decode(rich_tokenizer, ids, True), sequence


@pytest.mark.parametrize("size", range(1, 17))
def test_genuine_replacement_character_comes_at_once(
    rich_tokenizer: PreTrainedTokenizerFast, size: int
) -> None:
    text = "a � b�� 😀 �"
    ids = rich_tokenizer(text, add_special_tokens=False)["input_ids"]
    vocabulary = create_vocabulary(rich_tokenizer)
    detokenizer = vocabulary.detokenizer(skip_special_tokens=True)
    seen = "".join(
        detokenizer.feed(ids[start : start + size]) for start in range(0, len(ids), size)
    )
    assert seen == text


@FEW
@given(data=st.data(), sizes=SIZES, skip=st.booleans())
def test_sentencepiece_stream_is_the_full_decode(
    sentencepiece_tokenizer: PreTrainedTokenizerFast,
    data: st.DataObject,
    sizes: list[int],
    skip: bool,
) -> None:
    size = len(sentencepiece_tokenizer)
    characters = [list("😀".encode()), list("é".encode()), [0xE4, 0xBD], [0x80]]
    byte_ids = [[byte + 3 for byte in character] for character in characters]
    words = [[token_id] for token_id in (*range(3), *range(259, size + 2))]
    pieces = data.draw(st.lists(st.sampled_from([*byte_ids, *words]), max_size=60))
    ids = list(itertools.chain.from_iterable(pieces))
    vocabulary = create_vocabulary(sentencepiece_tokenizer)
    assert isinstance(vocabulary, WindowVocabulary)
    known = [token_id for token_id in ids if token_id < size]
    expected = decode(sentencepiece_tokenizer, known, skip)
    assert stream(vocabulary, ids, sizes, skip) == expected


@FEW
@given(data=st.data(), sizes=SIZES, skip=st.booleans())
def test_windowed_decoding_of_byte_level_tokens(
    rich_tokenizer: PreTrainedTokenizerFast, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    """Tokenizers that are ByteLevel in disguise (tiktoken, say) take the generic way."""
    ids = data.draw(st.lists(st.integers(0, len(rich_tokenizer) - 1), max_size=80))
    vocabulary = WindowVocabulary(rich_tokenizer)
    assert stream(vocabulary, ids, sizes, skip) == decode(rich_tokenizer, ids, skip)


def test_windowed_decoding_streams(sentencepiece_tokenizer: PreTrainedTokenizerFast) -> None:
    detokenizer = create_vocabulary(sentencepiece_tokenizer).detokenizer(skip_special_tokens=True)
    hello, comma = sentencepiece_tokenizer.convert_tokens_to_ids(["▁Hello", ","])
    emoji = [byte + 3 for byte in "😀".encode()]
    pieces = [detokenizer.feed([token]) for token in (hello, comma, *emoji, comma, hello)]
    assert pieces == ["Hello", ",", "", "", "", "", "😀,", " Hello"]


def test_first_space_depends_on_the_context(
    sentencepiece_tokenizer: PreTrainedTokenizerFast,
) -> None:
    vocabulary = create_vocabulary(sentencepiece_tokenizer)
    hello, comma, bos = sentencepiece_tokenizer.convert_tokens_to_ids(["▁Hello", ",", "<s>"])
    for context, expected in (([], "Hello"), ([bos], "Hello"), ([comma], " Hello")):
        detokenizer = vocabulary.detokenizer(skip_special_tokens=True, context_ids=context)
        assert detokenizer.feed([hello]) + detokenizer.finish() == expected


def test_token_bytes_and_text(
    rich_tokenizer: PreTrainedTokenizerFast, sentencepiece_tokenizer: PreTrainedTokenizerFast
) -> None:
    byte_level = create_vocabulary(rich_tokenizer)
    ids = rich_tokenizer("the 😀", add_special_tokens=False)["input_ids"]
    assert b"".join(byte_level.token_bytes(t) for t in ids) == "the 😀".encode()
    assert byte_level.token_text(rich_tokenizer.eos_token_id) == "<|im_end|>"
    assert byte_level.token_text(rich_tokenizer.convert_tokens_to_ids("日本")) == "日本"
    assert byte_level.token_text(ids[-1]) == "\ufffd"
    assert byte_level.token_bytes(10**6) == b""

    windowed = create_vocabulary(sentencepiece_tokenizer)
    for piece, expected in (
        ("▁Hello", b" Hello"),
        ("▁", b" "),
        ("a", b"a"),
        ("<0xF0>", b"\xf0"),
        ("<0x0A>", b"\n"),
        ("<0x>", b"<0x>"),
        ("</s>", b"</s>"),
    ):
        token_id = sentencepiece_tokenizer.convert_tokens_to_ids(piece)
        assert windowed.token_bytes(token_id) == expected
    assert windowed.token_text(sentencepiece_tokenizer.convert_tokens_to_ids("<0xF0>")) == "\ufffd"
    assert windowed.token_bytes(10**6) == b""


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("kind", ["byte_level", "window", "bytes of a run"])
def test_time_is_linear(
    rich_tokenizer: PreTrainedTokenizerFast,
    sentencepiece_tokenizer: PreTrainedTokenizerFast,
    kind: str,
) -> None:
    def seconds(num_tokens: int) -> float:
        if kind == "bytes of a run":
            vocabulary, ids = create_vocabulary(sentencepiece_tokenizer), [0xE4 + 3] * num_tokens
        else:
            # A stray byte: the end of the text never settles.
            stray = rich_tokenizer("é", add_special_tokens=False)["input_ids"][-1:]
            make = create_vocabulary if kind == "byte_level" else WindowVocabulary
            vocabulary, ids = make(rich_tokenizer), stray * num_tokens
        start = time.thread_time()
        stream(vocabulary, ids, [1], True)
        return time.thread_time() - start

    seconds(200)
    # Quadratic growth would make this 100.
    assert min(seconds(10_000) for _ in range(2)) < 50 * max(seconds(1_000), 5e-3)
