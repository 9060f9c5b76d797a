"""What tests of aiter's adapters share: the libraries, batches, and references in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from fake_aiter import AITER, ENTRY_POINTS, FakeAiter

from atom.model_ops.attention.metadata import AttentionMetadata
from atom.model_ops.kernels import probe
from atom.model_ops.registry import OpTable
from atom.platform import Platform, current_platform

MI300X = Platform("rocm", "gfx942", True)
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Aiter:
    """Attributes:
    ops: a table of aiter's implementations alone.
    fake: what stands behind them; None when it is aiter itself.
    """

    ops: OpTable
    device: torch.device
    fake: FakeAiter | None

    def called(self, *names: str) -> None:
        """These entry points and no others were called."""
        if self.fake is not None:
            assert self.fake.names == set(names)


def aiters(kind: str) -> Iterator[Aiter]:
    """The fake, or the real one where there is a device for it."""
    if kind == "fake":
        fake = FakeAiter()
        with probe.replaced(fake.library):
            yield Aiter(OpTable(MI300X, AITER), torch.device("cpu"), fake)
        return
    platform = current_platform()
    if platform.arch not in ("gfx942", "gfx950"):
        pytest.skip(f"aiter runs on gfx942 and gfx950, this is {platform.arch}")
    if reason := probe.refusal(ENTRY_POINTS["rmsnorm2d_fwd"]):
        pytest.skip(reason)
    yield Aiter(OpTable(platform, AITER), torch.device("cuda"), None)


def random(aiter: Aiter, *shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(aiter.device)


def check(out: torch.Tensor, reference: torch.Tensor, tolerance: float = 2**-6) -> None:
    """Within a few roundings of bfloat16, relative to the largest number."""
    assert out.shape == reference.shape
    error = (out.double() - reference.double()).abs().max() / reference.double().abs().max()
    assert error < tolerance, float(error)


def batch(
    aiter: Aiter, query_lens: list[int], context_lens: list[int], block_size: int, width: int
) -> AttentionMetadata:
    """Sequences whose blocks lie scattered in a pool; every token but the first is written."""
    blocks = torch.randperm(len(query_lens) * width, generator=torch.Generator().manual_seed(3))
    tables = blocks.view(len(query_lens), width).int()
    slots = []
    for table, queries, context in zip(tables.tolist(), query_lens, context_lens, strict=True):
        positions = range(context - queries, context)
        slots += [table[p // block_size] * block_size + p % block_size for p in positions]
    starts = F.pad(torch.tensor(query_lens).cumsum(0), (1, 0)).int()
    return AttentionMetadata(
        slot_mapping=torch.tensor(slots, device=aiter.device),
        block_tables=tables.to(aiter.device),
        block_counts=torch.full((len(query_lens),), width, dtype=torch.int32, device=aiter.device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=aiter.device),
        cu_seqlens_q=starts.to(aiter.device),
        max_seqlen_q=max(query_lens),
        max_context_len=max(context_lens) + 3,
        query_lens_cpu=tuple(query_lens),
        context_lens_cpu=tuple(context_lens),
    )


def unknown_lengths(metadata: AttentionMetadata) -> AttentionMetadata:
    return replace(metadata, context_lens_cpu=None)


def all_slots(metadata: AttentionMetadata, block_size: int) -> list[torch.Tensor]:
    """Each sequence's slots, in the order of its tokens."""
    offsets = torch.arange(block_size, device=metadata.block_tables.device)
    slots = (metadata.block_tables[:, :, None] * block_size + offsets).flatten(1)
    return [row[:n] for row, n in zip(slots, metadata.context_lens.tolist(), strict=True)]


def attention(
    q: torch.Tensor,
    rows: list[tuple[torch.Tensor, torch.Tensor]],
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """float64: q [T, H, D] over each sequence's keys and values [C, KH, D]."""
    out = []
    for part, (k, v) in zip(q.double().split(metadata.query_lens_cpu), rows, strict=True):
        group = part.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("lhd,chd->hlc", part, k) * scale
        distance = torch.arange(len(part), device=q.device)[:, None] + len(k) - len(part)
        distance = distance - torch.arange(len(k), device=q.device)
        hidden = (distance < 0) | (distance >= (window or len(k)))
        out.append(
            torch.einsum("hlc,chd->lhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        )
    return torch.cat(out)


def as_kept(x: torch.Tensor, storage: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return x
    limit = torch.finfo(storage).max
    return (x.float() / scale).clamp(-limit, limit).to(storage).double() * scale
