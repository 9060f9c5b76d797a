"""Draws the first table of engines in docs/benchmarks.md as docs/pictures/peers.svg.

    python benchmarks/plot_peers.py

Run it when the table changes; the tests compare the two.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "pictures" / "peers.svg"
FIGURES = ("decode-1", "decode-8", "prefill")
CAPTIONS = ("one chat, tokens/s", "eight chats, tokens/s", "prompt, tokens/s")
_ROW = re.compile(r"^\| ([\w.]+)-(\d+)(-drafts)? \|" + r" *([^|]*)\|" * 5, re.MULTILINE)
_BAR, _GAP, _TOP = 15, 14, 50  # pixels
_LABELS, _PANEL, _WIDTH = 150, 200, 150

_STYLE = """\
  <style>
    text { font: 12px system-ui, sans-serif; fill: #1f2328; }
    .title { font-weight: 600; }
    .label { text-anchor: end; }
    .number { font-size: 11px; fill: #59636e; }
    .peer { fill: #afb8c1; }
    .atom { fill: #bc4c00; }
    .drafts { fill: #e16f24; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .number { fill: #9198a1; }
      .peer { fill: #656c76; }
      .atom { fill: #db6d28; }
      .drafts { fill: #f0a368; }
    }
  </style>
"""


@dataclass(frozen=True)
class Row:
    """`speeds`: tokens per second for each of FIGURES."""

    engine: str
    bits: int
    drafts: bool
    speeds: tuple[float, ...]

    @property
    def label(self) -> str:
        name = "ATOM" if self.engine == "atom" else self.engine
        return f"{name}, drafts" if self.drafts else name

    @property
    def kind(self) -> str:
        return "peer" if self.engine != "atom" else "drafts" if self.drafts else "atom"


def read_rows(page: str) -> list[Row]:
    """The first table's rows in its order; those without a figure are an error."""
    rows = []
    table = page[page.find("| engine | bits |") :].partition("\n\n")[0]
    for engine, bits, drafts, _, *cells in _ROW.findall(table):
        speeds = tuple(float(cell.split()[0]) for cell in cells[: len(FIGURES)])
        rows.append(Row(engine, int(bits), bool(drafts), speeds))
    if not rows:
        raise ValueError(f"no table of engines in {TABLE.name}")
    return rows


def draw(rows: list[Row]) -> str:
    """The picture: a panel for each figure, a group of bars for each number of bits."""
    parts: list[str] = []
    for panel, caption in enumerate(CAPTIONS):
        x = _LABELS + panel * _PANEL
        parts.append(f'<text class="title" x="{x}" y="20">{caption}</text>')
    scales = [_WIDTH / max(row.speeds[i] for row in rows) for i in range(len(FIGURES))]
    y = _TOP
    for bits in sorted({row.bits for row in rows}, reverse=True):
        parts.append(f'<text class="title" x="8" y="{y - 4}">{bits}-bit weights</text>')
        for row in (row for row in rows if row.bits == bits):
            parts += _bars(row, y, scales)
            y += _BAR
        y += _GAP + _BAR
    body = "\n".join(f"  {part}" for part in parts)
    size = f"0 0 {_LABELS + len(FIGURES) * _PANEL} {y - _BAR}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" '
        f'aria-labelledby="title">\n'
        f'  <title id="title">Speed of engines on one CPU: {", ".join(CAPTIONS)}</title>\n'
        f"{_STYLE}{body}\n</svg>\n"
    )


def _bars(row: Row, y: int, scales: list[float]) -> list[str]:
    parts = [f'<text class="label" x="{_LABELS - 8}" y="{y + 11}">{row.label}</text>']
    for panel, (speed, scale) in enumerate(zip(row.speeds, scales, strict=True)):
        x, width = _LABELS + panel * _PANEL, max(speed * scale, 1)
        size = f'x="{x}" y="{y + 1}" width="{width:.1f}" height="{_BAR - 3}"'
        parts.append(f'<rect class="{row.kind}" {size}/>')
        parts.append(
            f'<text class="number" x="{x + width + 4:.1f}" y="{y + 11}">{speed:.0f}</text>'
        )
    return parts


def main() -> int:
    PICTURE.write_text(draw(read_rows(TABLE.read_text())))
    print(f"wrote {PICTURE}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
