"""Statistics by who made the drafts: counted, subtracted, logged and exported."""

from __future__ import annotations

import msgspec
import pytest

from atom.entrypoints.http.metrics import ServerMetrics
from atom.messages import EngineStats
from atom.model_engine.replicas.total_stats import total_stats
from atom.stats import ExpectedAcceptance, SpecDecodeCounter, SpecDecodeStats


def counted() -> SpecDecodeStats:
    counter = SpecDecodeCounter(3)
    counter.count(3, 1, "eagle3")
    counter.count(3, 3, "lookup")
    counter.count(2, 0, "eagle3")
    counter.count(0, 0, "eagle3")
    found = counter.snapshot()
    assert found is not None
    return found


def test_sources_are_counted_apart() -> None:
    stats = counted()
    assert stats.accepted_counts == [1, 1, 0, 1]
    assert stats.by_source == {
        "eagle3": SpecDecodeStats(num_drafts=2, num_draft_tokens=5, accepted_counts=[1, 1, 0, 0]),
        "lookup": SpecDecodeStats(num_drafts=1, num_draft_tokens=3, accepted_counts=[0, 0, 0, 1]),
    }
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=SpecDecodeStats) == stats


def test_the_log_tells_several_sources_apart() -> None:
    assert counted().describe().partition(", by source: ")[2] == (
        "eagle3 66.7% of the verified steps, 1.50 tokens each; lookup 33.3% of the verified "
        "steps, 4.00 tokens each"
    )
    assert "by source" not in counted().by_source["eagle3"].describe()


def test_an_interval_may_be_the_first_of_a_source() -> None:
    counter = SpecDecodeCounter(3)
    counter.count(3, 1, "eagle3")
    before = counter.snapshot()
    assert before is not None
    counter.count(3, 2, "lookup")
    now = counter.snapshot()
    assert now is not None
    interval = now.since(before)
    assert interval.accepted_counts == [0, 0, 1, 0]
    assert interval.by_source["eagle3"].num_drafts == 0
    assert interval.by_source["lookup"].accepted_counts == [0, 0, 1, 0]


def test_an_interval_may_have_longer_drafts() -> None:
    """The lookup proposes more than the draft."""
    counter = SpecDecodeCounter(1)
    counter.count(1, 1, "eagle3")
    before = counter.snapshot()
    assert before is not None
    counter.count(3, 3, "eagle3")
    now = counter.snapshot()
    assert now is not None
    assert now.since(before).accepted_counts == [0, 0, 0, 1]
    assert now.since(before).by_source["eagle3"].accepted_counts == [0, 0, 0, 1]


def test_metrics_have_a_source() -> None:
    stats = EngineStats(spec_decode=counted(), num_lookup_tokens=7)
    text = ServerMetrics().expose(stats)[0].decode()
    for line in (
        "atom:spec_decode_lookup_tokens 7.0",
        "atom:spec_decode_num_drafts_total 3.0",
        'atom:spec_decode_num_drafts_by_source_total{source="eagle3"} 2.0',
        'atom:spec_decode_num_draft_tokens_by_source_total{source="eagle3"} 5.0',
        'atom:spec_decode_num_accepted_tokens_by_source_total{source="lookup"} 3.0',
        'atom:spec_decode_num_accepted_tokens_per_pos_by_source_total{position="2",'
        'source="lookup"} 1.0',
    ):
        assert line in text.splitlines()


CARD = ExpectedAcceptance(
    source="eagle3", tokens_per_forward=2.4, num_speculative_tokens=3, data="GSM8K, greedy"
)


def test_a_draft_far_below_its_card_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Counting its own drafts alone, and those steps that verified as many as the card says."""
    counter = SpecDecodeCounter(3, CARD)

    def warnings(num_accepted: int, num_drafts: int = 3, source: str = "eagle3") -> int:
        caplog.clear()
        for _ in range(5):
            counter.count(num_drafts, num_accepted, source, times=100)
        return len([r for r in caplog.records if "card states 2.40 (GSM8K" in r.message])

    assert warnings(1) == 0
    counter.count(3, 0, "eagle3", times=400)
    counter.count(3, 1, "eagle3", times=100)
    assert "brought 1.20 tokens each" in caplog.text
    assert warnings(1, source="lookup") == warnings(1, num_drafts=1) == 0
    counter.count(3, 0, "eagle3", times=400)
    assert warnings(0) == 0  # still far below
    counter.count(3, 3, "eagle3", times=500)
    counter.count(3, 3, "eagle3", times=100)
    assert warnings(0) + warnings(0) == 1


def test_a_draft_that_fits_not_is_told_of_each_window(caplog: pytest.LogCaptureFixture) -> None:
    """A warning speaks of the 500 verifications before it, and of no others."""
    counter = SpecDecodeCounter(3)
    told = []
    for accepted in (0, 3, 0):
        for times in (499, 1, 1):
            caplog.clear()
            counter.count(3, accepted, times=times)
            told.append(len(caplog.messages))
            assert all("the last 500 " in message for message in caplog.messages)
        # The window ends in the middle of what comes next.
        counter.count(3, accepted, times=499)
    assert told == [0, 1, 0, 0, 0, 0, 0, 1, 0]


def test_metrics_have_what_the_card_states() -> None:
    stats = EngineStats(expected_acceptance=CARD)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats)
    assert (
        'atom:spec_decode_expected_acceptance_length{data="GSM8K, greedy",'
        'num_speculative_tokens="3",source="eagle3"} 2.4'
    ) in ServerMetrics().expose(total_stats([decoded, decoded]))[0].decode()
