"""The pool of recurrent states against a model of it, and its bytes for published models."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_cache.hashes import Hashes, hash_of
from models.checkpoints import edit_config
from models.kimi_k3 import LINEAR, TEXT

from atom.config import ModelOptions
from atom.distributed.parallel_state import ParallelGroup
from atom.kv_cache.base import KVCacheMemoryError
from atom.kv_cache.state_pool import StatePool, recurrent_layers
from atom.model_loader.source import resolve_model
from atom.model_ops.attention.metadata import StateMetadata
from atom.model_ops.attention.recurrent_layer import StatePart
from atom.model_ops.layer_context import LayerContext
from atom.models.registry import create_model
from atom.platform import cpu_platform

ROWS = 5


@dataclass
class Sequence:
    """Attributes:
    tokens: known ones.
    computed: of them, those whose states the pool has.
    """

    tokens: list[int]
    computed: int = 0
    drafts: list[int] = field(default_factory=list)

    def expected(self, position: int, tokens: list[int]) -> tuple[int, int, int]:
        return hash_of(tokens[: position + 1])


def run(operations: int, seed: int, most_drafts: int) -> int:
    """Random steps of random sequences -> how many tokens were checked."""
    draw = random.Random(seed)
    layer = Hashes()
    StatePool([layer], ROWS, most_drafts, torch.device("cpu")).allocate()
    # What rows hold before they are written must not matter.
    layer.hashes[:], layer.tokens[:] = -7, -7
    rows: dict[int, Sequence] = {}
    checked = 0
    for _ in range(operations):
        kind = draw.random()
        free = [row for row in range(ROWS) if row not in rows]
        if free and (kind < 0.1 or not rows):
            rows[draw.choice(free)] = Sequence(
                [draw.randrange(97) for _ in range(draw.randint(1, 12))]
            )
        elif kind < 0.13:  # ended or aborted
            del rows[draw.choice([*rows])]
        elif kind < 0.16:  # preempted, to go on in another row or the same
            row = draw.choice([*rows])
            kept = rows.pop(row)
            rows[draw.choice([*free, row])] = Sequence(kept.tokens)
        else:
            checked += step(draw, layer, rows, most_drafts)
    return checked


def step(draw: random.Random, layer: Hashes, rows: dict[int, Sequence], most_drafts: int) -> int:
    """Some sequences compute a chunk of what is known, with drafts behind the last known token."""
    chosen = draw.sample([*rows], draw.randint(1, len(rows)))
    queries = []
    for row in chosen:
        own = rows[row]
        known = own.tokens[own.computed : own.computed + draw.randint(1, 9)]
        ends = own.computed + len(known) == len(own.tokens)
        own.drafts = [draw.randrange(97) for _ in range(draw.randint(0, most_drafts) * ends)]
        queries.append([*known, *own.drafts])
    lens = [len(query) for query in queries]
    padded = draw.random() < 0.5
    width = max(lens) + draw.randint(0, 3) if padded else 0
    spare = draw.randint(0, 2) if padded else 0
    sizes = [width if padded else n for n in lens] + [width] * spare
    tokens = [t for q, size in zip(queries, sizes, strict=False) for t in (q + [1] * size)[:size]]
    padding = [size - n for size, n in zip(sizes, lens, strict=False)] + [width - 1] * spare
    starts = [rows[row].computed for row in chosen] + [0] * spare
    found = layer.step(
        tokens + [1] * (width * spare),
        StateMetadata(
            rows=torch.tensor([*chosen, *[ROWS] * spare]),
            context_lens=torch.tensor(
                [start + size for start, size in zip(starts, sizes, strict=True)]
            ),
            cu_seqlens_q=torch.tensor([0, *sizes]).cumsum(0),
            padding_lens=torch.tensor(padding) if padded else None,
            query_lens_cpu=tuple(sizes),
        ),
    )
    begin = checked = 0
    for row, query, size in zip(chosen, queries, sizes, strict=False):
        own = rows[row]
        text = own.tokens[: own.computed] + query
        for i in range(len(query)):
            assert found[begin + i] == own.expected(own.computed + i, text)
            checked += 1
        begin += size
        accepted = draw.randint(0, len(own.drafts))
        own.computed += len(query) - len(own.drafts) + accepted
        if own.computed >= len(own.tokens):
            own.tokens = [*text[: own.computed], draw.randrange(97)]
        if len(own.tokens) > 40:
            del rows[row]
    return checked


@pytest.mark.parametrize("most_drafts", [0, 1, 3, 7])
def test_random_operations(most_drafts: int) -> None:
    assert run(600, most_drafts, most_drafts) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("most_drafts", [0, 1, 3, 7, 15])
def test_a_hundred_thousand_random_operations(most_drafts: int) -> None:
    assert run(20_000, 100 + most_drafts, most_drafts) > 40_000


@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_version_is_noticed(change: int, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = StateMetadata.starts.fget
    assert starts is not None
    monkeypatch.setattr(
        StateMetadata, "starts", property(lambda self: (starts(self) + change).clamp(min=0))
    )
    with pytest.raises(AssertionError):
        run(600, 3, 3)


def test_a_version_too_few_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatePart, "num_versions", lambda self, most: most + self.reach - 1)
    with pytest.raises(AssertionError):
        run(600, 3, 3)


def test_padding_that_writes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Hashes.step
    monkeypatch.setattr(
        Hashes,
        "step",
        lambda self, tokens, metadata: given(self, tokens, replace(metadata, padding_lens=None)),
    )
    with pytest.raises(AssertionError):
        run(600, 3, 3)


KIMI_48B = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
NEXT_80B = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
# Layers without a state are as small as in tests, but for heads, which ranks share.
FULL = [*range(4, 93, 4), 93]
K3 = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "text_config": {
        **TEXT,
        "dtype": "bfloat16",
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "attn_res_block_size": 12,
        "linear_attn_config": {
            **LINEAR,
            "full_attn_layers": FULL,
            "kda_layers": [i for i in range(1, 94) if i not in FULL],
            "head_dim": 128,
            "num_heads": 96,
        },
    },
}


@pytest.mark.parametrize(
    ("config", "layers", "state", "channels"),
    [
        (KIMI_48B, 20, 2 << 20, 3 * 4096),
        (NEXT_80B, 36, 2 << 20, 2 * 2048 + 4096),
        (K3, 69, 6 << 20, 3 * 12288),
    ],
    ids=["Kimi-Linear 48B", "Qwen3-Next 80B", "Kimi-K3"],
)
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_bytes_of_published_models(
    config: dict[str, Any],
    layers: int,
    state: int,
    channels: int,
    num_ranks: int,
    tmp_path: Path,
) -> None:
    """40 MiB, 72 MiB and 414 MiB of states for a sequence without drafts on one rank, 1.4, 1.7 and
    14.6 of inputs of convolutions.
    """
    (tmp_path / "config.json").write_text("{}")
    edit_config(tmp_path, **config)
    source = resolve_model(ModelOptions(str(tmp_path), load_format="dummy"))
    context = replace(
        LayerContext.create(torch.bfloat16, 1, cpu_platform()),
        device=torch.device("meta"),
        group=ParallelGroup(0, num_ranks),
    )
    model = partial(create_model, source.hf_config)(context)
    own = recurrent_layers(model)
    for most_drafts in (0, 7):
        pool = StatePool(own, 63, most_drafts, context.device)
        inputs = 2 * channels * (most_drafts + 3)
        row = layers * (state * (most_drafts + 1) + inputs) // num_ranks
        assert pool.row_bytes == row
        assert pool.num_bytes == 64 * row
        what = rf"{most_drafts + 1} versions .* 64 x {row} \+ 0 x .* = {64 * row} bytes"
        with pytest.raises(KVCacheMemoryError, match=what):
            pool.check(0)
        with_slots = StatePool(own, 63, most_drafts, context.device, 10)
        slot = layers * (state + 2 * channels * 3) // num_ranks
        assert with_slots.num_bytes == 64 * row + 10 * slot
