"""The tokens that top_k and top_p keep through Triton are those that plain torch keeps."""

from __future__ import annotations

import math

import pytest
import torch

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.torch import sampling
from atom.model_ops.kernels.triton.sampling import filter_tokens
from atom.model_ops.kernels.triton.sampling.filter_tokens import GROUP, last_kept

INF = float("inf")
PART = 4096
Options = dict[str, torch.Tensor]


def orders_of(scores: torch.Tensor) -> torch.Tensor:
    """int32 that sort like the scores."""
    bits = (scores.float() + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def maxima_of(orders: torch.Tensor, size: int) -> torch.Tensor:
    """The largest order of every `size` tokens, in whole parts."""
    part = min(PART, 1 << (orders.shape[1] - 1).bit_length())
    padded = torch.nn.functional.pad(orders, (0, -orders.shape[1] % part), value=-0x7F800001)
    return padded.view(len(orders), -1, min(size, part)).amax(2)


def last_of(
    scores: torch.Tensor, options: Options, device: torch.device, read: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Order and id of the last kept tokens; `read` are the scores to read, with these maxima."""
    orders = orders_of(scores)
    part = min(PART, 1 << (scores.shape[1] - 1).bit_length())
    m = SamplingMetadata(**{name: value.to(device) for name, value in options.items()})
    maxima = (maxima_of(orders, size).to(device) for size in (PART, GROUP))
    order, token_id = last_kept(
        (scores if read is None else read).to(device), *maxima, part=part, m=m, scale=1.0
    )
    return order.cpu(), token_id.cpu()


def kept_by_torch(scores: torch.Tensor, options: Options) -> torch.Tensor:
    """[R, V] bool, and where the weight is positive."""
    values, ids = sampling.most_likely(scores.float(), scores.shape[1])
    filters = {name: options.get(name) for name in ("top_k", "top_p", "min_p")}
    params = sampling._RandomRows(options["temperature"], options["temperature"], **filters)
    weights = sampling._weights(values, values[:, :1], params)
    kept = sampling._kept(weights, scores.float(), values[:, :1], params)
    return torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, ids, kept)


def check(scores: torch.Tensor, options: Options, device: torch.device, rounded: int = 0) -> None:
    """`rounded` tokens of a row may differ: the least likely, where rounded masses decide."""
    order, token_id = (last[:, None] for last in last_of(scores, options, device))
    orders = orders_of(scores)
    is_kept = orders > order
    is_kept |= (orders == order) & (torch.arange(scores.shape[1]) <= token_id)
    weights = (scores.float() - scores.float().amax(1, keepdim=True)).div_(
        options["temperature"][:, None]
    )
    weights = weights.exp_()
    if "min_p" in options:
        weights[weights < options["min_p"][:, None]] = 0.0
    differ = (is_kept & (weights > 0)) != kept_by_torch(scores, options)
    assert differ.sum(1).max() <= rounded


def options_of(names: set[str], vocab: int) -> tuple[int, Options]:
    """The number of rows, and their options: each value of a filter with most of the other's."""
    top_k = [1, 2, math.ceil(vocab / 3), max(vocab - 1, 1), vocab]
    top_p = [0.01, 0.5, 0.9, 0.9999, 1.0]
    pairs = [
        (k, p) for i, k in enumerate(top_k) for j, p in enumerate(top_p) if (i + j) % 5 in (0, 2)
    ]
    rows = len(pairs)
    every = {
        "top_k": torch.tensor([k for k, _ in pairs], dtype=torch.int32),
        "top_p": torch.tensor([p for _, p in pairs]),
        "min_p": torch.tensor([0.0, 0.02, 0.3]).repeat(rows)[:rows],
    }
    options = {"temperature": torch.linspace(0.4, 2.0, rows)}
    return rows, options | {name: every[name] for name in names}


def scores_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    scores = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab + len(kind)))
    if kind == "flat":
        return scores * 0.001
    if kind == "peaked":
        return scores * 8 + 20
    if kind == "tied":
        return (scores * 2).round() / 2
    if kind == "equal":
        return scores * 0 - 3
    if kind == "masked":  # as by a grammar: nearly everything
        return scores.masked_fill_(torch.arange(vocab) % 97 != 3, -INF)
    if kind == "huge":
        return scores * 1e30
    return scores * 3


KINDS = ["random", "flat", "peaked", "tied", "equal", "masked", "huge"]
FILTERS = [{"top_k"}, {"top_p"}, {"top_k", "top_p", "min_p"}]


@pytest.mark.parametrize("filters", FILTERS, ids=lambda names: " ".join(sorted(names)))
@pytest.mark.parametrize(
    ("vocab", "kind"), [(7, "random"), (7, "tied"), *((700, kind) for kind in KINDS)]
)
def test_what_is_kept(filters: set[str], kind: str, vocab: int, device: torch.device) -> None:
    rows, options = options_of(filters, vocab)
    check(scores_of(kind, rows, vocab), options, device)


@pytest.mark.parametrize(
    ("vocab", "kind", "dtype"),
    [
        *((20000, kind, torch.float32) for kind in KINDS),
        (49152, "random", torch.bfloat16),
        pytest.param(160000, "flat", torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_long_rows(vocab: int, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Several programs deal a row; the last one has fewer parts. Of long rows, torch rounds masses
    of blocks to float32.
    """
    top_k = torch.tensor([vocab, 50, vocab // 2, vocab], dtype=torch.int32)
    top_p = torch.tensor([0.9999, 0.95, 0.7, 0.01])
    options = {"temperature": torch.tensor([1.0, 0.7, 1.5, 1.0]), "top_k": top_k, "top_p": top_p}
    if vocab > 100000:  # two rows in the interpreter take seconds
        options = {name: value[[0, 2]] for name, value in options.items()}
    scores = scores_of(kind, len(options["top_k"]), vocab).to(dtype)
    check(scores, options, device, rounded=2)


def test_orders_of_both_signs_differ_in_all_bits(device: torch.device) -> None:
    """The range of a row's orders needs 32 bits, and scores differ in the last ones."""
    steps = torch.arange(300, dtype=torch.int32)
    large = (torch.tensor([3e38]).view(torch.int32) + steps).view(torch.float32)
    scores = torch.cat((large, -large, steps.view(torch.float32)))[None].expand(5, -1)
    top_k = torch.tensor([3, 299, 310, 590, 800], dtype=torch.int32)
    check(scores.contiguous(), {"temperature": torch.full((5,), 1e38), "top_k": top_k}, device)
    options = {"temperature": torch.full((5,), 1e38), "top_p": torch.linspace(0.1, 0.9999, 5)}
    check(scores.contiguous(), options, device)


def test_neither_rows_nor_programs_matter(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "temperature": torch.ones(3),
        "top_k": torch.tensor([20000, 9000, 20000], dtype=torch.int32),
        "top_p": torch.tensor([0.999, 0.99, 0.3]),
    }
    scores = scores_of("flat", 3, 20000)
    expected = last_of(scores, options, device)
    monkeypatch.setattr(filter_tokens, "_PARTS", 1)
    for row in range(3):
        own = {name: value[row : row + 1] for name, value in options.items()}
        for got, every in zip(last_of(scores[row : row + 1], own, device), expected, strict=True):
            assert got.item() == every[row].item()


@pytest.mark.parametrize("top_p", [None, 0.8])
def test_low_groups_are_not_read(top_p: float | None, device: torch.device) -> None:
    """Nothing is read of groups that cannot hold one of the k most likely tokens."""
    scores = scores_of("peaked", 2, 100 * GROUP)
    options = {"temperature": torch.ones(2), "top_k": torch.tensor([5, 40], dtype=torch.int32)}
    if top_p is not None:
        options["top_p"] = torch.full((2,), top_p)
    groups = scores.view(2, 100, GROUP)
    poisoned = torch.full_like(groups, INF)
    for row, top_k in enumerate(options["top_k"].tolist()):
        best = groups[row].amax(1).topk(top_k).indices
        poisoned[row, best] = groups[row, best]
    expected = last_of(scores, options, device)
    got = last_of(scores, options, device, poisoned.view(scores.shape))
    assert [t.tolist() for t in got] == [t.tolist() for t in expected]


def test_rows_without_a_filter_keep_all(device: torch.device) -> None:
    """Beside rows with one: greedy, without limits, and not finite."""
    scores = scores_of("random", 5, 5000)
    scores[3, 7] = INF
    options = {
        "temperature": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]),
        "top_k": torch.tensor([5, 5000, 5, 5, 5000], dtype=torch.int32),
        "top_p": torch.tensor([1.0, 1.0, 0.5, 0.5, 0.5]),
    }
    order, token_id = last_of(scores, options, device)
    kept = [(orders_of(scores)[i] > order[i]).sum().item() for i in range(5)]
    assert kept[0] == 4
    assert kept[1] == 5000
    assert 1 < kept[4] < 4000
    assert token_id[1] == 2**31 - 1
