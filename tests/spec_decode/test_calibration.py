"""What is learnt of a source's drafts: how often those are accepted that it is so sure of."""

from __future__ import annotations

import pytest

from atom.spec_decode.calibration import NUM_RECENT, Calibration


def test_confidences_are_believed_until_they_were_seen() -> None:
    calibration = Calibration(3)
    sure, unsure = (calibration.see([c, c, c], 3) for c in (0.97, 0.3))
    assert sure[0] > 0.9 > 0.6 > unsure[0]
    assert sure[0] >= sure[1] >= sure[2] > unsure[1]


def test_a_liar_is_found_out_at_once() -> None:
    """Also of confidences that it has not named yet."""
    calibration = Calibration(3)
    for _ in range(12):
        calibration.observe([0.97, 0.97, 0.97], 0)
    assert calibration.see([0.97], 1)[0] < 0.35
    assert calibration.see([0.7], 1)[0] < 0.35
    for _ in range(100):
        calibration.observe([0.97, 0.97, 0.97], 0)
    assert calibration.see([0.97], 1)[0] < 0.01


def test_modest_sources_are_raised_and_ranges_told_apart() -> None:
    calibration = Calibration(1)
    for _ in range(100):
        calibration.observe([0.5], 1)
        calibration.observe([0.1], 0)
    assert calibration.see([0.5], 1)[0] > 0.9
    assert calibration.see([0.1], 1)[0] < 0.1


def test_positions_are_measured_where_they_were_reached() -> None:
    calibration = Calibration(3)
    for _ in range(300):
        calibration.observe([0.7, 0.7, 0.7], 1)
    first, second, third = calibration.see([0.7, 0.7, 0.7], 3)
    assert first > 0.9
    assert second < 0.2 * first
    # Never reached: as drafts are on the whole that it is so sure of.
    assert 0.3 < third / second < 0.9
    # Beyond the last position its rate holds.
    assert calibration.see([0.7] * 5, 5)[3] == pytest.approx(third * third / second)


def test_recent_drafts_tell_what_the_next_are_like() -> None:
    """Of half the sequences nothing was found; of the others two drafts of the three wanted."""
    calibration = Calibration(3)
    guessed = calibration.recent(3)
    assert guessed.shape == (NUM_RECENT, 3)
    assert (guessed == guessed[0]).all()
    expected = calibration.see([0.9, 0.5], 2)
    for _ in range(NUM_RECENT // 2):
        calibration.see([], 2)
        calibration.see([0.9, 0.5], 2)
    recent = calibration.recent(3)
    assert recent[::2, 1].tolist() == pytest.approx([expected[1]] * (NUM_RECENT // 2))
    assert (recent[::2, 2] > 0).all()  # nobody asked for a third
    assert (recent[1::2, :2] == 0).all()
