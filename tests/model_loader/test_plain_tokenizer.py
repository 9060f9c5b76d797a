"""The tokenizer that needs no transformers against transformers' reading of the same folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from models.families import write_family
from test_gguf_tokenizer import TEXTS
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from atom.model_loader.gguf.file import read_gguf
from atom.model_loader.gguf.tokenizer import write_tokenizer
from atom.model_loader.tokenizers.chat_template import render_chat_template
from atom.model_loader.tokenizers.plain_tokenizer import PlainTokenizer, is_plain
from atom.text.detokenizer import ByteLevelVocabulary, create_vocabulary

ROOT = Path(__file__).parents[2]

Tokenizers = tuple[PlainTokenizer, PreTrainedTokenizerBase]

TOOL_USE = "{{ tools | tojson(indent=1) }} {{ bos_token }}"
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Sei <b>höflich</b>.", "name": None},
    {"role": "user", "content": " hi \n"},
    {"role": "assistant", "content": "So ", "reasoning": "hm"},
]
# What the templates of published models use.
TEMPLATES = {
    "loops": """
        {%- for m in messages %}
            {%- if loop.first %}{{ m['role'] }}{% continue %}{% endif %}
            {{ m.content | trim }}{% if m.thinking %}({{ m.reasoning_content }}){% endif %}
        {% endfor %}""",
    "namespaces": """{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}
        {% endfor %}{{ ns.n }}{{ dict(a=1) | tojson }}{{ dict.fromkeys(['b']) }}""",
    "generation": "{% generation %}{% set a = 1 %}{{ messages[1].role }}{% endgeneration %}{{ a }}",
    "variables": "{{ enable_thinking }}{{ eos_token }}{{ add_generation_prompt }}{{ documents }}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(sort_keys=true, ensure_ascii=true) }}",
    "fields": "{% for m in messages %}{{ m.keys() | list }}{% endfor %}{{ 'name' in messages[0] }}",
}
REFUSED = {
    "raise": "{{ raise_exception('no system prompt') }}",
    "escape": "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
    "namespace": "{{ namespace(__class__=1) }}",
    "syntax": "{% if %}",
}


@pytest.fixture
def both(write_tiny: Callable[..., Path], tmp_path: Path) -> Tokenizers:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    changes = {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template.tool_use": TOOL_USE}
    write_tokenizer(read_gguf(write_tiny(changes=changes)), folder)
    assert is_plain(folder)
    return PlainTokenizer(folder), AutoTokenizer.from_pretrained(folder)


def test_tokens_and_texts(both: Tokenizers) -> None:
    plain, theirs = both
    for text in TEXTS:
        for special in (True, False):
            ids = plain.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip)
                assert plain.decode(ids, skip_special_tokens=skip) == expected
    assert plain.get_vocab() == theirs.get_vocab()
    assert len(plain) == len(theirs)
    assert plain.convert_ids_to_tokens(5) == theirs.convert_ids_to_tokens(5)
    assert dict(plain.added_tokens_decoder) == theirs.added_tokens_decoder
    assert plain.hf_class == type(theirs).__name__
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(plain, name) == getattr(theirs, name)
    assert isinstance(create_vocabulary(plain), ByteLevelVocabulary)


@pytest.mark.parametrize("opens", [True, False])
def test_the_models_own_templates(both: Tokenizers, opens: bool) -> None:
    plain, theirs = both
    assert plain.chat_template == theirs.chat_template
    options: dict[str, Any] = {"add_generation_prompt": opens, "tokenize": False}
    tools = [{"type": "function", "function": {"name": "f<>", "description": "ü"}}]
    for more in ({}, {"tools": tools}, {"chat_template": "tool_use", "tools": tools}):
        expected = theirs.apply_chat_template(CHAT, **options, **more)
        assert plain.apply_chat_template(CHAT, **options, **more) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_templates_may_use(both: Tokenizers, name: str) -> None:
    options: dict[str, Any] = {"chat_template": TEMPLATES[name], "tokenize": False}
    options["enable_thinking"] = False
    ours, theirs = (tokenizer.apply_chat_template(CHAT, **options) for tokenizer in both)
    assert ours == theirs


@pytest.mark.parametrize("name", REFUSED)
def test_what_templates_may_not(both: Tokenizers, name: str) -> None:
    for tokenizer in both:
        with pytest.raises(jinja2.TemplateError):
            tokenizer.apply_chat_template(CHAT, chat_template=REFUSED[name], tokenize=False)


@pytest.mark.parametrize(
    "template", ["{{ messages[-1].content }}!", "{{ messages[-1].content|trim }}"]
)
def test_a_last_message_that_goes_on(both: Tokenizers, template: str) -> None:
    options: dict[str, Any] = {"chat_template": template, "continue_final_message": True}
    ours, theirs = (t.apply_chat_template(CHAT, tokenize=False, **options) for t in both)
    assert ours == theirs
    for tokenizer in both:
        with pytest.raises(ValueError, match="add_generation_prompt"):
            tokenizer.apply_chat_template(
                CHAT, add_generation_prompt=True, tokenize=False, **options
            )
        options["chat_template"] = "{{ messages[0].content }}"
        with pytest.raises(ValueError, match="continue_final_message"):
            tokenizer.apply_chat_template(CHAT, tokenize=False, **options)


def test_a_start_does_without_transformers(write_tiny: Callable[..., Path]) -> None:
    """Importing it takes longer than loading the embedded model."""
    program = """
import sys
from atom.config import ModelOptions
from atom.entrypoints.llm import LLM
from atom.model_loader.source import resolve_model
from atom.model_loader.tokenizers.tokenizer import load_text_tokenizer
options = ModelOptions(sys.argv[1])
tokenizer = load_text_tokenizer(resolve_model(options), options)
assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
slow = ("transformers", "huggingface_hub", "gguf", "zmq")
print(*(name for name in slow if name in sys.modules))
"""
    path = str(write_tiny())
    for expected in (["gguf"], []):  # it is converted once
        command = [sys.executable, "-c", program, path]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert run.stdout.split() == expected


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_a_configuration_is_read_without_transformers(family: str, tmp_path: Path) -> None:
    write_family(family, tmp_path)
    program = """
import sys
from atom.config import ModelOptions
from atom.model_loader.source import resolve_model
print(resolve_model(ModelOptions(sys.argv[1])).hf_config.model_type, "transformers" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [family, "False"]


def test_what_is_no_chat() -> None:
    with pytest.raises(ValueError, match="empty conversation"):
        render_chat_template("x", [])
    with pytest.raises(TypeError, match="plain data, not object"):
        render_chat_template("x", [{"role": "user", "content": object()}])
