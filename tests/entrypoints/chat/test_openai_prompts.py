"""From texts and chats to token ids, and from logprobs to their spelling."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.chat.logprobs import CompletionLogprobs, chat_logprobs
from atom.entrypoints.chat.protocol import ChatPrompt, CompletionRequest
from atom.entrypoints.chat.tokenization import PromptEncoder
from atom.entrypoints.http.errors import ApiError
from atom.entrypoints.openai.completions import CompletionFormat
from atom.entrypoints.server_options import OptionError
from atom.outputs import CompletionOutput, Logprob, PositionLogprobs
from atom.text.detokenizer import create_vocabulary


@pytest.fixture
def tokenizer(
    byte_level_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> PreTrainedTokenizerFast:
    """A copy to change."""
    byte_level_tokenizer.save_pretrained(tmp_path)
    return PreTrainedTokenizerFast.from_pretrained(tmp_path)


@pytest.fixture
def encoder(byte_level_tokenizer: PreTrainedTokenizerFast) -> PromptEncoder:
    return PromptEncoder(byte_level_tokenizer, 8000, None)


def test_a_text_that_cannot_fit_is_not_tokenised(encoder: PromptEncoder) -> None:
    with pytest.raises(ApiError, match="8000 tokens") as caught:
        encoder.encode("x" * 10**6, add_special_tokens=False, param="prompt")
    assert caught.value.code == "context_length_exceeded"


def test_special_tokens_are_not_added_twice(tokenizer: PreTrainedTokenizerFast) -> None:
    start = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)]
    )
    encoder = PromptEncoder(tokenizer, 1000, "<|endoftext|>{{ messages[0].content }}")
    chat = ChatPrompt.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    once = encoder.encode_chat(chat, add_special_tokens=False)
    twice = encoder.encode_chat(chat, add_special_tokens=True)
    plain = encoder.encode("hi", add_special_tokens=True, param="prompt")
    assert once.token_ids == plain.token_ids
    assert once.token_ids.count(start) == 1
    assert twice.token_ids.count(start) == 2


def test_a_tokenizer_without_a_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    encoder = PromptEncoder(tokenizer, 1000, None)
    chat = ChatPrompt.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(ApiError, match="--chat-template"):
        encoder.encode_chat(chat, add_special_tokens=False)


def test_images_that_no_model_reads_are_said_before_a_template_fails(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Many templates join a message's content with texts, which a list of parts is not."""
    encoder = PromptEncoder(tokenizer, 1000, "{{ '<user>' + messages[0].content }}")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    chat = ChatPrompt.model_validate({"messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(ApiError, match="this model reads none; send text alone"):
        encoder.encode_chat(chat, add_special_tokens=False)


def test_a_template_that_is_none(byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(OptionError, match="line 2"):
        PromptEncoder(byte_level_tokenizer, 1000, "fine\n{% if %}")
    # Refusing one chat does not make it a wrong template.
    PromptEncoder(byte_level_tokenizer, 1000, "{{ raise_exception('never') }}")


def test_roles_and_tool_calls_reach_the_template(
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.x + 1 }}{% endif %}"
        "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %};{% endfor %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 41}'}}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "t"}], "tool_call_id": "c"},
    ]
    chat = ChatPrompt.model_validate({"messages": messages})
    encoder = PromptEncoder(byte_level_tokenizer, 1000, template)
    prompt = encoder.encode_chat(chat, add_special_tokens=False)
    assert prompt.text == "system:d;assistant:42;tool:t(c);"
    knows = PromptEncoder(byte_level_tokenizer, 1000, template + "{# developer #}")
    prompt = knows.encode_chat(chat, add_special_tokens=False)
    assert prompt.text is not None
    assert prompt.text.startswith("developer:d;")


@settings(max_examples=60)
@given(st.text(max_size=30))
def test_offsets_find_the_tokens(byte_level_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    vocabulary = create_vocabulary(byte_level_tokenizer)
    ids = byte_level_tokenizer.encode(text, add_special_tokens=False)
    columns = CompletionLogprobs(vocabulary, 0, skip_special_tokens=False).format(
        ids, [None] * len(ids)
    )
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        if not token.startswith("bytes:\\x"):
            assert text.startswith(token, offset)


def test_candidates_are_ranked_and_cut(byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = create_vocabulary(byte_level_tokenizer)
    a, b, c, d = (byte_level_tokenizer.convert_tokens_to_ids(t) for t in "abcd")
    position = {
        d: Logprob(float("-inf"), 9, "d"),
        a: Logprob(-1.0, 2, "a"),
        b: Logprob(-0.5, 1, "b"),
        c: Logprob(-2.0, 3, "c"),
    }
    columns = CompletionLogprobs(vocabulary, 2, skip_special_tokens=True).format([d], [position])
    assert columns["top_logprobs"] == [{"b": -0.5, "a": -1.0, "d": -9999.0}]
    assert [*columns["top_logprobs"][0]] == ["b", "a", "d"]
    assert columns["token_logprobs"] == [-9999.0]
    rows = chat_logprobs(vocabulary, 2, [d], [position])
    assert rows[0]["token"] == "d"
    assert [row["token"] for row in rows[0]["top_logprobs"]] == ["b", "a"]
    assert chat_logprobs(vocabulary, 0, [d], [position])[0]["top_logprobs"] == []


def pieces_with_byte_fallback() -> PreTrainedTokenizerFast:
    """As SentencePiece's: a space before each text, bytes for unknown characters."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "a", "b", "\u2581a"]
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    backend = Tokenizer(
        models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("text", ["a b", "aé bü", "日本 a😀b", "a</s>b é"])
def test_offsets_in_an_echoed_prompt(text: str, skip: bool) -> None:
    """Bytes of a character lie where it begins, and added special tokens where they would be."""
    tokenizer = pieces_with_byte_fallback()
    ids = tokenizer.encode(text)
    columns = CompletionLogprobs(create_vocabulary(tokenizer), 0, skip_special_tokens=skip)
    echoed = columns.format(ids, [None] * len(ids), text)
    assert (echoed["tokens"][0], echoed["text_offset"][0]) == ("<s>", 0)
    at = 0
    for token, offset in list(zip(echoed["tokens"], echoed["text_offset"], strict=True))[1:]:
        if token.startswith("bytes:"):
            at = text.find(next(c for c in text[at:] if ord(c) > 127), at)
            assert offset in (at, at + 1)
        else:
            at = offset
            assert text.startswith((token, token.removeprefix(" ")), offset)
    generated = columns.format([tokenizer.convert_tokens_to_ids("a"), ids[1]], [None, None])
    assert generated["text_offset"] == [len(text), len(text) + 1]


def test_offsets_in_a_chat_as_a_text(byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    text = "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    ids = byte_level_tokenizer.encode(text, add_special_tokens=False)
    vocabulary = create_vocabulary(byte_level_tokenizer)
    columns = CompletionLogprobs(vocabulary, 0, skip_special_tokens=True)
    echoed = columns.format(ids, [None] * len(ids), text)
    for token, offset in zip(echoed["tokens"], echoed["text_offset"], strict=True):
        assert text.startswith(token, offset)
    assert columns.format([ids[-1]], [None])["text_offset"] == [len(text)]


def test_candidates_that_read_alike_are_all_there() -> None:
    tokenizer = pieces_with_byte_fallback()
    letter, byte = (tokenizer.convert_tokens_to_ids(t) for t in ("a", "<0x61>"))
    vocabulary = create_vocabulary(tokenizer)
    position = {byte: Logprob(-0.5, 1, "a"), letter: Logprob(-1.0, 2, "a")}
    for chosen, other in ((byte, letter), (letter, byte)):
        columns = CompletionLogprobs(vocabulary, 2, skip_special_tokens=True)
        found = columns.format([chosen], [position])["top_logprobs"][0]
        assert found == {
            "a": position[chosen].logprob,
            f"token_id:{other}": position[other].logprob,
        }
    rows = chat_logprobs(vocabulary, 2, [letter], [position])[0]["top_logprobs"]
    assert [(row["token"], row["logprob"]) for row in rows] == [("a", -0.5), ("a", -1.0)]


def test_offsets_count_special_tokens_that_stop_strings_keep(
    byte_level_tokenizer: PreTrainedTokenizerFast, encoder: PromptEncoder
) -> None:
    body = CompletionRequest(prompt="a", logprobs=0, stop=["no<|im_end|>"])
    vocabulary = create_vocabulary(byte_level_tokenizer)
    spelling = CompletionFormat(body, encoder, vocabulary)
    ids = byte_level_tokenizer.encode("fox<|im_end|><|im_start|>the", add_special_tokens=False)
    text = "fox<|im_end|>the"  # as the stop string's token stays, the other not
    positions: list[PositionLogprobs] = [{i: Logprob(-1.0, 1, "")} for i in ids]
    output = CompletionOutput(0, text, ids, None, positions)
    columns = spelling.delta(0, output)[0]["logprobs"]
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        assert text.startswith(token, offset) or token == "<|im_start|>"
