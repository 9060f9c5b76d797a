"""What is minimised, and how kept drafts are counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from atom_train.calibrate import table
from atom_train.data.dataset import Example
from atom_train.data.held_out import HeldOut, race_noise
from atom_train.data.target_probs import TargetProbabilities
from atom_train.networks.layers import TrainingBatch
from atom_train.networks.loss import DraftLoss

ROWS, SIZE, VOCAB = 7, 12, 40


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, the draft's output head, and a target distribution."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, SIZE, generator=generator)
    head = torch.randn(VOCAB, SIZE, generator=generator)
    return hidden, head, (2 * torch.randn(ROWS, VOCAB, generator=generator)).softmax(-1)


@pytest.mark.parametrize("l1_weight", [0.0, 0.9])
def test_loss_is_cross_entropy_and_absolute_difference(l1_weight: float) -> None:
    hidden, head, p = distributions(0)
    q = (hidden @ head.T).softmax(-1)
    expected = (1 - l1_weight) * -(p * q.log()).sum() + l1_weight * (p - q).abs().sum()
    probs, ids = p.sort(descending=True)
    loss, hits = DraftLoss(VOCAB, None, l1_weight)(hidden, head, ids, probs, None)
    torch.testing.assert_close(loss, expected)
    assert hits.tolist() == (q.argmax(-1) == p.argmax(-1)).tolist()


def test_sampled_negatives_that_are_all_tokens_change_nothing() -> None:
    hidden, head, p = distributions(1)
    probs, ids = (t[:, :10] for t in p.sort(descending=True))
    whole, _ = DraftLoss(VOCAB, None, 0.5)(hidden, head, ids, probs, None)
    sampled = DraftLoss(VOCAB, VOCAB, 0.5)
    candidates = sampled.candidates(ids, probs, torch.Generator())
    loss, _ = sampled(hidden, head, ids, probs, candidates)
    torch.testing.assert_close(loss, whole)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_probabilities_are_the_targets(temperature: float) -> None:
    """Also where an unknown token is far more likely than all that the draft knows."""
    generator = torch.Generator().manual_seed(2)
    head, final = (torch.randn(n, SIZE, generator=generator) for n in (VOCAB, ROWS))
    head[3] = 9 * final[0]
    vocabulary = torch.tensor([0, 5, 6, 20])
    target = TargetProbabilities(head, vocabulary)
    expected = (final @ head.T / temperature).softmax(-1)[:, vocabulary]
    torch.testing.assert_close(target.logprobs(final, temperature).exp(), expected)


def test_a_draft_like_the_target_guesses_every_sample() -> None:
    _, _, p = distributions(3)
    generator = torch.Generator().manual_seed(0)
    answers = torch.multinomial(p, 1, generator=generator)[:, 0]
    for _ in range(20):
        raced = p.log() + 1.5 + race_noise(p.log(), answers, generator)
        assert torch.equal(raced.argmax(-1), answers)


def test_choices_are_as_frequent_as_in_a_race_with_shared_noise() -> None:
    """Texts drawn first and noise afterwards, given the text: the same as noise first."""
    count = 20_000
    generator = torch.Generator().manual_seed(4)
    p, q = (torch.randn(6, generator=generator).mul(1.5).log_softmax(-1) for _ in "pq")
    noise = -torch.empty(count, 6).exponential_(generator=generator).log()
    drawn, guessed = (p + noise).argmax(-1), (q + noise).argmax(-1)
    answers = torch.multinomial(p.exp(), count, True, generator=generator)
    rows = p.expand(count, 6)
    chosen = (q + race_noise(rows, answers, generator)).argmax(-1)
    expected = torch.bincount(drawn * 6 + guessed, minlength=36) / count
    got = torch.bincount(answers * 6 + chosen, minlength=36) / count
    assert float((expected - got).abs().max()) < 0.015
    assert float((chosen == answers).float().mean()) > float((p.exp() * q.exp()).sum()) + 0.1


def test_a_draft_races_best_at_the_temperature_that_makes_it_the_target() -> None:
    """Its logits are the target's times 0.8, at all depths; the texts were sampled at 0.5."""
    generator = torch.Generator().manual_seed(5)
    head = torch.randn(VOCAB, SIZE, generator=generator) * 0.4
    final = torch.randn(400, SIZE, generator=generator)
    answers = torch.multinomial((final @ head.T / 0.5).softmax(-1), 1, generator=generator)[:, 0]
    rows = torch.arange(400)[None].expand(2, -1)
    batch = cast(
        TrainingBatch,
        SimpleNamespace(
            final=final, targets=rows, valid=rows >= 0, answer_ids=answers.expand(2, -1)
        ),
    )
    text = Example(0, torch.zeros(3), torch.ones(3), temperature=0.5)
    target = TargetProbabilities(head, torch.arange(VOCAB))
    measure = HeldOut([text], lambda _: batch, lambda _: [0.8 * final] * 2, lambda: head, target)
    scales = (0.5, 0.8, 1.0)
    right = measure.race(0.5, scales)
    shares = right.float().mean(2)
    assert shares[1].tolist() == [1.0, 1.0]
    assert shares[[0, 2], 0].max() < 0.97
    assert (shares[:, 1] <= shares[:, 0]).all()
    lines = table(scales, right).splitlines()
    assert lines[2].split() == ["0.8", "3.000", "0.0000", "±", "0.0000", "1.000", "1.000"]
    lost = 2 - right.sum(1)[0].double()
    below, error = lost.mean(), lost.std(correction=0) / 400**0.5
    assert lines[1].split()[2:5] == [f"{below:.4f}", "±", f"{error:.4f}"]
