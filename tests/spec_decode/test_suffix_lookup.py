"""Whose text is looked up: a sequence's own, and recent outputs with the same salt."""

from __future__ import annotations

from random import Random

from atom.batch import NewSequence
from atom.sampling_params import SamplingParams
from atom.spec_decode.suffix_lookup import RecentOutputs, SuffixLookup


def start(row: int, salt: str = "", num_outputs: int = 0) -> NewSequence:
    return NewSequence(f"{row}", row, [], [0] * num_outputs, SamplingParams(), 0, salt)


def test_a_sequence_is_looked_up_in_its_own_text() -> None:
    lookup = SuffixLookup("lookup", 2)
    prompt, outputs = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3]
    assert lookup.find(0, [7, 8], [9]).token_ids == []
    assert lookup.find(1, prompt, outputs).token_ids == [4, 5]
    outputs += [4, 5]
    assert lookup.find(1, prompt, outputs).token_ids == [6, 7]
    assert lookup.num_tokens == 3 + 14
    # Behind the drafts of others.
    assert lookup.extend(1, [6, 7], 1).token_ids == [8]
    assert lookup.extend(1, [9, 99], 1).token_ids == []
    # Another sequence took over the row.
    lookup.forget([1, 5])
    lookup.start([start(1)])
    assert lookup.num_tokens == 3
    assert lookup.find(1, [5, 6, 7, 8, 5], [6, 7]).token_ids == [8, 5]


def ended(lookup: SuffixLookup, row: int, salt: str, prompt: list[int], outputs: list[int]) -> None:
    """A sequence runs and ends."""
    lookup.start([start(row, salt)])
    lookup.find(row, prompt, outputs)
    lookup.forget([row])


def test_outputs_are_found_by_later_sequences_with_the_same_salt() -> None:
    lookup = SuffixLookup("suffix", 4, RecentOutputs(100))
    ended(lookup, 0, "a", [40, 41], [1, 2, 3, 4, 5])
    for salt, expected in (("a", [4, 5]), ("b", []), ("", [])):
        lookup.start([start(1, salt)])
        assert lookup.find(1, [9, 1, 2], [3]).token_ids == expected
        assert lookup.extend(1, [8, 3, 4], 3).token_ids == expected[1:]
        lookup.forget([1])
    # Of a prompt only the last tokens are kept, with the output.
    lookup.start([start(2, "a")])
    assert lookup.find(2, [7, 40], [41]).token_ids == [1, 2, 3, 4]
    ended(lookup, 3, "a", [*range(50, 80)], [81, 82])
    lookup.start([start(4, "a")])
    assert lookup.find(4, [51], [52, 53]).token_ids == []


def test_no_salt_ever_sees_another() -> None:
    """Random lives of sequences: words that all salts share, each followed by the salt's token."""
    rng = Random(0)
    lookup = SuffixLookup("suffix", 15, RecentOutputs(300))
    found = []
    for _ in range(200):
        salt = rng.randrange(4)
        lookup.start([start(salt, f"{salt}")])
        words = [rng.choice([[1, 2, 3, 4, 5], [6, 5, 4, 3, 2]]) for _ in range(7)]
        text = [token for word in words for token in (*word, 10 + salt)]
        for size in (23, 29, 35, 41):
            drafts = lookup.find(salt, text[:20], text[20:size]).token_ids
            assert {token for token in drafts if token >= 10} <= {10 + salt}
            found += drafts
        lookup.forget([salt])
    assert {token for token in found if token >= 10} == {10, 11, 12, 13}


def test_the_oldest_outputs_are_dropped_first() -> None:
    recent = RecentOutputs(20)
    for first in (10, 20, 30):
        recent.add("a" if first != 20 else "b", [*range(first, first + 5)])
    assert recent.num_tokens == 18
    recent.add("c", [40, 41, 42])
    held = {s: recent.followers(s, [t, t + 1], 1) for s, t in (("a", 10), ("b", 20), ("a", 30))}
    assert recent.num_tokens == 16
    assert not recent.followers("a", [10, 11], 1)
    assert held["b"]
    assert recent.followers("a", [30, 31], 1)
    recent.add("d", [*range(50, 100)])
    # Only the end of an output that is longer than all that may be held.
    assert recent.num_tokens == 20
    assert recent.followers("d", [97, 98], 1)
    assert not recent.followers("d", [60, 61], 1)
    assert not recent.followers("a", [30, 31], 1)


def test_memory_is_bounded() -> None:
    rng = Random(1)
    recent = RecentOutputs(500)
    for _ in range(300):
        recent.add(f"{rng.randrange(50)}", [rng.randrange(9) for _ in range(rng.randrange(80))])
        assert recent.num_tokens == sum(map(len, recent._indexes.values())) <= 500


def test_a_preempted_sequence_counts_once() -> None:
    """Its outputs are kept when it loses its row; after it resumes, the further ones are."""
    lookup = SuffixLookup("suffix", 4, RecentOutputs(1000))
    prompt, outputs = [*range(20)], [*range(100, 130)]
    lookup.start([start(0, "s")])
    lookup.find(0, prompt, outputs[:10])
    lookup.forget([0])
    before = lookup.num_tokens
    lookup.start([start(3, "s", 10)])
    lookup.find(3, prompt, outputs)
    lookup.forget([3])
    # The new ones, eight tokens before them, and the end.
    assert lookup.num_tokens - before == 20 + 8 + 1
