"""What lies between the layers, the logits and the drafts of a step: integers, and rows of tables.

One kernel each for any number of sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from aot_case import Case, pool

from atom.model_ops.kernels.torch.elementwise import rms_norm
from atom.model_ops.kernels.torch.gather import embedding
from atom.model_ops.registry import OpQuery

Arguments = Callable[[OpQuery], tuple[object, ...]]
FP32, INT32 = torch.float32, torch.int32


def _integers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def _fixed(*given: object) -> Arguments:
    return lambda _: given


def _case(name: str, what: str, of: Callable[..., Arguments], *batches: tuple[int, ...]) -> Case:
    first, *others = (of(*batch) for batch in batches)
    return Case(f"{name}/{what}", name, first, {}, dtype=FP32, batches=tuple(others))


def _verify(count: int, most: int) -> Arguments:
    """As in a graph: drafts behind their newest tokens, padded."""
    drafts = _integers(count, most + 1)[:, 1:]
    return _fixed(_integers(count * (most + 1)), drafts, None, _integers(count))


def _verify_ragged(count: int, most: int) -> Arguments:
    samples = _integers(count * (most + 1) - count // 2)
    return _fixed(samples, _integers(count, most), _integers(count, most + 1), None)


def _place(count: int, most: int) -> Arguments:
    rows = _integers(count * (most + 1))
    return _fixed(rows, rows, rows, _integers(count), None)


def _place_ragged(count: int, most: int) -> Arguments:
    rows = _integers(count * (most + 1) - count // 2)
    return _fixed(rows, rows, rows, _integers(count), _integers(count, most + 1))


def _tables(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of 131,072 tokens."""
    return _integers(count, 2048, dtype=INT32), _integers(count, dtype=INT32)


def _drafts(count: int, distance: int, num_rows: int) -> Arguments:
    tokens, sizes = (_integers(count), _integers(count)), (151667, 64, 131072)
    return _fixed(*tokens, *_tables(count), distance, num_rows, *sizes)


def _options(count: int, repeats: int) -> Arguments:
    return _fixed(torch.empty(7, 256), _integers(256), _integers(count), repeats)


def _inputs(count: int, each: int) -> Arguments:
    tokens = _integers(count * each)
    tables, own = _integers(256, 2049, dtype=INT32), _integers(count, 2049, dtype=INT32)
    return _fixed(tables, _integers(count), own, tokens, tokens, tokens)


def _share(count: int) -> Arguments:
    """Kimi-K2.5 at TP8, beyond 2 GiB."""
    return lambda query: (
        *(_integers(count), pool((20480, 7168), query.dtype), 143360, embedding),
    )  # fmt: skip


def _pairs(ranks: int, *, has_map: bool, finite: bool) -> Callable[[int], Arguments]:
    def of(count: int) -> Arguments:
        token_ids = _integers(32000) if has_map else None
        return _fixed(_integers(ranks, count, 2, dtype=INT32), token_ids, finite)

    return of


def _scores(vocab_size: int, name: str, *more: object) -> Case:
    def of(count: int) -> Arguments:
        return _fixed(torch.empty(count, vocab_size), *more)

    what = f"{name}/{vocab_size}"
    shape = {"vocab_size": vocab_size}
    return Case(what, name, of(64), shape, dtype=FP32, batches=(of(1), of(17)))


def _beside(size: int) -> Case:
    def of(count: int) -> Arguments:
        def arguments(query: OpQuery) -> tuple[object, ...]:
            x, weight = (torch.empty(*n, dtype=query.dtype) for n in ((count, size), (size,)))
            return x, x, weight, weight, 1e-5, rms_norm

        return arguments

    name, shape = "rms_norm_beside", {"size": size}
    return Case(f"{name}/{size}", name, of(64), shape, batches=(of(1), of(17)))


CASES: tuple[Case, ...] = (
    _case("verify_drafts", "graph", _verify, (64, 3), (1, 3), (17, 1), (5, 20)),
    _case("verify_drafts", "ragged", _verify_ragged, (64, 3), (1, 3), (17, 1), (5, 20)),
    _case("place_samples", "graph", _place, (64, 3), (1, 3), (17, 1), (64, 0)),
    _case("place_samples", "ragged", _place_ragged, (64, 3), (1, 3), (17, 1)),
    _case("place_drafts", "chain", _drafts, (64, 1, 1), (1, 2, 1), (17, 16, 1)),
    _case("place_drafts", "block", _drafts, (64, 1, 8), (1, 1, 8), (17, 1, 8)),
    _case("sampling_options", "7", _options, (64, 1), (1, 4), (17, 3)),
    _case("take_inputs", "128k", _inputs, (64, 4), (1, 1), (17, 3)),
    Case("share_embedding/kimi tp8", "share_embedding", _share(64), {"size": 7168},
         batches=(_share(1), _share(17))),
    _scores(32000, "argmax", _integers(32000)),
    _scores(20480, "largest_pair", 143360),
    _case("largest_of_pairs", "8", _pairs(8, has_map=False, finite=True), (64,), (1,), (17,)),
    _case("largest_of_pairs", "8 drafts", _pairs(8, has_map=True, finite=False), (64,), (1,)),
    _beside(4096),
    _beside(7168),
)  # fmt: skip
