"""Chat templates at random: of all that Jinja's sandbox offers, in bounds of time and memory."""

from __future__ import annotations

import re
from random import Random

import pytest
from fuzz.judge import cases, judge
from jinja2 import TemplateError

from atom.model_loader.tokenizers.chat_template import render_chat_template

_CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a b\nc"}]
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

# Expressions of each kind: texts, numbers, lists. A letter stands for another expression.
_FORMS = {
    "T": (
        *("'x'", "''", "'a b\\nc'", "'%999d'", "'%s'", "'{:>9}{}'", "'\\t'", "m.content", "n.t"),
        *("('x' * 99999)", "(T + T)", "(T ~ T ~ N)", "(T * N)", "(T % N)", "T[N:N]", "T[::N]"),
        *("(T | upper)", "(T | title)", "(T | trim(T))", "(T | escape)", "(T | urlize)"),
        *("(T | replace(T, T))", "(T | indent(N))", "(T | indent(T, true))", "(T | center(N))"),
        *("(T | wordwrap(N))", "(T | wordwrap(1, wrapstring=T))", "(T | truncate(N, true, T))"),
        *("(T | format(N))", "(T | striptags)", "(T | urlencode)", "(T | default(T))"),
        *("(L | join(T))", "(L | join)", "(L | tojson)", "(L | tojson(indent=N))", "(L | string)"),
        *("(L | pprint)", "(N | string)", "({'a': T, T: L} | tojson)", "({T: T} | xmlattr)"),
        *("(L | first | string)", "(N | filesizeformat)", "(tools | tojson)", "strftime_now(T)"),
        *("T.join(L)", "T.replace(T, T)", "T.ljust(N)", "T.rjust(N, 'y')", "T.zfill(N)"),
        *("T.expandtabs(N)", "T.format(N, T)", "T.upper()", "T.strip(T)", "T.removeprefix(T)"),
        *("T.translate({97: T})", "T.swapcase()", "(T if N > N else T)", "f(T)"),
    ),
    "N": (
        *("0", "1", "-1", "2", "7", "64", "65", "999", "99999", "10**12", "7", "99"),
        *("(N + N)", "(N - N)", "(N * N)", "(N // N)", "(N % N)", "(N ** N)", "(N / 7)"),
        *("(T | length)", "(L | length)", "(T | int)", "(N | abs)", "(N | round)", "(N | float)"),
        *("T.count(T)", "T.find(T)", "(T | wordcount)", "(L | sum)", "(L | max)"),
    ),
    "L": (
        *("[]", "[1, 2]", "[T, N]", "[L, L]", "messages", "tools", "(range(N) | list)", "n.l"),
        *("(L + L)", "(L * N)", "L[N:]", "L[::N]", "(T | list)", "T.split(T)", "T.splitlines()"),
        *("(L | map('upper') | list)", "(messages | map(attribute='content') | list)"),
        *("(L | batch(N, T) | list)", "(L | slice(N) | list)", "(L | sort)", "(L | unique | list)"),
        *("(L | reverse | list)", "(L | select | list)", "(L | reject('string') | list)"),
        *("(messages | groupby('role'))", "({T: N}.items() | list)", "(m | dictsort)"),
        *("(L | map('replace', T, T) | list)", "(L | map('string') | list)", "(L | list)"),
    ),
}
_STATEMENTS = (
    *("{{ T }}", "{{ N }}", "{{ L }}", "{% set n.t = T %}", "{% set n.l = L %}"),
    *("{% set n.t = n.t + n.t %}", "{% set n.t = n.t ~ T %}", "{% set n.l = n.l + L %}"),
    *("{% if N > N %}S{% else %}S{% endif %}", "{% for m in messages %}S{% endfor %}"),
    *("{% for i in L %}S{% endfor %}", "{% for i in range(N) %}S{% endfor %}"),
    *("{% for c in T %}S{% endfor %}", "{% for m in messages if m.content in T %}S{% endfor %}"),
    *("{% filter upper %}S{% endfilter %}", "{% filter replace(T, T) %}S{% endfilter %}"),
    *("{{ f(T) }}", "{% set v %}S{% endset %}{{ v }}"),
    *(
        "{% for i in [[1], [2]] recursive %}{{ loop(L) }}{% endfor %}",
        "{% generation %}S{% endgeneration %}",
    ),
)
_HEAD = (
    "{% set n = namespace(t='x', l=[1]) %}{% set m = messages[0] %}"
    "{% macro f(v) %}{{ v }}{{ v }}{% endmacro %}"
)
_OWN = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    AssertionError,  # of a filter of Jinja's
)
_PART = re.compile(r"\b[TNLS]\b")
_DEPTH = 5


def program(choose: Random, kind: str = "S", depth: int = _DEPTH) -> str:
    """Statements (`S`), or an expression of a kind."""

    def part(match: re.Match[str]) -> str:
        wanted = match.group()
        if wanted != "S" and choose.random() < 0.03:
            wanted = choose.choice("TNL")
        return program(choose, wanted, depth - 1)

    forms = _STATEMENTS if kind == "S" else _FORMS[kind]
    if depth <= 0:
        forms = tuple(form for form in forms if not _PART.search(form)) if kind != "S" else ("x",)
    count = choose.randint(1, 2) if kind == "S" else 1
    return "".join(_PART.sub(part, choose.choice(forms)) for _ in range(count))


@pytest.mark.parametrize("seeds", cases(60, 6000))
def test_random_programs(seeds: range) -> None:
    """What a program raises is its own; the memory that it may have is never reached."""

    def read(seed: int) -> None:
        template = _HEAD + program(Random(seed)) + program(Random(-seed - 1))
        try:
            render_chat_template(template, _CHAT, tools=_TOOLS)
        except TemplateError as error:
            if "MemoryError" in str(error):
                raise MemoryError(template) from error
            raise

    judge(seeds, read, _OWN)
