"""Decode rows beside prefill chunks: each kind goes to its op, and the parts are the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_ops.batches import Part, attention_metadata
from transformers import LlamaConfig

from atom.model_ops.attention.metadata import AttentionMetadata, KVCacheTensor, LatentCacheTensor
from atom.model_ops.attention.mha import Attention
from atom.model_ops.attention.mixed_batch import split
from atom.model_ops.attention.mla import MLAAttention
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import Implementation, OpTable, always
from atom.model_ops.rotary import AttentionInputs, RotaryEmbedding
from atom.platform import cpu_platform

CPU = torch.device("cpu")
BLOCK_SIZE = 8
# Queries and cached tokens of each sequence.
BATCHES = {
    "decodes first": [(1, 30), (4, 17), (20, 0), (33, 5)],
    "decodes last": [(20, 9), (17, 0), (16, 0), (1, 39)],
    "decodes between": [(17, 3), (1, 11), (2, 0), (21, 0)],
    "anywhere": [(1, 30), (20, 12), (3, 0), (25, 0), (1, 7), (18, 2), (16, 3)],
}


def metadata_of(lengths: list[tuple[int, int]]) -> AttentionMetadata:
    """Sequences whose blocks lie scattered."""
    counts = [-(-(queries + start) // BLOCK_SIZE) for queries, start in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    parts = []
    for (queries, start), count in zip(lengths, counts, strict=True):
        blocks, order = order[:count], order[count:]
        parts.append(Part(queries, start, blocks))
    return attention_metadata(parts, BLOCK_SIZE, CPU)


class Recorder:
    """Ops of their own for decode and prefill, or one for both, over those of torch."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, AttentionMetadata]] = []

    def context(self, *ops: str, is_shared: bool = False) -> LayerContext:
        registry = dict(OPS)
        for op in ops:
            [line] = [entry for entry in OPS[op] if entry.name == "torch"]
            load = self._loader("both" if is_shared else op, line.load())
            registry[op] = (Implementation("torch", always, load),)
        if is_shared:
            registry[ops[1]] = registry[ops[0]]
        return LayerContext(torch.float32, CPU, OpTable(cpu_platform(), registry), 64)

    def _loader(self, name: str, compute: Callable[..., Any]) -> Callable[[], Any]:
        def op(*args: Any) -> Any:
            [metadata] = [arg for arg in args if isinstance(arg, AttentionMetadata)]
            self.seen.append((name, metadata))
            return compute(*args)

        return lambda: op


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotary_of(head_dim: int, context: LayerContext) -> RotaryEmbedding:
    return RotaryEmbedding(LlamaConfig(), head_dim, context)


def run_heads(metadata: AttentionMetadata, context: LayerContext) -> torch.Tensor:
    layer = Attention(4, 2, 16, 0.3, context)
    layer.bind_kv_cache(KVCacheTensor(*random(2, 64, BLOCK_SIZE, 2, 16, seed=1)))
    tokens = len(metadata.slot_mapping)
    q, (k, v) = random(tokens, 4, 16, seed=2), random(2, tokens, 2, 16, seed=3)
    positions, rotary = torch.arange(tokens) % 64, rotary_of(16, context)
    return layer(q, k, v, AttentionInputs(positions, metadata, rotary))


def run_latents(metadata: AttentionMetadata, context: LayerContext) -> torch.Tensor:
    layer = MLAAttention(4, 24, 8, 12, 0.3, context)
    layer.bind_kv_cache(LatentCacheTensor(random(64, BLOCK_SIZE, 32, seed=1)))
    tokens = len(metadata.slot_mapping)
    q, latent = random(tokens, 4, 20, seed=2), random(tokens, 24, seed=3)
    rows = q, latent, random(tokens, 8, seed=4), random(4, 24, 24, seed=5)
    positions, rotary = torch.arange(tokens) % 64, rotary_of(8, context)
    return layer(*rows, AttentionInputs(positions, metadata, rotary))


KINDS = {
    "heads": (run_heads, ("paged_attention", "prefill_attention")),
    "latents": (run_latents, ("mla_decode", "mla_prefill")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("is_known", [True, False])
def test_the_parts_are_the_whole(kind: str, name: str, is_known: bool) -> None:
    run, ops = KINDS[kind]
    metadata = metadata_of(BATCHES[name])
    if not is_known:
        metadata = replace(metadata, context_lens_cpu=None)
    whole, parts = Recorder(), Recorder()
    expected = run(metadata, whole.context(*ops, is_shared=True))
    assert whole.seen == [("both", metadata)]
    out = run(metadata, parts.context(*ops))
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)
    lens = {op: part.query_lens_cpu for op, part in parts.seen}
    assert lens == {
        ops[0]: tuple(n for n, _ in BATCHES[name] if n <= 16),
        ops[1]: tuple(n for n, _ in BATCHES[name] if n > 16),
    }


@pytest.mark.parametrize("name", BATCHES)
def test_a_part_is_the_batch_of_its_sequences(name: str) -> None:
    metadata = metadata_of(BATCHES[name])
    starts = metadata.cu_seqlens_q.tolist()
    tokens = torch.arange(starts[-1])
    for part, is_long in zip(split(metadata), (False, True), strict=True):
        which = [i for i, (n, _) in enumerate(BATCHES[name]) if (n > 16) is is_long]
        rows = [row for i in which for row in range(starts[i], starts[i + 1])]
        assert tokens[part.rows].tolist() == rows
        made = part.metadata
        assert made.slot_mapping.tolist() == metadata.slot_mapping[rows].tolist()
        assert made.cu_seqlens_q.dtype == torch.int32
        ends = torch.tensor(made.query_lens_cpu).cumsum(0).tolist()
        assert made.cu_seqlens_q.tolist() == [0, *ends]
        for field in ("block_tables", "block_counts", "context_lens"):
            assert torch.equal(getattr(made, field), getattr(metadata, field)[which])
        assert made.context_lens_cpu == tuple(made.context_lens.tolist())
        assert made.max_seqlen_q == max(made.query_lens_cpu)
        assert made.max_context_len == max(made.context_lens_cpu)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("lengths", "used"), [([(1, 5), (16, 0)], 0), ([(17, 5), (20, 0)], 1)], ids=["short", "long"]
)
def test_batches_of_one_kind_are_passed_as_they_are(
    kind: str, lengths: list[tuple[int, int]], used: int
) -> None:
    run, ops = KINDS[kind]
    metadata, recorder = metadata_of(lengths), Recorder()
    run(metadata, recorder.context(*ops))
    [(op, passed)] = recorder.seen
    assert op == ops[used]
    assert passed is metadata


def test_a_step_is_split_once_for_all_layers() -> None:
    metadata, recorder = metadata_of(BATCHES["anywhere"]), Recorder()
    for _ in range(2):
        run_heads(metadata, recorder.context("paged_attention", "prefill_attention"))
    first, second, third, fourth = (passed for _, passed in recorder.seen)
    assert first is third
    assert second is fourth


@pytest.mark.parametrize("kind", KINDS)
def test_on_cpus_nothing_is_split(kind: str) -> None:
    """Decode and prefill are one op there."""
    _, ops = KINDS[kind]
    table = OpTable(cpu_platform(), OPS)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "sliding_window": 0}
    sizes |= {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 12}
    sizes |= {"block_size": BLOCK_SIZE, "num_blocks": 4}
    decode, prefill = (table.resolve(op, torch.float32, torch.float32, **sizes) for op in ops)
    assert decode is prefill


def test_long_sequences_are_known_beside_some_that_are_not() -> None:
    """Those that the host knows only bounds of go on with a few tokens."""
    metadata = metadata_of(BATCHES["anywhere"])
    lens = metadata.context_lens_cpu
    assert lens is not None
    most = tuple(n + 3 * (q <= 16) for n, q in zip(lens, metadata.query_lens_cpu, strict=True))
    ahead = replace(metadata, context_lens_cpu=None, most_context_cpu=most)
    short, long = split(ahead)
    assert short.metadata.context_lens_cpu is None
    assert long.metadata.context_lens_cpu == (32, 25, 20)
