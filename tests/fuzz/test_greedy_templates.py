"""Chat templates that would take the server's time or memory."""

from __future__ import annotations

import pytest
from fuzz.judge import judge
from jinja2 import TemplateError

from atom.model_loader.tokenizers.chat_template import render_chat_template

_USER = [{"role": "user", "content": "hi"}]
_LOOP = "{% for a in range(99999) %}"
GREEDY = [
    f"{_LOOP * 3}x{'{% endfor %}' * 3}",
    "{{ 'x' * 10**12 }}",
    "{{ 10**12 * 'x' }}",
    "{{ ([1] * 99999999) | length }}",
    "{{ 9 ** 999999999 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]
MODEST = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.content }}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}{{ loop.last }}{% else %}none{% endfor %}",
    "{{ '=' * 40 }}{{ 3 * 4 }}{{ 2 ** 10 }}{{ 2.5 * 2 }}{{ [1] * 2 }}",
    "{% for n in nothing %}{{ n }}{% else %}none{% endfor %}",
]


@pytest.mark.parametrize("template", GREEDY)
def test_refused(template: str) -> None:
    with pytest.raises(TemplateError, match="template"):
        render_chat_template(template, _USER)


def test_in_bounds() -> None:
    """Each refusal comes soon, and without the memory that was asked for."""
    templates = [*GREEDY, *MODEST]
    judge(
        range(len(templates)),
        lambda number: render_chat_template(templates[number], _USER),
        (TemplateError,),
    )


def test_modest_ones_say_what_they_did() -> None:
    said = [render_chat_template(template, _USER) for template in MODEST]
    assert said == [
        "1/1hi",
        "roleFalsecontentTrue",
        "=" * 40 + "1210245.0[1, 1]",
        "none",
    ]
