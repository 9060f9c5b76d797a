"""Draft networks against the dense reference, over prefill and draft steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_bench import (
    DRAFT_VOCAB,
    HIDDEN,
    MHA,
    MLA,
    VOCAB,
    YARN,
    DraftBench,
    draft_tensors,
    load,
    write_draft,
)
from eagle3_reference import ReferenceDraft
from model_ops.batches import Part, attention_metadata

from atom.config import ModelOptions
from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.paged import PagedCache
from atom.model_loader.drafts.eagle3 import load_draft
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_loader.source import ModelSource
from atom.model_ops.attention.metadata import ModelInput
from atom.models.base import CausalLM

Rows = Callable[..., tuple[list[int], list[torch.Tensor]]]
Target = tuple[CausalLM, ModelSource]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FULL = {"draft_vocab_size": VOCAB}

MHA_VARIANTS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"num_key_value_heads": 2},
    "wide heads": {"head_dim": 16, "num_key_value_heads": 1},
    "odd head size": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 14},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "3.1 in eagle_config": {
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
            "fc_norm": True,
            "norm_output": True,
            "norm_before_residual": True,
        }
    },
    "biases": {"attention_bias": True, "mlp_bias": True},
    "window": {"sliding_window": 5},
    "no window": {"sliding_window": 0},
    "negative window": {"sliding_window": -1},
    "full vocabulary": FULL,
    "rope theta": {"rope_theta": 500.0},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn rope": {"rope_scaling": YARN},
    "yarn rope without mscale": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    },
    "llama3 rope": {"rope_scaling": LLAMA3},
}

MLA_VARIANTS: dict[str, dict[str, Any]] = {
    "mla": {},
    "plain queries": {"q_lora_rank": None},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "yarn rope": {"rope_scaling": YARN},
    "full vocabulary": FULL,
}


def check_against_reference(
    raw: dict[str, Any],
    folder: Path,
    target: Target,
    rows: Rows,
    tensors: dict[str, torch.Tensor] | None = None,
    written: dict[str, Any] | None = None,
) -> None:
    """Prefill rows and four draft steps equal the reference, alone and in a batch of two.

    Args:
        written: the config in another layout.
    """
    tensors = draft_tensors(raw) if tensors is None else tensors
    embed, head = target[0].token_embedding.weight, target[0].output_head.weight
    draft = load(write_draft(folder, written or raw, tensors), *target)
    reference = ReferenceDraft(raw, tensors, embed, head)
    bench = DraftBench(draft)
    size = raw.get("target_hidden_size", HIDDEN)
    tokens, aux = rows(11, size)
    other_tokens, other_aux = rows(5, size)
    fused = draft.fuse(tuple(aux))
    torch.testing.assert_close(fused, reference.fuse(aux), atol=1e-5, rtol=1e-5)
    both = bench.forward(
        {"a": (0, tokens, fused), "b": (0, other_tokens, draft.fuse(tuple(other_aux)))}
    )
    expected = {
        "a": reference.forward(torch.tensor(tokens), fused),
        "b": reference.forward(torch.tensor(other_tokens), reference.fuse(other_aux)),
    }
    torch.testing.assert_close(both, expected, atol=1e-4, rtol=1e-4)
    check_chains_equal(bench.propose("c", 0, tokens, fused, 4), reference.propose(tokens, fused, 4))


def check_chains_equal(
    ours: tuple[list[int], torch.Tensor], theirs: tuple[list[int], torch.Tensor]
) -> None:
    """Equal drafts, chosen from equal states."""
    assert ours[0] == theirs[0]
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MHA_VARIANTS)
def test_mha_draft_equals_reference(
    name: str, tmp_path: Path, llama_target: Target, random_rows: Rows
) -> None:
    check_against_reference({**MHA, **MHA_VARIANTS[name]}, tmp_path, llama_target, random_rows)


@pytest.mark.parametrize("stated", [True, False])
def test_the_layout_of_speculators(
    stated: bool, tmp_path: Path, llama_target: Target, random_rows: Rows
) -> None:
    """Whose residual is the norm, if the config does not say it."""
    flat = ("architectures", "eagle_config", "draft_vocab_size")
    written = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": MHA["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": {
            **{key: MHA[key] for key in MHA if key not in flat},
            "num_hidden_layers": 1,
        },
        **({"norm_before_residual": False} if stated else {}),
    }
    raw = {**MHA, "norm_before_residual": not stated}
    check_against_reference(raw, tmp_path, llama_target, random_rows, written=written)


@pytest.mark.parametrize("name", MLA_VARIANTS)
def test_mla_draft_equals_reference(
    name: str, tmp_path: Path, llama_target: Target, random_rows: Rows
) -> None:
    check_against_reference({**MLA, **MLA_VARIANTS[name]}, tmp_path, llama_target, random_rows)


@pytest.mark.parametrize("raw", [MHA, MLA], ids=["mha", "mla"])
def test_drafts_of_an_mla_target(
    raw: dict[str, Any], tmp_path: Path, mla_target: Target, random_rows: Rows
) -> None:
    check_against_reference(raw, tmp_path, mla_target, random_rows)


@pytest.mark.parametrize("embed", [False, True], ids=["shared embedding", "own embedding"])
@pytest.mark.parametrize("head", [False, True], ids=["shared head", "own head"])
def test_shared_and_own_embedding_and_head(
    embed: bool, head: bool, tmp_path: Path, llama_target: Target, random_rows: Rows
) -> None:
    raw = {**MHA, **FULL}
    tensors = draft_tensors(raw, embed, head)
    check_against_reference(raw, tmp_path, llama_target, random_rows, tensors)


def test_shared_head_of_a_tied_target(
    tmp_path: Path, tied_llama_target: Target, random_rows: Rows
) -> None:
    raw = {**MHA, **FULL}
    target = tied_llama_target[0]
    tensors = draft_tensors(raw, head=False)
    draft = load(write_draft(tmp_path, raw, tensors), *tied_llama_target)
    embed = target.token_embedding.weight
    tokens, aux = random_rows(9)
    fused = draft.fuse(tuple(aux))
    chain = DraftBench(draft).propose("s", 0, tokens, fused, 4)
    check_chains_equal(chain, ReferenceDraft(raw, tensors, embed, embed).propose(tokens, fused, 4))


def test_draft_narrower_than_its_target(
    tmp_path: Path, llama_target: Target, random_rows: Rows
) -> None:
    raw = {**MHA, "hidden_size": 16, "target_hidden_size": HIDDEN, "fc_norm": True}
    tensors = draft_tensors(raw, embed=True)
    check_against_reference(raw, tmp_path, llama_target, random_rows, tensors)


SPELLINGS = {
    "layers.0": lambda name: name.replace("midlayer.", "layers.0."),
    "below model": lambda name: name if name.startswith(("lm_head", "d2t")) else f"model.{name}",
    "model.layers.0": lambda name: (
        name
        if name.startswith(("lm_head", "d2t"))
        else f"model.{name.replace('midlayer.', 'layers.0.')}"
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("raw", [MHA, MLA], ids=["mha", "mla"])
def test_other_spellings_load_the_same_draft(
    raw: dict[str, Any], spelling: str, tmp_path: Path, llama_target: Target
) -> None:
    raw = {**raw, "fc_norm": True}
    tensors = draft_tensors(raw, embed=True)
    renamed = {SPELLINGS[spelling](name): tensor for name, tensor in tensors.items()}
    assert set(renamed) != set(tensors)
    one = load(write_draft(tmp_path / "one", raw, tensors), *llama_target)
    two = load(write_draft(tmp_path / "two", raw, renamed), *llama_target)
    torch.testing.assert_close(two.state_dict(), one.state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize("sizes", [[3], [1], [5, 1, 2]], ids=str)
@pytest.mark.parametrize("raw", [{**MHA, "sliding_window": 6}, MHA, MLA], ids=["win", "mha", "mla"])
def test_chunked_prefill_equals_whole(
    raw: dict[str, Any], sizes: list[int], tmp_path: Path, llama_target: Target, random_rows: Rows
) -> None:
    draft = load(write_draft(tmp_path, raw, draft_tensors(raw)), *llama_target)
    bench = DraftBench(draft)
    tokens, aux = random_rows(13)
    fused = draft.fuse(tuple(aux))
    whole = bench.forward({"whole": (0, tokens, fused)})["whole"]
    pieces, start = [], 0
    while start < len(tokens):
        end = start + sizes[min(len(pieces), len(sizes) - 1)]
        pieces.append(bench.forward({"cut": (start, tokens[start:end], fused[start:end])})["cut"])
        start = end
    cut = tuple(torch.cat(columns) for columns in zip(*pieces, strict=True))
    torch.testing.assert_close(cut, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("raw", [MHA, MLA], ids=["mha", "mla"])
def test_rejected_rows_leave_no_trace(
    raw: dict[str, Any], tmp_path: Path, llama_target: Target, random_rows: Rows
) -> None:
    """Draft steps write past the verified rows; the next pass overwrites them."""
    draft = load(write_draft(tmp_path, raw, draft_tensors(raw)), *llama_target)
    bench = DraftBench(draft)
    tokens, aux = random_rows(12)
    fused = draft.fuse(tuple(aux))
    clean = bench.propose("clean", 0, tokens, fused, 4)
    for start, end in ((0, 5), (5, 7), (7, 12)):
        chain = bench.propose("stepped", start, tokens[start:end], fused[start:end], 4)
    check_chains_equal(chain, clean)


def test_draft_of_a_real_targets_hidden_states(
    tmp_path: Path, llama_target: Target, random_rows: Rows
) -> None:
    """The resolved ids name what the target returns, in the order that `fc` wants."""
    model, source = llama_target
    output_ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}}
    boundary_ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}}
    tensors = draft_tensors(MHA)
    one = load(write_draft(tmp_path / "o", {**MHA, **output_ids}, tensors), model, source)
    two = load(write_draft(tmp_path / "b", {**MHA, **boundary_ids}, tensors), model, source)
    assert one.aux_layer_ids == two.aux_layer_ids == (2, 5, 7)
    cache = PagedCache(attention_layers(model), 4, torch.float32, torch.device("cpu"))
    cache.allocate_kv_cache_tensors(4)
    bind_kv_caches(model, [cache])
    model.set_aux_layer_ids(one.aux_layer_ids)
    tokens, _ = random_rows(6)
    metadata = attention_metadata([Part(len(tokens), 0, [2, 0])], 4, torch.device("cpu"))
    with torch.inference_mode():
        output = model(ModelInput(torch.tensor(tokens), torch.arange(len(tokens)), metadata))
    model.set_aux_layer_ids(())
    reference = ReferenceDraft(
        {**MHA, **output_ids}, tensors, model.token_embedding.weight, model.output_head.weight
    )
    fused = one.fuse(output.aux_hidden_states)
    expected = reference.fuse(list(output.aux_hidden_states))
    torch.testing.assert_close(fused, expected, atol=1e-4, rtol=1e-4)
    chain = DraftBench(one).propose("s", 0, [*tokens[1:], 7], fused, 3)
    check_chains_equal(chain, reference.propose([*tokens[1:], 7], expected, 3))


def test_logits_cover_the_draft_vocabulary(tmp_path: Path, llama_target: Target) -> None:
    tensors = draft_tensors(MHA)
    draft = load(write_draft(tmp_path, MHA, tensors), *llama_target)
    post_norm = torch.randn(3, HIDDEN)
    logits = draft.compute_logits(post_norm)
    assert logits.shape == (3, DRAFT_VOCAB)
    torch.testing.assert_close(logits, post_norm @ tensors["lm_head.weight"].T)
    known = draft.to_target_ids(torch.arange(DRAFT_VOCAB))
    assert known.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()


def test_draft_runs_in_the_targets_type(tmp_path: Path, llama_target: Target) -> None:
    from atom.model_ops.layer_context import LayerContext
    from atom.platform import cpu_platform

    tensors = {k: v.half() if v.is_floating_point() else v for k, v in draft_tensors(MHA).items()}
    context = LayerContext.create(torch.bfloat16, 128, cpu_platform())
    folder = str(write_draft(tmp_path, MHA, tensors))
    draft = load_draft(
        folder, DraftTarget(*llama_target, context, ModelOptions(), quantization="none")
    )
    assert draft.fc.weight.dtype == torch.bfloat16
    assert torch.equal(draft.fc.weight, tensors["fc.weight"].bfloat16())
    assert draft.d2t is not None
    assert draft.d2t.dtype == torch.int64
