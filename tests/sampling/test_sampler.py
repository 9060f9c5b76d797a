"""The sampler against a float64 reference written token by token, and its distribution."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.torch import sampling
from atom.model_ops.noise import exponential_noise, row_keys, token_hashes
from atom.sampling.edits import LogitEdits, Penalties
from atom.sampling.logit_constraints import TokenValues
from atom.sampling.logprobs import compute_logprobs
from atom.sampling.ops import TORCH_OPS
from atom.sampling.token_counts import TokenCounts

INF = math.inf


CPU = torch.device("cpu")


# --- options of all rows, spelled as dense tensors, as the sampler takes them ---------------


def sample(logits: torch.Tensor, **options: Any) -> torch.Tensor:
    """Tokens of logits [R, V]; `edited` names the rows whose logits the options change."""
    names = {field.name for field in dataclasses.fields(SamplingMetadata)}
    metadata = SamplingMetadata(**{n: v for n, v in options.items() if n in names})
    counts = TokenCounts(logits.shape[1], CPU)
    edits = edits_of(options, counts)
    if edits is None:
        return TORCH_OPS.choose_tokens(logits, metadata)
    return edits.choose(logits, metadata, counts, TORCH_OPS)


def edits_of(m: dict[str, Any], counts: TokenCounts) -> LogitEdits | None:
    if "edited" not in m or not m["edited"].any():
        return None
    rows = torch.nonzero(m["edited"]).flatten()
    every = torch.arange(len(rows))
    grammar = None
    if "grammar_mask" in m:
        grammar = m["grammar_mask"][rows], every
    tokens = []
    for place, row in enumerate(rows.tolist()):
        if "banned" in m:
            ids = torch.nonzero(m["banned"][row]).flatten()
            tokens.append((every[place : place + 1], TokenValues(ids, torch.full((1,), -INF))))
        if "logit_bias" in m:
            ids = torch.nonzero(m["logit_bias"][row]).flatten()
            values = TokenValues(ids, m["logit_bias"][row][ids])
            tokens.append((every[place : place + 1], values))
    return LogitEdits(rows, [], grammar, tokens, penalties_of(m, rows, counts))


def penalties_of(m: dict[str, Any], rows: torch.Tensor, counts: TokenCounts) -> Penalties | None:
    """Half of each row's outputs count as drafts, so that both ways to count are taken."""
    if "output_counts" not in m:
        return None
    slots, draft_rows, draft_tokens = [], [], []
    for place, row in enumerate(rows.tolist()):
        outputs = torch.repeat_interleave(m["output_counts"][row]).tolist()
        prompt = torch.nonzero(m["prompt_mask"][row]).flatten().tolist()
        slots.append(counts.claim(prompt, outputs[::2]))
        draft_tokens += outputs[1::2]
        draft_rows += [place] * len(outputs[1::2])
    off = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0}
    column = {n: m.get(n, torch.full((int(rows.max()) + 1,), v))[rows] for n, v in off.items()}
    drafts = (torch.tensor(draft_rows), torch.tensor(draft_tokens)) if draft_rows else None
    return Penalties(
        torch.arange(len(rows)),
        torch.tensor(slots),
        *(column[n][:, None] for n in ("presence", "frequency", "repetition")),
        drafts,
    )


# --- the reference ----------------------------------------------------------------------


def reference_scores(logits: list[float], m: dict[str, Any], r: int) -> list[float]:
    """Row `r` after masks, bias and penalties."""
    scores = list(logits)
    for t in range(len(scores)):
        if "grammar_mask" in m and not (int(m["grammar_mask"][r, t // 32]) >> (t % 32)) & 1:
            scores[t] = -INF
        if "banned" in m and m["banned"][r, t]:
            scores[t] = -INF
        if "logit_bias" in m:
            scores[t] += float(m["logit_bias"][r, t])
        count = int(m["output_counts"][r, t]) if "output_counts" in m else 0
        if "repetition" in m and (m["prompt_mask"][r, t] or count):
            penalty = float(m["repetition"][r])
            scores[t] = scores[t] / penalty if scores[t] > 0 else scores[t] * penalty
        if "presence" in m and count:
            scores[t] -= float(m["presence"][r])
        if "frequency" in m:
            scores[t] -= float(m["frequency"][r]) * count
    return scores


def reference_kept(
    scores: list[float], m: dict[str, Any], r: int, slack: float
) -> dict[int, float]:
    """Weights by token id after the filters; `slack` widens or narrows min_p and top_p."""
    top = max(scores)
    order = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
    weights = {t: math.exp((scores[t] - top) / float(m["temperature"][r])) for t in order}
    if "min_p" in m:
        floor = float(m["min_p"][r]) * (1 - slack)
        weights = {t: w for t, w in weights.items() if w >= floor}
    if "top_k" in m:
        weights = dict(list(weights.items())[: int(m["top_k"][r])])
    if "top_p" in m and m["top_p"][r] < 1:
        limit = float(m["top_p"][r]) * sum(weights.values()) * (1 + slack)
        kept, mass = {}, 0.0
        for t, w in weights.items():
            if mass >= limit:
                break
            kept[t] = w
            mass += w
        weights = kept
    return {t: w for t, w in weights.items() if w > 0}


def allowed_tokens(logits: list[float], m: dict[str, Any], r: int) -> set[int]:
    """The tokens that are right for row `r`: more than one only where rounding decides."""
    scores = reference_scores(logits, m, r)
    if "temperature" not in m or m["temperature"][r] == 0:
        near = {t for t, s in enumerate(scores) if s >= max(scores) - 1e-5 * abs(max(scores))}
        exact = min(t for t, s in enumerate(scores) if s == max(scores))
        return near if "logit_bias" in m or "repetition" in m else {exact}
    keys = row_keys(m["seeds"][r : r + 1], m["positions"][r : r + 1])
    noise = exponential_noise(keys, token_hashes(len(logits), keys.device))[0].tolist()
    allowed = set()
    for slack in (-1e-5, 0.0, 1e-5):
        race = {t: w / noise[t] for t, w in reference_kept(scores, m, r, slack).items()}
        allowed |= {t for t, x in race.items() if x >= max(race.values()) * (1 - 1e-4)}
    return allowed


# --- every option alone and combined ----------------------------------------------------

OPTIONS = ("top_k", "top_p", "min_p", "repetition", "presence", "frequency")
MASKS = ("logit_bias", "banned", "grammar_mask")
EDITS = {"repetition", "presence", "frequency", *MASKS}


def random_options(names: set[str], rows: int, vocab: int, rng: torch.Generator) -> dict[str, Any]:
    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(rows, generator=rng)

    def some(share: float) -> torch.Tensor:
        return torch.rand(rows, vocab, generator=rng) < share

    off = torch.rand(rows, generator=rng) < 0.3
    every: dict[str, Any] = {
        "temperature": torch.where(off.roll(1), 0.0, uniform(0.05, 2)),
        "seeds": torch.randint(-(2**62), 2**62, (rows,), generator=rng),
        "positions": torch.randint(0, 10000, (rows,), generator=rng),
        "top_k": torch.where(off, vocab, torch.randint(1, vocab + 1, (rows,), generator=rng)).int(),
        "top_p": torch.where(off, 1.0, uniform(0.01, 1)),
        "min_p": torch.where(off, 0.0, uniform(0, 0.5)),
        "repetition": torch.where(off, 1.0, uniform(0.5, 2)),
        "presence": torch.where(off, 0.0, uniform(-2, 2)),
        "frequency": torch.where(off, 0.0, uniform(-2, 2)),
        "output_counts": torch.randint(0, 4, (rows, vocab), generator=rng).int() * some(0.3),
        "prompt_mask": some(0.3),
        "logit_bias": torch.where(some(0.2), torch.randn(rows, vocab, generator=rng) * 5, 0.0),
        "banned": some(0.3).index_fill(1, torch.tensor([0]), False),
        "grammar_mask": torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=rng).int()
        | 1,
    }
    if names & {"repetition", "presence", "frequency"}:
        names = names | {"output_counts", "prompt_mask"}
    if "temperature" in names:
        names = names | {"seeds", "positions"}
    edited = torch.rand(rows, generator=rng) < 0.7
    neutral = {"presence": 0, "frequency": 0, "repetition": 1, "logit_bias": 0, "banned": False}
    for name, value in {**neutral, "grammar_mask": -1}.items():
        every[name][~edited] = value
    chosen = {name: every[name] for name in every if name in names}
    return {**chosen, "edited": edited} if names & EDITS else chosen


def random_logits(rows: int, vocab: int, grid: float, rng: torch.Generator) -> torch.Tensor:
    """Coarse logits, so that ties are frequent; `grid` is the distance of neighbours."""
    return (torch.randn(rows, vocab, generator=rng) * 2 / grid).round() * grid


def check_against_reference(logits: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    token_ids = sample(logits, **options)
    for r, row in enumerate(logits.tolist()):
        assert int(token_ids[r]) in allowed_tokens(row, options, r)
    return token_ids


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**31),
    names=st.sets(st.sampled_from(("temperature", *OPTIONS, *MASKS))),
    rows=st.integers(1, 6),
    vocab=st.integers(1, 100) | st.just(600),
    grid=st.sampled_from((0.5, 0.0625, 1e-4)),
)
def test_options_combined(seed: int, names: set[str], rows: int, vocab: int, grid: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = random_logits(rows, vocab, grid, rng)
    check_against_reference(logits, random_options(names, rows, vocab, rng))


@pytest.mark.parametrize("option", [*OPTIONS, *MASKS])
def test_option_alone(option: str) -> None:
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        logits = random_logits(8, 300, 0.0625, rng)
        options = random_options({"temperature", option}, 8, 300, rng)
        check_against_reference(logits, options)
        assert set(options) >= {"temperature", option}


@pytest.mark.parametrize("option", ["top_k", "top_p", "min_p"])
def test_filters_drop_tokens(option: str) -> None:
    """Every kept token is drawn, and no other: 2000 draws of one row."""
    logits = torch.tensor([2.0, 1.0, 1.0, 0.0, -1.0, 3.0])  # most likely first: 5 0 1 2 3 4
    value = {"top_k": 3, "top_p": 0.85, "min_p": 0.1}[option]
    rows = 2000
    drawn = sample(
        logits.expand(rows, -1),
        temperature=torch.ones(rows),
        seeds=torch.zeros(rows, dtype=torch.int64),
        positions=torch.arange(rows),
        **{option: torch.full((rows,), value)},
    )
    kept = {"top_k": {5, 0, 1}, "top_p": {5, 0, 1}, "min_p": {5, 0, 1, 2}}[option]
    assert set(drawn.tolist()) == kept


# --- independence of the batch and of the algorithm's own choices -------------------------


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    for vocab in (49152, 32003, 131):
        rng = torch.Generator().manual_seed(vocab)
        logits = random_logits(8, vocab, 0.0625, rng).bfloat16()
        options = random_options({"temperature", *OPTIONS, *MASKS}, 8, vocab, rng)
        together = sample(logits, **options)
        logprobs = compute_logprobs(logits, together, 3)
        for r in range(8):
            own = {name: value[r : r + 1] for name, value in options.items()}
            alone = sample(logits[r : r + 1], **own)
            assert torch.equal(alone[0], together[r])
            for mine, theirs in zip(
                compute_logprobs(logits[r : r + 1], alone, 3).tensors,
                logprobs.tensors,
                strict=True,
            ):
                assert torch.equal(mine[0], theirs[r])


@pytest.mark.parametrize(("first", "growth", "room"), [(1, 2, 1), (3, 16, 1), (10**6, 2, 10**6)])
def test_the_number_of_candidates_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, first: int, growth: int, room: int
) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = random_logits(32, 1500, 0.25, rng)
    options = random_options({"temperature", "top_k", "top_p", "min_p"}, 32, 1500, rng)
    expected = sample(logits, **options)
    monkeypatch.setattr(sampling, "_FIRST_CANDIDATES", first)
    monkeypatch.setattr(sampling, "_CANDIDATE_GROWTH", growth)
    monkeypatch.setattr(sampling, "_TIE_ROOM", room)
    assert torch.equal(sample(logits, **options), expected)


def test_filters_that_keep_all_equal_no_filter() -> None:
    """Each pair takes a different way to the same tokens."""
    rng = torch.Generator().manual_seed(1)
    logits = random_logits(64, 3001, 1e-4, rng)
    options = random_options({"temperature"}, 64, 3001, rng)
    plain = sample(logits, **options)
    for extra in (
        {"top_k": torch.full((64,), 3000, dtype=torch.int32)},  # drops one token of 3001
        {"top_k": torch.full((64,), 3001, dtype=torch.int32)},
        {"top_p": torch.full((64,), 1 - 2**-24)},
        {"top_p": torch.ones(64)},
        {"min_p": torch.zeros(64)},
    ):
        assert torch.equal(sample(logits, **options, **extra), plain)


def test_the_cpu_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(2)
    logits = random_logits(9, 5000, 0.01, rng)
    for names in ({"temperature"}, {"temperature", "top_p"}):
        options = random_options(names, 9, 5000, rng)
        monkeypatch.setattr(sampling, "_CPU_CHUNK_ELEMENTS", 2**20)
        expected = sample(logits, **options)
        monkeypatch.setattr(sampling, "_CPU_CHUNK_ELEMENTS", 1)
        assert torch.equal(sample(logits, **options), expected)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("rows", [None, [4, 0, 2]])
def test_masks_limit_their_rows_only(vocab: int, rows: list[int] | None) -> None:
    rng = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=rng)
    limited = rows or [0, 1, 2, 3, 4]
    words = torch.randint(-(2**31), 2**31, (len(limited), -(-vocab // 32)), generator=rng).int()
    expected = logits.clone()
    for row, mask in zip(limited, words.tolist(), strict=True):
        for token_id in range(vocab):
            if not mask[token_id // 32] >> token_id % 32 & 1:
                expected[row, token_id] = -INF
    sampling.mask_tokens(logits, words, None if rows is None else torch.tensor(rows))
    assert torch.equal(logits, expected)


# --- greedy -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [5, 256, 1000, 49152])
def test_greedy_takes_the_lowest_of_equal_tokens(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(4, vocab, dtype=dtype)
    for r, winners in enumerate(([0], [vocab - 1], [vocab // 2, vocab - 1], [3, 4])):
        logits[r, winners] = 2.5
    expected = [0, vocab - 1, vocab // 2, 3]
    assert sample(logits).tolist() == expected


@pytest.mark.parametrize("temperature", [None, torch.zeros(3)])
def test_greedy_does_no_sampling_work(
    monkeypatch: pytest.MonkeyPatch, temperature: torch.Tensor | None
) -> None:
    def unexpected(*_: Any) -> torch.Tensor:
        raise AssertionError("noise was computed for a greedy batch")

    monkeypatch.setattr(sampling, "exponential_noise", unexpected)
    monkeypatch.setattr(sampling, "_weights", unexpected)
    rows = torch.arange(3)
    tokens = sample(torch.eye(3, 10), temperature=temperature, seeds=rows, positions=rows)
    assert tokens.tolist() == [0, 1, 2]


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(4)
    tiny = sample(logits, temperature=torch.full((4,), 1e-40), seeds=rows, positions=rows)
    assert torch.equal(tiny, logits.argmax(-1))


# --- distribution (fixed seeds: these cannot flake) ---------------------------------------


def draws(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Tokens drawn from one row of logits at temperature 1."""
    parts = [
        sample(
            logits.expand(s.shape[0], -1),
            temperature=torch.ones(s.shape[0]),
            seeds=s,
            positions=p,
        )
        for s, p in zip(torch.split(seeds, 2**14), torch.split(positions, 2**14), strict=True)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("counted", ["positions", "seeds", "both"])
def test_frequencies_follow_softmax_into_the_tail(counted: str) -> None:
    n = 10**6
    probabilities = torch.tensor([0.6, 0.2, 0.1, 0.05, 0.03, 0.01, 0.005, 0.003, 0.001, 1e-4, 1e-4])
    probabilities = torch.cat((probabilities, 1 - probabilities.sum(0, keepdim=True))).double()
    count, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    seeds, positions = {
        "positions": (zero, count),
        "seeds": (count, zero + 100),
        "both": (count % 1000, count // 1000),
    }[counted]
    tokens = draws(probabilities.log().float()[None], seeds, positions)
    observed = torch.bincount(tokens, minlength=12).double()
    deviations = (observed - n * probabilities) / (n * probabilities * (1 - probabilities)).sqrt()
    assert deviations.abs().max() < 4
    statistic = float(((observed - n * probabilities) ** 2 / (n * probabilities)).sum())
    assert statistic < 36  # 11 degrees of freedom: p = 1.7e-4


@pytest.mark.parametrize("counted", ["positions", "seeds"])
def test_successive_tokens_are_independent(counted: str) -> None:
    n = 200_000
    logits = torch.linspace(0, 1.5, 8)[None]
    count, fixed = torch.arange(n), torch.full((n,), 3)
    tokens = draws(logits, *((fixed, count) if counted == "positions" else (count, fixed)))
    p = logits[0].double().softmax(-1)
    for lag in (1, 2, 7):
        pairs = torch.bincount(tokens[:-lag] * 8 + tokens[lag:], minlength=64).double()
        expected = (p[:, None] * p).flatten() * (n - lag)
        assert float(((pairs - expected) ** 2 / expected).sum()) < 120  # 63: p = 1.5e-5


def test_the_seed_and_the_position_decide() -> None:
    logits = torch.zeros(1, 1000)
    rows = torch.arange(500)
    one = draws(logits, rows * 0 + 1, rows)
    assert torch.equal(one, draws(logits, rows * 0 + 1, rows))
    assert int((one == draws(logits, rows * 0 + 2, rows)).sum()) < 10
    assert int((one[1:] == draws(logits, rows * 0 + 1, rows + 1)[:-1]).sum()) == 499


# --- log-probabilities --------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 5, 150])
def test_logprobs_are_those_of_the_unmodified_logits(n: int) -> None:
    rng = torch.Generator().manual_seed(3)
    logits = random_logits(100, 140, 0.0625, rng).bfloat16()
    options = random_options({"temperature", *OPTIONS, *MASKS}, 100, 140, rng)
    tokens = sample(logits, **options)
    found = compute_logprobs(logits, tokens, n)
    exact = logits.double().log_softmax(-1)
    n = min(n, 140)
    assert found.token_ids.shape == found.values.shape == (100, 1 + n)
    assert found.values.dtype == torch.float32
    assert torch.equal(found.token_ids[:, 0], tokens)
    expected = exact.gather(-1, found.token_ids).float()
    torch.testing.assert_close(found.values, expected, atol=2e-6, rtol=0)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    assert torch.equal(found.token_ids[:, 1:], order[:, :n])
    own = logits.gather(-1, tokens[:, None])
    assert torch.equal(found.ranks, 1 + (logits > own).sum(-1))


def test_logprobs_of_given_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -INF]]).log_softmax(-1)
    ids, logprobs, ranks = compute_logprobs(logits, torch.tensor([0]), 2).tensors
    assert ids.tolist() == [[0, 1, 2]]
    assert torch.equal(logprobs[0], logits[0, [0, 1, 2]])
    assert ranks.tolist() == [3]


# --- inputs that are kept, and inputs that are refused --------------------------------------


def test_the_logits_are_not_modified() -> None:
    rng = torch.Generator().manual_seed(4)
    logits = random_logits(6, 300, 0.1, rng)
    before = logits.clone()
    for names in ({"temperature", *OPTIONS, *MASKS}, {"temperature"}, {"temperature", "top_p"}):
        sample(logits, **random_options(names, 6, 300, rng))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("extra", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("bad", ["masked", "nan", "inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_an_admissible_token_are_told(
    temperature: float, bad: str, extra: dict[str, float]
) -> None:
    logits = torch.zeros(3, 600)
    banned = torch.zeros(3, 600, dtype=torch.bool)
    if bad == "masked":
        banned[1] = True
    else:
        logits[1, 5] = float(bad)
    options = {name: torch.full((3,), value) for name, value in extra.items()}
    rows = torch.arange(3)
    tokens = sample(
        logits,
        temperature=torch.full((3,), temperature),
        seeds=rows,
        positions=rows,
        banned=banned,
        edited=torch.tensor([True, bad == "masked", False]),
        **options,
    )
    assert (tokens < 0).tolist() == [False, True, False]


def test_temperatures_need_seeds() -> None:
    with pytest.raises(ValueError, match="seeds and positions"):
        sample(torch.zeros(1, 40), temperature=torch.ones(1))


@pytest.mark.parametrize("extra", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_a_min_p_of_one_leaves_the_most_likely_alone(extra: dict[str, float]) -> None:
    """And those as likely: it never leaves none."""
    logits = torch.full((400, 50), -1.0)
    logits[:, [7, 9]] = 2.0
    rows = torch.arange(400)
    options = {name: torch.full((400,), value) for name, value in extra.items()}
    tokens = sample(
        logits,
        temperature=torch.full((400,), 1.5),
        seeds=rows,
        positions=rows,
        min_p=torch.ones(400),
        **options,
    )
    expected = {7} if "top_p" in extra else {7, 9}
    assert set(tokens.tolist()) == expected
