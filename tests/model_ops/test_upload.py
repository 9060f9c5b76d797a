"""What is sent to a GPU beside a step's staging buffer does not wait for the steps under way."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from atom.graphs import staging
from atom.graphs.staging import StagingBuffer
from atom.model_ops.attention import mixed_batch
from atom.model_ops.attention.metadata import AttentionMetadata
from atom.model_ops.upload import upload
from atom.sampling import rows, token_counts
from atom.sampling.rows import SamplingRows
from atom.sampling.token_counts import TokenCounts

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Copies(TorchFunctionMode):
    """Notes what is pinned and how it is copied to a GPU, which there need not be."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[torch.Tensor] = []
        self.seen: list[tuple[bool, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.Tensor.pin_memory:
            self.pinned.append(args[0])
            return args[0]
        if func is torch.Tensor.to and CUDA in args:
            is_pinned = any(args[0] is each for each in self.pinned)
            self.seen.append((is_pinned, given.get("non_blocking", False)))
            return args[0]
        return func(*args, **given)


def test_a_copy_to_a_gpu_is_pinned() -> None:
    with Copies() as copies:
        numbers = upload(torch.arange(3), CUDA)
        assert upload(torch.arange(2), CPU).tolist() == [0, 1]
    assert copies.seen == [(True, True)]
    assert numbers.tolist() == [0, 1, 2]


def bans() -> None:
    SamplingRows(2, 16, frozenset({3}), CPU, None)._token_values({3: -torch.inf})


def counts() -> None:
    TokenCounts(16, CPU).claim([1, 2], [3])


def a_full_buffer() -> None:
    StagingBuffer(16, CPU).put(torch.arange(9).numpy())


def split_in_three() -> None:
    """A decoding sequence between two prompts."""
    numbers = torch.arange(3, dtype=torch.int32)
    metadata = AttentionMetadata(
        slot_mapping=torch.zeros(42, dtype=torch.int64),
        block_tables=numbers[:, None],
        block_counts=numbers,
        context_lens=numbers + 20,
        cu_seqlens_q=torch.tensor([0, 20, 21, 42], dtype=torch.int32),
        max_seqlen_q=21,
        max_context_len=22,
        query_lens_cpu=(20, 1, 21),
        context_lens_cpu=(20, 21, 22),
    )
    mixed_batch.split(metadata)


@pytest.mark.parametrize(
    ("module", "work", "count"),
    [(rows, bans, 2), (token_counts, counts, 2), (staging, a_full_buffer, 1),
     (mixed_batch, split_in_three, 1)],
    ids=["bans", "counts", "full buffer", "mixed batch"],
)  # fmt: skip
def test_who_sends_something_apart(
    module: ModuleType, work: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[torch.Tensor] = []

    def noted(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
        sent.append(numbers)
        return upload(numbers, device)

    monkeypatch.setattr(module, "upload", noted)
    work()
    assert len(sent) == count
