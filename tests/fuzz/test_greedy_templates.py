"""Chat templates that would take the server's time or memory."""

from __future__ import annotations

import pytest
from fuzz.judge import judge
from jinja2 import TemplateError

from atom.model_loader.tokenizers import bounded_templates
from atom.model_loader.tokenizers.chat_template import render_chat_template

_USER = [{"role": "user", "content": "hi"}]
_LOOP = "{% for a in range(99999) %}"
GREEDY = [
    f"{_LOOP * 3}x{'{% endfor %}' * 3}",
    "{{ 'x' * 10**12 }}",
    "{{ 10**12 * 'x' }}",
    "{{ ([1] * 99999999) | length }}",
    "{{ 9 ** 999999999 }}",
    "{{ ((10**64)**64)**64 }}",
    "{% set n = namespace(t=3) %}{% for i in range(60) %}{% set n.t = n.t * n.t %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
    "{% set n = namespace(t='x') %}"
    "{% for i in range(60) %}{% set n.t = [n.t, n.t] | join %}{% endfor %}",
    "{% set n = namespace(t='x') %}"
    "{% for i in range(60) %}{% set n.t = n.t | replace('x', 'xx') %}{% endfor %}",
    "{{ ('x' * 99999) | replace('', 'y' * 99999) }}",
    "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "{{ ('y' * 99999).join(['x'] * 99999) }}",
    "{{ (['x'] * 99999) | join('y' * 99999) }}",
    "{{ 'x' | center(10**12) }}",
    "{{ 'x' | center(width=10**12) }}",
    "{{ 'x'.ljust(10**12) }}",
    "{{ 'x'.zfill(10**12) }}",
    "{{ ('\t' * 99999).expandtabs(99999) }}",
    "{{ ('x\n' * 99999) | indent(99999) }}",
    "{{ [1] | batch(10**12, 2) | list }}",
    "{{ [1] | slice(10**12) | list }}",
    "{{ messages | tojson(indent=10**12) }}",
    "{{ ('x y ' * 99999) | wordwrap(1, wrapstring='z' * 99999) }}",
    "{{ '%1000000000000d' % 1 }}",
    "{{ '%*d' % (10**12, 1) }}",
    "{{ '%1000000000000d' | format(1) }}",
    "{{ '{:1000000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**12) }}",
    "{{ lipsum(10**9) }}",
    # Python looks at each part.
    "{{ (['x', 'y'] * 9999999) | sort }}",
    "{{ ('x ' * 9999999) | urlize }}",
    "{{ ('x ' * 9999999) | map('upper') | list }}",
    # Made by filters and methods that make no more than they are given.
    "{% set x = 'x' * 9999999 %}{% for i in range(99999) %}{{ x | upper | length }}{% endfor %}",
    "{% set x = 'x' * 9999999 %}{% for i in range(99999) %}{{ x.lower() | length }}{% endfor %}",
    "{% set n = namespace(t=[]) %}"
    "{% for i in range(99) %}{% set n.t = n.t + [[1] * 999999] %}{% endfor %}",
    "{% set n = namespace(t=[]) %}{% set x = 'x' * 999999 %}"
    "{% for i in range(99) %}{% set n.t = n.t + [x | list] %}{% endfor %}",
    # Each a moderate text, of which loops keep as many as they like.
    "{% set n = namespace(t=[]) %}"
    "{% for i in range(99999) %}{% set n.t = n.t + [('x' * 99999) ~ i] %}{% endfor %}",
]
MODEST = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.content }}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}{{ loop.last }}{% else %}none{% endfor %}",
    "{{ '=' * 40 }}{{ 3 * 4 }}{{ 2 ** 10 }}{{ 2.5 * 2 }}{{ [1] * 2 }}",
    "{% for n in nothing %}{{ n }}{% else %}none{% endfor %}",
    "{{ 'a' ~ 1 ~ none ~ nothing ~ ['b'] }}{{ 'a' + 'b' }}{{ [1] + [2] }}{{ 1 + 2.5 }}",
    "{{ ['a', 1] | join(', ') }}{{ ', '.join(['a', 'b']) }}"
    "{{ messages | map(attribute='role') | join }}",
    "{{ 'aba' | replace('a', 'c') }}{{ 'aba'.replace('a', 'c', 1) }}"
    "{{ 'x' | center(3) }}|{{ 'x'.rjust(3) }}",
    "{{ 'a\nb' | indent(2) }}{{ '%05.1f|%s' % (1.25, 'x') }}"
    "{{ '%d%%' | format(7) }}{{ '{:>3}'.format(1) }}",
    "{{ [1, 2, 3] | batch(2) | list }}{{ {'a': 1} | tojson(indent=1) }}",
]


@pytest.mark.parametrize("template", GREEDY)
def test_refused(template: str) -> None:
    with pytest.raises(TemplateError, match=r"template|lipsum") as error:
        render_chat_template(template, _USER)
    # Of what it makes, before it takes long.
    assert "of a processor" not in str(error.value)


def test_a_program_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of few turns, whose filters take long."""
    monkeypatch.setattr(bounded_templates, "_MOST_SECONDS", 0.05)
    for endless in (
        "{% for i in range(99999) %}{% set x = range(9999) | list | sort %}{% endfor %}",
        f"{_LOOP}{{% set x = 'x' * 99 %}}{{% endfor %}}" * 99,
        "{% macro f(n) %}{{ f(n + 1) if n < 20 }}{{ f(n + 1) if n < 20 }}{% endmacro %}{{ f(0) }}",
    ):
        with pytest.raises(TemplateError, match=r"more than 0\.05 s of a processor"):
            render_chat_template(endless, _USER)
    assert render_chat_template(MODEST[0], _USER) == "1/1hi"


def test_in_bounds() -> None:
    """Each refusal comes soon, and without the memory that was asked for."""
    templates = [*GREEDY, *MODEST]

    def read(number: int) -> None:
        try:
            render_chat_template(templates[number], _USER)
        except TemplateError as error:
            if "MemoryError" in str(error):
                raise MemoryError(templates[number]) from error
            raise

    judge(range(len(templates)), read, (TemplateError,))


def test_modest_ones_say_what_they_did() -> None:
    said = [render_chat_template(template, _USER) for template in MODEST]
    assert said == [
        "1/1hi",
        "roleFalsecontentTrue",
        "=" * 40 + "1210245.0[1, 1]",
        "none",
        "a1None['b']ab[1, 2]3.5",
        "a, 1a, buser",
        "cbccba x |  x",
        "a\n  b001.2|x7%  1",
        '[[1, 2], [3]]{\n "a": 1\n}',
    ]
