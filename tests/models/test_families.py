"""Which checkpoints are taken, which tensors they must bring, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.harness import ModelBench, load_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PretrainedConfig

from atom.config import ConfigError
from atom.kv_cache.builders import attention_layers
from atom.model_loader.errors import WeightError
from atom.model_ops.attention.mla import MLAAttention
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.moe import FusedMoE
from atom.models.config.hf_configs import built_in_config
from atom.models.llama import LlamaMLP
from atom.models.moe.deepseek_v2 import DeepseekV3ForCausalLM, DeepseekV3MoE, attention_scale
from atom.models.registry import create_model
from atom.models.vision_language.kimi_k25 import KimiK25ForConditionalGeneration
from atom.platform import cpu_platform


def build(config: PretrainedConfig) -> nn.Module:
    return create_model(config, LayerContext.create(torch.float32, 32, cpu_platform()))


def edit_tensors(folder: Path, changed: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a checkpoint."""
    file = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor | None] = {**load_file(file), **changed}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, file, metadata={"format": "pt"})


def test_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    checkpoints.kimi_k2(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "kimi_k2"
    assert type(load_model(tmp_path, 32)) is DeepseekV3ForCausalLM


def test_a_published_k2_config_is_read_as_it_means() -> None:
    published = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 131072,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.827,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }
    config = built_in_config(published)
    routing = DeepseekV3MoE.routing(config)
    assert (routing.num_experts, routing.top_k, routing.num_groups) == (384, 8, 1)
    assert routing.scaling == 2.827
    # 0.1 * ln(32) + 1, squared, over the square root of 192.
    assert attention_scale(config) == pytest.approx(1.813254 / 192**0.5, rel=1e-5)


def test_k25_skips_vision_weights_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.kimi_k25(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in names)
    assert any(name.startswith("mm_projector.") for name in names)
    with caplog.at_level(logging.INFO, logger="atom"):
        model = load_model(tmp_path, 32, limit_mm_per_prompt={"image": 0})
    assert type(model) is KimiK25ForConditionalGeneration
    assert sum("vision weights are skipped" in record.message for record in caplog.records) == 1


def test_dense_layers_come_first(tmp_path: Path) -> None:
    checkpoints.deepseek_v3(tmp_path, first_k_dense_replace=2)
    model = load_model(tmp_path, 32)
    kinds = [type(layer.mlp) for layer in model.get_submodule("model.layers").children()]
    assert kinds == [LlamaMLP, LlamaMLP, DeepseekV3MoE]
    assert all(isinstance(layer, MLAAttention) for layer in attention_layers(model).values())


class TestTensors:
    EXPERTS = "model.layers.1.mlp.experts"

    def test_every_shard_of_every_expert_must_arrive(self, tmp_path: Path) -> None:
        checkpoints.deepseek_v3(tmp_path)
        edit_tensors(
            tmp_path,
            {
                f"{self.EXPERTS}.3.up_proj.weight": None,
                f"{self.EXPERTS}.5.down_proj.weight": None,
            },
        )
        with pytest.raises(WeightError) as caught:
            load_model(tmp_path, 32)
        assert f"{self.EXPERTS}.w13_weight (lacks 3.up_proj)" in str(caught.value)
        assert f"{self.EXPERTS}.w2_weight (lacks 5.down_proj)" in str(caught.value)

    def test_an_expert_too_many_is_unexpected(self, tmp_path: Path) -> None:
        checkpoints.deepseek_v3(tmp_path)
        edit_tensors(tmp_path, {f"{self.EXPERTS}.8.up_proj.weight": torch.zeros(24, 48)})
        with pytest.raises(WeightError, match=r"unexpected.*experts\.8\.up_proj"):
            load_model(tmp_path, 32)

    def test_a_wrong_shape_names_the_tensor(self, tmp_path: Path) -> None:
        checkpoints.deepseek_v3(tmp_path)
        edit_tensors(tmp_path, {f"{self.EXPERTS}.2.down_proj.weight": torch.zeros(48, 23)})
        with pytest.raises(WeightError, match=r"experts\.2\.down_proj.*\[48, 23\]"):
            load_model(tmp_path, 32)

    def test_experts_may_come_in_one_tensor(self, tmp_path: Path) -> None:
        checkpoint = checkpoints.deepseek_v3(tmp_path)
        stacked: dict[str, torch.Tensor | None] = dict.fromkeys(
            name for name in load_file(tmp_path / "model.safetensors") if ".experts." in name
        )
        for layer in (1, 2):
            experts = checkpoint.reference.get_submodule(f"model.layers.{layer}.mlp.experts")
            for name, tensor in experts.named_parameters():
                stacked[f"model.layers.{layer}.mlp.experts.{name}"] = tensor.detach().clone()
        edit_tensors(tmp_path, stacked)
        tokens = checkpoints.prompt(12)
        found = ModelBench(tmp_path).run(tokens, [12])
        torch.testing.assert_close(found, checkpoint.logits(tokens), atol=1e-4, rtol=0)

    def test_layers_of_a_multi_token_drafter_are_ignored(self, tmp_path: Path) -> None:
        checkpoints.deepseek_v3(tmp_path)  # its config announces one such layer
        edit_tensors(tmp_path, {"model.layers.3.eh_proj.weight": torch.zeros(2, 2)})
        load_model(tmp_path, 32)
        edit_tensors(tmp_path, {"model.layers.4.eh_proj.weight": torch.zeros(2, 2)})
        with pytest.raises(WeightError, match=r"layers\.4\.eh_proj"):
            load_model(tmp_path, 32)

    def test_the_correction_bias_stays_float32(self, tmp_path: Path) -> None:
        checkpoint = checkpoints.deepseek_v3(tmp_path)
        model = load_model(tmp_path, 32, torch.bfloat16)
        name = "model.layers.1.mlp.gate.e_score_correction_bias"
        found = model.get_parameter(name)
        assert torch.equal(found, checkpoint.reference.get_buffer(name))
        experts = model.get_submodule(self.EXPERTS)
        assert isinstance(experts, FusedMoE)
        assert experts.w13_weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (checkpoints.deepseek_v3, {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        (checkpoints.deepseek_v3, {"topk_method": "greedy"}, "supported: 'noaux_tc'"),
        (checkpoints.deepseek_v3, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (checkpoints.deepseek_v3, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (checkpoints.deepseek_v3, {"n_group": 3}, "8 experts do not split into n_group=3"),
        (checkpoints.deepseek_v2, {"norm_topk_prob": True}, "norm_topk_prob=True"),
        (checkpoints.deepseek_v2, {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        (checkpoints.llama, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (checkpoints.llama, {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not"),
        (checkpoints.llama, {"architectures": []}, r"\(none given\) is not supported"),
    ],
)
def test_what_would_change_the_maths_is_refused(
    make: Any, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = make(tmp_path).reference.config
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises((ConfigError, ValueError), match=message):
        build(config)
