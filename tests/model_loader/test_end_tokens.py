"""An answer ends with every token that the files of its model name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from atom.config import ConfigError, ModelOptions
from atom.model_loader.tokenizers.end_tokens import end_token_ids
from atom.model_loader.tokenizers.plain_tokenizer import MARK

TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "</s>",
)
IDS = {token: token_id for token_id, token in enumerate(TOKENS)}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Ends what is said before the last turn, and reasoning, with another token.
HARMONY = (
    "{% for m in messages %}{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
)

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(generation: Any = None, template: Any = None, **config: Any) -> Path:
        tokenizer = Tokenizer(models.BPE(IDS, []))
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in TOKENS])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": "TokenizersBackend", **config}
        if template is not None:
            config["chat_template"] = template
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return write


def ends(folder: Path, raw: dict[str, Any] | None = None) -> set[str]:
    found = end_token_ids(folder, raw or {}, ModelOptions(model=str(folder)), len(TOKENS))
    return {TOKENS[token_id] for token_id in found}


def test_a_stale_generation_config_does_not_hide_the_tokenizers_end(write: Write) -> None:
    folder = write({"eos_token_id": IDS["</s>"]}, eos_token="<|im_end|>")
    assert ends(folder) == {"</s>", "<|im_end|>"}
    assert ends(folder, {"eos_token_id": 0}) == {"</s>", "<|im_end|>"}


def test_a_token_may_be_written_as_an_object(write: Write) -> None:
    assert ends(write(eos_token={"content": "</s>", "special": True})) == {"</s>"}


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (HARMONY, "<|return|>")])
def test_a_templates_end_of_turn(write: Write, template: str, end: str) -> None:
    assert ends(write({"eos_token_id": 0}, template)) == {"<|endoftext|>", end}
    named = [{"name": "tool_use", "template": ""}, {"name": "default", "template": template}]
    assert ends(write({"eos_token_id": 0}, named)) == {"<|endoftext|>", end}
    folder = write({"eos_token_id": 0})
    (folder / "chat_template.jinja").write_text(template)
    assert ends(folder) == {"<|endoftext|>", end}


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content }}", "{{ raise_exception('no') }}", "{% for %}", "{{ 1 // 0 }}"],
)
def test_templates_that_end_no_turn_add_nothing(write: Write, template: str) -> None:
    assert ends(write({"eos_token_id": 0}, template)) == {"<|endoftext|>"}


def test_ends_of_gguf_files_are_known_by_their_texts(write: Write) -> None:
    by_text = {"<|endoftext|>", "<|im_end|>", "<|return|>", "<|call|>", "</s>"}
    assert ends(write(**{MARK: "gguf"})) == by_text
    assert ends(write(eos_token="<|end|>", **{MARK: "gguf"})) == by_text | {"<|end|>"}


def test_tokens_of_a_tokenizer_without_its_own_file(write: Write) -> None:
    listed = {str(i): {"content": token, "special": True} for token, i in IDS.items()}
    folder = write(template=CHATML, eos_token="</s>", added_tokens_decoder=listed)
    (folder / "tokenizer.json").unlink()
    assert ends(folder) == {"</s>", "<|im_end|>"}


def test_tokens_that_the_model_cannot_generate(write: Write) -> None:
    folder = write({"eos_token_id": 0}, eos_token="</s>")
    options = ModelOptions(model=str(folder))
    assert end_token_ids(folder, {}, options, len(TOKENS) - 1) == {0}
    (folder / "generation_config.json").write_text('{"eos_token_id": 6}')
    with pytest.raises(ConfigError, match=r"ends with token 6 .* tokens 0 to 5"):
        end_token_ids(folder, {}, options, len(TOKENS) - 1)


def test_a_damaged_tokenizer_is_named(write: Write) -> None:
    folder = write(eos_token="</s>")
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": "x"}]}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        ends(folder)
