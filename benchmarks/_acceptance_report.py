"""The Markdown report of acceptance.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atom.bench.report import environment_markdown, markdown_table

_NOTES = (
    "Tokens/s and both ratios are medians over chunks; a ratio compares the chunks that two arms "
    "answered in turn. The decode ratio leaves the prompt's time out. Repeated bigrams: the share "
    "of an answer's pairs of neighbouring tokens (words, from a server) that occurred in it "
    "before; loops inflate acceptance."
)


def to_markdown(
    results: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    bounds: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The table, who proposed what, how adaptive arms did, and where it was measured."""
    header = ["prompts", "T", "batch", "arm", "tokens/forward", "acceptance", "per position"]
    header += ["distribution 0..k", "repeated bigrams", "tokens/s", "ratio", "decode ratio"]
    header += ["same texts"]
    lists = [
        [f"- {_where(r)}: {_sources(r)}" for r in results if len(r["by_source"]) > 1],
        [
            f"- {_where(r)}: {r['against_better']:.2f} of the better of on and off"
            for r in results
            if "against_better" in r
        ],
        [f"- {bound_line(r)}" for r in bounds],
    ]
    parts = [markdown_table(header, [_row(r) for r in results])]
    parts += ["\n".join(lines) for lines in lists if lines]
    return "\n\n".join([*parts, _NOTES, environment_markdown(facts)]) + "\n"


def line(r: Mapping[str, Any]) -> str:
    """One result for the terminal."""
    return (
        f"{_where(r)}: {r['tokens_per_forward']:.2f} tokens per forward, "
        f"{r['tokens_per_s']:.1f} tokens/s ({_times(r['speedup'])}), "
        f"{r['same_texts']}/{r['num_prompts']} texts the same"
    )


def bound_line(r: Mapping[str, Any]) -> str:
    """Acceptance of likeliest tokens, of coupled drafts, and at best, on the same rows."""
    parts = [
        f"{label} {r[f'{name}_tokens_per_forward']:.2f} ({' / '.join(f'{x:.2f}' for x in r[name])})"
        for label, name in (
            ("likeliest tokens", "likeliest"),
            ("coupled", "coupled"),
            ("ideal rejection sampling", "bound"),
        )
    ]
    where = f"{r['prompts']}, {_sampling(r)}, {r['arm']}"
    return f"{where}: tokens per forward (by place) {', '.join(parts)}"


def _row(r: Mapping[str, Any]) -> list[object]:
    return [
        r["prompts"],
        _sampling(r).removeprefix("T="),
        r["batch_size"],
        r["arm"],
        f"{r['tokens_per_forward']:.2f}",
        f"{r['acceptance_rate']:.1%}" if r["verified_steps"] else "",
        " / ".join(f"{share:.2f}" for share in r["acceptance_per_position"]),
        " / ".join(map(str, r["distribution"])),
        f"{r['repeated_bigrams']:.2f}",
        f"{r['tokens_per_s']:.1f}",
        _times(r["speedup"]),
        _times(r["decode_speedup"]),
        f"{r['same_texts']}/{r['num_prompts']}",
    ]


def _where(r: Mapping[str, Any]) -> str:
    return f"{r['prompts']}, {_sampling(r)}, batch {r['batch_size']}, {r['arm']}"


def _sampling(r: Mapping[str, Any]) -> str:
    top_p = f", top-p {r['top_p']:g}" if r["temperature"] and r["top_p"] < 1 else ""
    return f"T={r['temperature']:g}{top_p}"


def _sources(r: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{name} proposed in {part['share_of_steps']:.0%} of the verified steps, "
        f"{part['tokens_per_forward']:.2f} tokens each"
        for name, part in r["by_source"].items()
    )


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"
