"""The picture of engines is that of the table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from plot_peers import PICTURE, TABLE, draw, read_rows


def test_the_picture_shows_the_table() -> None:
    assert PICTURE.read_text() == draw(read_rows(TABLE.read_text())), (
        "run python benchmarks/plot_peers.py"
    )


def test_rows_and_their_bars() -> None:
    page = (
        "| engine | bits | decode-1 tok/s | decode-8 tok/s | prefill tok/s | kept |\n"
        "| atom-8-drafts | 8 | 40.0 (2.00x) | 30.0 | 20.0 | 0.5 |\n"
        "| llama.cpp-8 | 8 | 20.0 | 60.0 | 40.0 | 0.5 |\n"
    )
    drafts, peer = read_rows(page)
    assert (drafts.label, drafts.bits, drafts.speeds) == ("ATOM, drafts", 8, (40.0, 30.0, 20.0))
    assert (peer.label, peer.kind) == ("llama.cpp", "peer")
    picture = draw([drafts, peer])
    assert picture.count('width="150.0"') == 3
    assert picture.count('width="75.0"') == 3


def test_a_page_without_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="no table of engines"):
        read_rows("# Benchmarks")
