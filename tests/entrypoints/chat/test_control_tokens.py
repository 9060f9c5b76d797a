"""Whose markers are tokens: the template's, and those of an assistant's own thoughts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from atom.entrypoints.chat.protocol import ChatPrompt
from atom.entrypoints.chat.tokenization import PromptEncoder

# Markers stand in the text of the template, or it looks for them.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
    "{% elif strips and m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments }}"
    "</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if thinks %}<think>{% endif %}"
)
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]
MARKERS += ["</tool_response>"]


@pytest.fixture(scope="module", params=["special", "not special"])
def tokenizer(
    request: pytest.FixtureRequest, byte_level_tokenizer: PreTrainedTokenizerFast
) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(byte_level_tokenizer)
    special = request.param == "special"
    added = [AddedToken(m, special=special, normalized=False) for m in MARKERS]
    tokenizer.add_tokens(added, special_tokens=special)
    # A word that a template may use, and a tag that it does not write.
    tokenizer.add_tokens([AddedToken("tool", special=False), AddedToken("<b>", special=False)])
    return tokenizer


def markers_in(tokenizer: PreTrainedTokenizerFast, *messages: Any, **variables: Any) -> list[str]:
    """The markers that are tokens of the prompt, which reads as what was written."""
    encoder = PromptEncoder(tokenizer, 4000, TEMPLATE)
    chat = ChatPrompt.model_validate(
        {"messages": [*messages], "add_generation_prompt": False, "chat_template_kwargs": variables}
    )
    prompt = encoder.encode_chat(chat, add_special_tokens=False)
    assert prompt.text is not None
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert "\ufdd0" not in prompt.text
    tokens = tokenizer.convert_ids_to_tokens(prompt.token_ids)
    return [t for t in tokens if t in MARKERS]


SPELLED = "".join(MARKERS)


def test_markers_that_users_and_tools_spell_are_text(tokenizer: PreTrainedTokenizerFast) -> None:
    user = {"role": "user", "content": SPELLED}
    call = {"type": "function", "function": {"name": "f", "arguments": f'{{"q": "{SPELLED}"}}'}}
    assistant = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", **call}]}
    result = {"role": "tool", "tool_call_id": "c", "content": SPELLED}
    template = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    assert markers_in(tokenizer, user) == []
    assert markers_in(tokenizer, user, thinks=True) == ["<think>"]
    assert markers_in(tokenizer, user, assistant, result) == template


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<think>a</think>b", ["<think>", "</think>"]),
        ("a</think>b", ["</think>"]),  # the prompt opened the thoughts
        ("<think>a", ["<think>"]),  # cut
        ("a <think> b", []),
        (f"<think>{SPELLED}</think>{SPELLED}", ["<think>", "</think>"]),
        (f"a {SPELLED}", ["</think>"]),
        ("<think>a<|im_end|></think><|im_end|>", ["<think>", "</think>"]),
    ],
)
def test_thoughts_in_an_answer_are_between_tokens(
    tokenizer: PreTrainedTokenizerFast, content: str, expected: list[str]
) -> None:
    assert markers_in(tokenizer, {"role": "assistant", "content": content}) == expected
    assert markers_in(tokenizer, {"role": "user", "content": content}) == []


def test_templates_find_thoughts_in_an_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = PromptEncoder(tokenizer, 4000, TEMPLATE)
    message = {"role": "assistant", "content": "<think>a <|im_end|></think>b"}
    chat = ChatPrompt.model_validate(
        {"messages": [message], "chat_template_kwargs": {"strips": True}}
    )
    text = encoder.encode_chat(chat, add_special_tokens=False).text
    assert text == "<|im_start|>assistant\nb<|im_end|>\n"


def test_words_and_tags_that_the_template_does_not_write_are_tokens_as_ever(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    encoder = PromptEncoder(tokenizer, 4000, TEMPLATE)
    chat = ChatPrompt.model_validate({"messages": [{"role": "user", "content": "a tool <b>"}]})
    prompt = encoder.encode_chat(chat, add_special_tokens=False)
    tokens = tokenizer.convert_ids_to_tokens(prompt.token_ids)
    assert {"tool", "<b>"} <= set(tokens)
