"""Whole models in FP8 whose norms quantise what products read: the same bits as one by one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.harness import ModelBench, load_model
from quantised.packing import quantised
from quantised.quark_schemes import FP8_CHANNEL, FP8_TOKEN, pack_ptpc, quark
from quantised.test_fp8 import BLOCKS, pack_blocks
from spec_decode.draft_bench import MHA, DraftBench, draft_tensors, write_draft

from atom.config import ModelOptions
from atom.environment import triton_is_interpreted
from atom.model_loader.drafts.eagle3 import load_draft
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_loader.source import resolve_model
from atom.model_ops.layer_context import LayerContext
from atom.platform import cpu_platform

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not triton_is_interpreted(), reason="interpreted on a CPU")

HIDDEN = 192
NORMS = ("RMS_NORM", "ADD_RMS_NORM", "RMS_NORM_PAIR")
QUANTISING = ("add_rms_norm_quantise", "rms_norm_pair_quantise")
AUX = (0, 2, 3)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Norms and quantised products run as interpreted kernels; those that quantise are counted."""
    from atom.model_ops.kernels.triton.products import norm_quantise

    counted: Counter[str] = Counter()
    for op in (*NORMS, "QUANT_LINEAR"):
        monkeypatch.setenv(f"ATOM_OP_{op}", "triton")
    for op in QUANTISING:
        kernel = getattr(norm_quantise, op)

        def count(*args: Any, op: str = op, kernel: Any = kernel) -> Any:
            counted[op] += 1
            return kernel(*args)

        monkeypatch.setattr(norm_quantise, op, count)
    return counted


def quantise_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for op in QUANTISING:
        monkeypatch.setenv(f"ATOM_OP_{op.upper()}", name)


def outputs(folder: Path) -> tuple[torch.Tensor, ...]:
    """Logits of a prompt and one token after it, and the last step's hidden states."""
    bench = ModelBench(folder, dtype=torch.bfloat16)
    bench.model.set_aux_layer_ids(AUX)
    logits = bench.run(checkpoints.prompt(4), [3, 1])
    assert bench.output is not None
    return logits, *bench.output.aux_hidden_states


@pytest.mark.parametrize(
    ("kind", "add", "pair"),
    [("llama", 5, 0), ("kimi", 3, 3)],
)
def test_targets(
    kind: str,
    add: int,
    pair: int,
    calls: Counter[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All norms but the first one, which has no residual, and those of routers and of experts."""
    if kind == "llama":
        plain = checkpoints.llama(tmp_path / "plain", hidden_size=HIDDEN, intermediate_size=320)
    else:
        plain = checkpoints.kimi_k2(tmp_path / "plain", hidden_size=HIDDEN, q_lora_rank=72)
    folder, _ = quantised(plain.folder, BLOCKS, pack_blocks())
    quantise_with("torch", monkeypatch)
    expected = outputs(folder)
    assert not calls
    assert expected[0].std() > 0.01
    quantise_with("triton", monkeypatch)
    for found, wanted in zip(outputs(folder), expected, strict=True):
        assert torch.equal(found, wanted)
    steps = 2
    assert calls == Counter(
        {op: steps * n for op, n in zip(QUANTISING, (add, pair), strict=True) if n}
    )


def test_drafts(calls: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Eagle3 draft's MLP; its attention reads two norms side by side."""
    raw = {**MHA, "hidden_size": HIDDEN}
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    config = quark(FP8_CHANNEL, FP8_TOKEN, exclude=["fc", "lm_head"])
    stored = {}
    for name, tensor in draft_tensors(raw).items():
        module = name.removesuffix(".weight")
        if tensor.dim() == 1 or module in config["exclude"]:
            stored[name] = tensor
        else:
            packed = pack_ptpc(*tensor.shape).tensors
            stored |= {f"{module}.{part}": value.contiguous() for part, value in packed.items()}
    draft = write_draft(tmp_path / "draft", {**raw, "quantization_config": config}, stored)
    folder = checkpoints.llama(tmp_path / "target", hidden_size=HIDDEN).folder
    source, target = resolve_model(ModelOptions(model=str(folder))), load_model(folder, 128)
    generator = torch.Generator().manual_seed(3)
    aux = tuple(torch.randn(3, HIDDEN, generator=generator) for _ in AUX)
    found = []
    for name in ("torch", "triton"):
        quantise_with(name, monkeypatch)
        context = LayerContext.create(torch.float32, 128, cpu_platform())
        loaded = load_draft(str(draft), DraftTarget(target, source, context, ModelOptions()))
        rows = 0, checkpoints.prompt(3), loaded.fuse(aux)
        post, _ = DraftBench(loaded).forward({"a": rows})["a"]
        found.append(post)
    assert torch.equal(*found)
    assert found[0].std() > 0.1
    assert calls == {"add_rms_norm_quantise": 1}
