"""A server's count of drafts, read from its /metrics: ours, or any with the same suffixes."""

from __future__ import annotations

import itertools
import re

import httpx

from atom.stats import SpecDecodeStats

# Prefixes differ between engines ("atom:", "vllm:"); the rest of the name is common.
_SAMPLE = re.compile(
    r"^[a-z_]+:spec_decode_(?P<name>num_\w+?)_total(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$",
    re.MULTILINE,
)


def parse_spec_decode(text: str) -> SpecDecodeStats | None:
    """The totals in Prometheus' text format, summed over engines; None where there are none."""
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for match in _SAMPLE.finditer(text):
        name, value = match["name"], float(match["value"])
        if name == "num_accepted_tokens_per_pos":
            label = re.search(r'position="(\d+)"', match["labels"] or "")
            if label is not None:
                place = int(label[1])
                positions[place] = positions.get(place, 0) + value
        else:
            totals[name] = totals.get(name, 0) + value
    if not {"num_drafts", "num_draft_tokens"} <= set(totals):
        return None
    num_drafts = int(totals["num_drafts"])
    reached = [num_drafts, *(int(positions[i]) for i in sorted(positions)), 0]
    return SpecDecodeStats(
        num_drafts=num_drafts,
        num_draft_tokens=int(totals["num_draft_tokens"]),
        accepted_counts=[a - b for a, b in itertools.pairwise(reached)],
    )


def scrape_spec_decode(http: httpx.Client, url: str) -> SpecDecodeStats | None:
    """Fetch and parse; None when the server counts no drafts.

    Raises:
        httpx.HTTPError: when there is no such page.
    """
    response = http.get(url)
    response.raise_for_status()
    return parse_spec_decode(response.text)


def drafts_between(
    before: SpecDecodeStats | None, after: SpecDecodeStats | None
) -> SpecDecodeStats | None:
    """What was counted from one scrape to the next; positions may have appeared in between."""
    if after is None:
        return None
    start = before or SpecDecodeStats()
    earlier = [*start.accepted_counts, *[0] * len(after.accepted_counts)]
    return SpecDecodeStats(
        num_drafts=after.num_drafts - start.num_drafts,
        num_draft_tokens=after.num_draft_tokens - start.num_draft_tokens,
        accepted_counts=[a - b for a, b in zip(after.accepted_counts, earlier, strict=False)],
    )
