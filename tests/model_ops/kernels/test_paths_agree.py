"""Whole models with Eagle3, greedily: torch, interpreted Triton and the fakes of aiter and FlashMLA
say the same.

In float32, where the same arithmetic in another order changes no token; the fakes say that they
compute in it. Sizes are small but such that no implementation may refuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_aiter import FakeAiter
from fake_flash_mla import FakeFlashMLA
from models import checkpoints
from spec_decode import draft_bench, engines
from transformers import PreTrainedTokenizerFast

from atom.environment import triton_is_interpreted
from atom.graphs.capture import ReexecuteBackend
from atom.kv_cache import paged
from atom.model_engine.step import planned_graphs
from atom.model_loader import sketch
from atom.model_ops import layer_context
from atom.model_ops.attention.metadata import MAX_DECODE_QUERIES
from atom.model_ops.kernels import probe
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import Implementation, OpTable
from atom.platform import Platform, cpu_platform

HIDDEN = 64
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": HEADS,
    "kimi": {**LATENT, "moe_intermediate_size": 64},
}
# One query head a KV head, as published drafts have it; and a latent one.
DRAFTS: dict[str, dict[str, Any]] = {
    "mha": {
        **draft_bench.MHA,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    "mla": {**draft_bench.MLA, **LATENT},
}
# Triton's are for `--batch-invariant` alone.
PRODUCTS = ("linear", "logits", "quant_logits", "quant_embedding")
NUM_LAYERS = 2
AUX = [0, 1, 2]

# What the fake aiter must have been asked for, of target and draft.
COMMON = {
    "gemm_a16w16",
    "rmsnorm2d_fwd",
    "rmsnorm2d_fwd_with_add",
    "rope_cached_positions_2c_fwd_inplace",
    "silu_and_mul",
    "flash_attn_varlen_func",
}
CALLED = {
    "llama": {"reshape_and_cache_flash", "unified_attention"},
    "kimi": {"concat_and_cache_mla", "mla_decode_fwd", "fused_moe"},
    "mha": {"reshape_and_cache", "pa_decode_gluon"},
    "mla": {"concat_and_cache_mla", "mla_decode_fwd"},
}


# And what must have run through Triton.
PAGED = {"rope_and_cache", "paged_attention", "prefill_attention"}
LATENTS = {"mla_rope_and_cache", "mla_decode", "mla_prefill"}
SMALL = {
    *("argmax", "rms_norm_beside", "sampling_options"),
    *("verify_drafts", "place_samples", "place_drafts"),
}
THROUGH_TRITON = {
    "llama": PAGED,
    "kimi": LATENTS | {"moe_route", "moe_experts"},
    "mha": PAGED | SMALL,
    "mla": LATENTS | SMALL,
}


@dataclass(frozen=True)
class Checkpoints:
    folder: Path
    tokenizer: PreTrainedTokenizerFast

    def target(self, kind: str) -> Path:
        folder = self.folder / kind
        if not folder.exists():
            make = checkpoints.llama if kind == "llama" else checkpoints.kimi_k2
            fields = {"vocab_size": len(self.tokenizer), "hidden_size": HIDDEN}
            make(folder, num_hidden_layers=NUM_LAYERS, **fields, **TARGETS[kind])
            self.tokenizer.save_pretrained(folder)
        return folder

    def draft(self, kind: str) -> Path:
        folder = self.folder / f"{kind}-draft"
        if not folder.exists():
            raw = {**DRAFTS[kind], "hidden_size": HIDDEN, "vocab_size": len(self.tokenizer)}
            raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": AUX}
            draft_bench.write_draft(folder, raw, draft_bench.draft_tensors(raw))
        return folder


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("paths"), byte_level_tokenizer)


@contextmanager
def tables(
    monkeypatch: pytest.MonkeyPatch, platform: Platform, names: tuple[str, ...]
) -> Iterator[list[OpTable]]:
    """Engines built inside run the best of `names`, as on `platform`, over tensors on the CPU."""
    registry = {op: _best(op, entries, names) for op, entries in OPS.items()}
    built: list[OpTable] = []

    def build(_: Platform, __: object, batch_invariant: bool) -> OpTable:
        built.append(OpTable(platform, registry, batch_invariant))
        return built[-1]

    with monkeypatch.context() as patch:
        patch.setattr(layer_context, "OpTable", build)
        # The platform's own memory is not there to be asked.
        patch.setattr(sketch, "total_memory_bytes", lambda _: 1 << 40)
        # And its kernels may expect each layer's blocks side by side.
        patch.setattr(paged, "lie_by_block", lambda _: platform.kind == "cpu")
        yield built


def _best(
    op: str, entries: tuple[Implementation, ...], names: tuple[str, ...]
) -> tuple[Implementation, ...]:
    """The entries of the first name that there are any of: none of them may refuse.

    Of products in Triton, which take turns with torch's, those of all names; and of routing for
    aiter, whose own adds no shared expert.
    """
    if op in PRODUCTS if "triton" in names else op == "moe_route":
        return tuple(entry for entry in entries if entry.name in names)
    for name in names:
        if chosen := tuple(entry for entry in entries if entry.name == name):
            return chosen
    raise AssertionError(f"no implementation among {', '.join(names)}")


def generate(
    made: Checkpoints,
    target: str,
    draft: str,
    prompts: list[list[int]],
    max_tokens: int,
    block_size: int = 16,
    **options: Any,
) -> tuple[list[list[int]], list[int]]:
    """Greedy tokens, and how many drafts were accepted at each place."""
    engine = engines.create_engine(
        made.target(target),
        method="eagle3",
        draft_model=str(made.draft(draft)),
        num_speculative_tokens=3,
        block_size=block_size,
        max_num_seqs=4,
        # So few that the third prompt is prefilled beside the first one's decode.
        max_num_batched_tokens=24,
        kv_cache_memory="32MB",
        device="cpu",
        **options,
    )
    sampling = engines.params("greedy", max_tokens=max_tokens)
    tokens = engines.generate(engine, sampling, prompts)
    stats = engine.engine.core.stats.spec_decode
    assert stats is not None
    assert stats.num_drafts > 0
    return tokens, list(stats.accepted_counts)


# Longer and shorter than a block, and one whose answer goes on in another block. The first and the
# second are decoded while the others are prefilled, then all three together. So many tokens that
# this is a step of equally many queries: the first has to be given all its drafts there, and no
# more are drafted than an answer has yet to get.
PROMPTS = [checkpoints.prompt(21), checkpoints.prompt(5, seed=1), checkpoints.prompt(30, seed=2)]
MAX_TOKENS = 7


@pytest.fixture(scope="module")
def expected(made: Checkpoints) -> Callable[..., tuple[list[list[int]], list[int]]]:
    """What torch says, once for each engine."""

    @cache
    def run(target: str, draft: str, count: int, max_tokens: int) -> Any:
        with (
            pytest.MonkeyPatch.context() as patch,
            tables(patch, cpu_platform(), ("torch",)),
        ):
            return generate(made, target, draft, PROMPTS[:count], max_tokens)

    return run


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("llama", "mha"),
        ("kimi", "mla"),
        pytest.param("llama", "mla", marks=pytest.mark.slow),
        pytest.param("kimi", "mha", marks=pytest.mark.slow),
    ],
)
def test_aiter(
    target: str,
    draft: str,
    made: Checkpoints,
    expected: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeAiter(torch.float32)
    platform = Platform("rocm", "gfx942", True)
    with probe.replaced(fake.library), tables(monkeypatch, platform, ("aiter", "torch")):
        out = generate(made, target, draft, PROMPTS, MAX_TOKENS)
    assert out == expected(target, draft, len(PROMPTS), MAX_TOKENS)
    assert fake.names >= COMMON | CALLED[target] | CALLED[draft]
    prefills = [call for call in fake.calls if call.name == "flash_attn_varlen_func"]
    lens = [call.arguments["cu_seqlens_q"].diff() for call in prefills]
    assert min(int(each.min()) for each in lens) > MAX_DECODE_QUERIES


def test_aiter_with_latents_in_8_bits(made: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gfx950, whose 8 bits are those of a CPU. One query and several, of target and draft."""
    of_engine = "kimi", "mla", PROMPTS, MAX_TOKENS
    fake = FakeAiter(torch.float32, arch="gfx950")
    platform = Platform("rocm", "gfx950", True)
    with probe.replaced(fake.library), tables(monkeypatch, platform, ("aiter", "torch")):
        out = generate(made, *of_engine, kv_cache_dtype="fp8")
    with tables(monkeypatch, cpu_platform(), ("torch",)):
        assert out == generate(made, *of_engine, kv_cache_dtype="fp8")
    calls = [call.arguments for call in fake.calls if call.name == "mla_decode_fwd"]
    assert {call["kv_buffer"].dtype for call in calls} == {torch.float8_e4m3fn}
    assert {call["max_seqlen_q"] for call in calls} >= {1, 4}
    listed = [call for call in fake.calls if call.name == "get_mla_metadata_v1"]
    assert 0 < len(listed) < len(calls)


def test_flash_mla(
    made: Checkpoints, expected: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeFlashMLA(torch.float32)
    platform = Platform("cuda", "sm90", True)
    with probe.replaced(fake.library), tables(monkeypatch, platform, ("flash_mla", "torch")):
        out = generate(made, "kimi", "mla", PROMPTS, MAX_TOKENS, block_size=64)
    assert out == expected("kimi", "mla", len(PROMPTS), MAX_TOKENS)
    # Target and draft, one query and several, and layers that share a plan.
    assert {call.q_shape[1] for call in fake.calls} >= {1, 4}
    assert {call.planned for call in fake.calls} == {True, False}


@pytest.mark.parametrize(("target", "draft"), [("llama", "mha"), ("kimi", "mla")])
def test_triton(
    target: str,
    draft: str,
    made: Checkpoints,
    expected: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    if not triton_is_interpreted():
        pytest.skip("where there is a GPU, Triton is not interpreted")
    with tables(monkeypatch, cpu_platform(), ("triton", "torch")) as built:
        out = generate(made, target, draft, PROMPTS[:1], 4)
    assert out == expected(target, draft, 1, 4)
    rows = [row.split()[:2] for row in built[0].describe().splitlines()]
    through_triton = {op for op, *name in rows if name == ["triton"]}
    assert through_triton >= THROUGH_TRITON[target] | THROUGH_TRITON[draft]


def test_triton_in_graphs(
    made: Checkpoints, expected: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is captured reads its inputs, chooses, verifies and drafts by Triton's kernels."""
    pytest.importorskip("triton")
    if not triton_is_interpreted():
        pytest.skip("where there is a GPU, Triton is not interpreted")
    monkeypatch.setattr(planned_graphs, "capture_backend", lambda _: ReexecuteBackend())
    with tables(monkeypatch, cpu_platform(), ("triton", "torch")) as built:
        out = generate(made, "llama", "mha", PROMPTS[:1], 6, cudagraph_capture_sizes=[1])
    assert out == expected("llama", "mha", 1, 6)
    rows = [row.split()[:2] for row in built[0].describe().splitlines()]
    assert ["take_inputs", "triton"] in rows
