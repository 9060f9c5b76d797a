"""aiter's latent attention of prompts, in pieces: against float64, and how much memory it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from aiter_cases import BF16, Aiter, check
from hypothesis import given, settings
from hypothesis import strategies as st
from test_aiter_mla import latents
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atom.model_engine.arg_utils import engine_config
from atom.model_engine.start_up import largest_steps as steps_module
from atom.model_ops.attention.metadata import (
    MAX_DECODE_QUERIES,
    AttentionMetadata,
    LatentCacheTensor,
)
from atom.model_ops.kernels.aiter import mla_prefill as prefill_module

ROOM = 64


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize(
    ("query_lens", "context_lens", "calls"),
    [
        # Queries, keys and whether it is causal, of each call.
        ([20, 17], [40, 24], [(37, 64, True)]),
        ([20, 17, 18], [40, 25, 30], [(20, 40, True), (35, 55, True)]),
        ([20], [65], [(20, 1, False), (20, 64, True)]),
        # Pieces begin within blocks of 16, and the next sequences go on together.
        (
            [40, 20, 17],
            [150, 30, 20],
            [(40, 22, False), (40, 64, False), (40, 64, True), (37, 50, True)],
        ),
        # A prompt of more tokens is one piece.
        ([70, 17], [100, 20], [(70, 30, False), (70, 70, True), (17, 20, True)]),
    ],
)
def test_pieces_of_contexts(
    aiter: Aiter,
    query_lens: list[int],
    context_lens: list[int],
    calls: list[tuple[int, int, bool]],
    bits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_module, "MOST_EXPANDED_TOKENS", ROOM)
    storage = BF16 if bits == 16 else aiter.ops.platform.fp8_dtype
    made = latents(aiter, 8, query_lens, context_lens, 16, storage)
    for _ in range(2):
        out = made.prefill(made.q, made.cache, made.up_proj, made.metadata, 0.1)
        check(out, made.wanted, 2**-5)
    if aiter.fake is not None:
        given = [c.arguments for c in aiter.fake.calls if c.name == "flash_attn_varlen_func"]
        assert [(len(a["q"]), len(a["k"]), a["causal"]) for a in given] == calls * 2


class Peak(TorchDispatchMode):
    """Attributes:
    most: bytes of storages that lived at once, of those that any op returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {k: kept for k, kept in self._live.items() if not kept[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return out


HEADS, NOPE, V_DIM = 2, 32, 16


def peak_bytes(prompts: Sequence[tuple[int, int]]) -> int:
    """What attention of prompts takes at most, (queries, context) of each."""
    block_size = 16
    queries, contexts = (tuple(lens) for lens in zip(*prompts, strict=True))
    count, total = len(prompts), sum(queries)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    metadata = AttentionMetadata(
        slot_mapping=torch.empty(total, dtype=torch.int64, device="meta"),
        block_tables=integers(count, -(-max(contexts) // block_size)),
        block_counts=integers(count),
        context_lens=integers(count),
        cu_seqlens_q=integers(count + 1),
        max_seqlen_q=max(queries),
        max_context_len=max(contexts),
        query_lens_cpu=queries,
        context_lens_cpu=contexts,
    )
    pool = LatentCacheTensor(torch.empty(1, block_size, 576, dtype=BF16, device="meta"))
    up_proj = torch.empty(HEADS, NOPE + V_DIM, 512, dtype=BF16, device="meta")
    q = torch.empty(total, HEADS, NOPE + 64, dtype=BF16, device="meta")
    with Peak() as peak:
        prefill_module.mla_prefill(q, pool, up_proj, metadata, 0.1)
    return peak.most


def attend_nothing(
    q: torch.Tensor, _: torch.Tensor, value: torch.Tensor, *__: Any, return_lse: bool, **___: Any
) -> Any:
    out = q.new_empty(len(q), *value.shape[1:])
    sums = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    return (out, sums) if return_lse else out


BUDGET, SEQUENCES = 200, 8
# Of queries and of outputs.
ROW_BYTES = HEADS * (NOPE + 64 + V_DIM) * BF16.itemsize
LEAST = MAX_DECODE_QUERIES + 1


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_slots(*arguments: Any) -> torch.Tensor:
        return torch.empty(arguments[5], dtype=torch.int32, device="meta")

    monkeypatch.setattr(prefill_module, "list_slots", list_slots)
    monkeypatch.setattr(prefill_module, "function", lambda _: attend_nothing)
    for module in (prefill_module, steps_module):
        monkeypatch.setattr(module, "MOST_EXPANDED_TOKENS", ROOM)


def profiled_bytes(context: int) -> int:
    options = engine_config(
        model="none", max_num_batched_tokens=BUDGET, max_num_seqs=SEQUENCES, block_size=16
    )
    steps = steps_module.largest_steps(options, context + 1, 3, vocab_size=50)
    most = 0
    for step in steps:
        lens = [(len(s.token_ids), s.context_len) for s in step.sequences]
        if prompts := [each for each in lens if each[0] >= LEAST]:
            # The rows of its other sequences are there while these are computed.
            others = sum(queries for queries, _ in lens) - sum(queries for queries, _ in prompts)
            most = max(most, peak_bytes(prompts) + others * ROW_BYTES)
    return most


@pytest.mark.usefixtures("without_kernels")
def test_no_step_takes_more_memory_than_the_profiled_ones() -> None:
    """However much its sequences have cached: the scheduler bounds new tokens alone."""
    profiled = {context: profiled_bytes(context) for context in (40, 64, 120, 190, 700)}

    @settings(max_examples=60)
    @given(st.data())
    def no_step(data: st.DataObject) -> None:
        longest = data.draw(st.sampled_from(sorted(profiled)))
        left, prompts = BUDGET, []
        for _ in range(data.draw(st.integers(1, SEQUENCES))):
            if left < LEAST:
                break
            queries = data.draw(st.integers(LEAST, min(left, longest)))
            prompts.append((queries, data.draw(st.integers(queries, longest))))
            left -= queries
        # But for integers of each sequence.
        assert peak_bytes(prompts) <= 1.01 * profiled[longest]

    no_step()
