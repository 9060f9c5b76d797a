"""The picture of engines is that of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def plot(benchmark_module: Callable[[str], Any]) -> Any:
    return benchmark_module("plot_peers")


def test_the_picture_shows_the_table(plot: Any) -> None:
    assert plot.PICTURE.read_text() == plot.draw(plot.read_rows(plot.TABLE.read_text())), (
        "run python benchmarks/plot_peers.py"
    )


def test_rows_and_their_bars(plot: Any) -> None:
    page = (
        "| engine | bits | decode-1 tok/s | decode-8 tok/s | prefill tok/s | kept |\n"
        "| atom-8-drafts | 8 | 40.0 (2.00x) | 30.0 | 20.0 | 0.5 |\n"
        "| llama.cpp-8 | 8 | 20.0 | 60.0 | 40.0 | 0.5 |\n"
    )
    drafts, peer = plot.read_rows(page)
    assert (drafts.label, drafts.bits, drafts.speeds) == ("ATOM, drafts", 8, (40.0, 30.0, 20.0))
    assert (peer.label, peer.kind) == ("llama.cpp", "peer")
    picture = plot.draw([drafts, peer])
    assert picture.count('width="150.0"') == 3
    assert picture.count('width="75.0"') == 3


def test_a_page_without_the_table_is_an_error(plot: Any) -> None:
    with pytest.raises(ValueError, match="no table of engines"):
        plot.read_rows("# Benchmarks")
