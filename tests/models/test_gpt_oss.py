"""gpt-oss as published: experts in MXFP4, against the numbers that transformers makes of them."""

from __future__ import annotations

import pytest
import torch
from models.checkpoints import Checkpoint, edit_config, prompt
from models.families import write_family
from models.harness import ModelBench
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from atom.model_ops.kernels.native.build import native_build

TOLERANCE = 1e-4
LENGTH = 30
# Groups of 32 inputs, for two ranks.
SIZES = {"hidden_size": 64, "intermediate_size": 64}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With blocks and scales instead of the experts' numbers, which the reference has."""
    checkpoint = write_family("gpt_oss", tmp_path_factory.mktemp("gpt_oss"), **SIZES)
    file = checkpoint.folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in checkpoint.reference.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = parameter.shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, shape, generator=generator, dtype=torch.uint8)
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert values.shape == parameter.shape
        parameter.data.copy_(values)
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, file, metadata={"format": "pt"})
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    edit_config(checkpoint.folder, quantization_config=config)
    return checkpoint


def test_mxfp4_experts(published: Checkpoint) -> None:
    bench, tokens = ModelBench(published.folder), prompt(LENGTH)
    if native_build().reason is None:
        assert not bench.model.model.layers[0].mlp.experts.dequantised_bytes
    expected = published.logits(tokens)
    for name, sizes in {"whole": [LENGTH], "chunked": [11, 7, 1]}.items():
        found = bench.run(tokens, sizes, name)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_mxfp4_experts_on_two_ranks(published: Checkpoint) -> None:
    tokens = prompt(LENGTH)
    found = run_ranks(2, lambda g: ModelBench(published.folder, group=g).run(tokens, [23, 1]))
    torch.testing.assert_close(found[0], published.logits(tokens), atol=TOLERANCE, rtol=0)


def test_sinks_take_part(published: Checkpoint) -> None:
    """The logits are others without them."""
    bench, tokens = ModelBench(published.folder), prompt(LENGTH)
    for layer in bench.model.model.layers:
        layer.self_attn.attn.sinks.weight.data.fill_(-1e4)
    found = bench.run(tokens, [LENGTH])
    assert (found - published.logits(tokens)).abs().max() > 100 * TOLERANCE
