"""How much messages quote."""

from __future__ import annotations

from atom.quoting import MAX_QUOTED, excerpt, quote


def test_short_values_are_quoted_whole() -> None:
    assert quote("a'b") == repr("a'b")
    assert quote(5) == "5"
    assert excerpt("x" * MAX_QUOTED) == "x" * MAX_QUOTED


def test_long_values_are_cut() -> None:
    for value in ("x" * 10**6, [1] * 10**5, 10**4000):
        assert len(quote(value)) == MAX_QUOTED
        assert quote(value).endswith("...")
    assert excerpt("x" * 500, 300) == "x" * 297 + "..."
