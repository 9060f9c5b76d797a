"""Every causal language model of the installed transformers runs equal, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.checkpoints import DENSE, prompt
from models.harness import ModelBench
from models.transformers_families import EXPERTS, FAMILIES, MLA, save_random
from models.transformers_outcomes import OUTCOMES, VERSION
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from atom.config import ConfigError, ModelOptions
from atom.model_loader.errors import WeightError
from atom.model_loader.source import resolve_model
from atom.models.transformers.check import small_copy

LENGTH = 30
_WINDOWS = {
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Sizes that fit, of types that take other fields than most.
SIZES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        **_WINDOWS,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "dbrx": {
        "d_model": 48,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 48,
            "ffn_hidden_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 30,
        },
    },
    "gemma3n_text": {
        **_WINDOWS,
        "head_dim": 12,
        "intermediate_size": [64] * 3,
        "activation_sparsity_pattern": [0.0] * 3,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "laurel_rank": 4,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {
        **MLA,
        "head_dim": 8,
        "num_layers": 2,
        "num_hidden_layers": 4,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "ministral": {**_WINDOWS, "head_dim": 12},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "crop_size": 28,
        },
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "nemo_conv_channels": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_final_size": 16,
        },
    },
    "reformer": {
        "is_decoder": True,
        "attention_head_size": 12,
        "feed_forward_size": 32,
        "axial_pos_embds_dim": (16, 32),
        "axial_pos_shape": (8, 16),
        "attn_layers": ["local", "lsh", "local"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "xmod": {"default_language": "en_XX", "is_decoder": True},
}
# Equal within this multiple of the logits' standard deviation.
TOLERANCE = 1e-3


def tiny(model_type: str) -> PreTrainedModel | None:
    """A small model of a type; None if none of the ways to make one works."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    make = CONFIG_MAPPING[model_type]
    own = SIZES.get(model_type) or FAMILIES.get(model_type, {})
    ways = [
        lambda: make(**{**DENSE, **EXPERTS, **own}),
        lambda: make(**{**DENSE, **EXPERTS, **MLA}),
        lambda: small_copy(make()),
    ]
    for way in ways:
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in getattr(transformers, name)(way()).parameters())
            if size > 1 << 26:
                continue
            model: PreTrainedModel = getattr(transformers, name)(way()).eval()
            ids = torch.tensor([prompt(LENGTH)])
            with torch.inference_mode():
                model(input_ids=ids, use_cache=False)
        except Exception:  # whatever their code raises for sizes that do not fit
            continue
        return model
    return None


def outcome(model_type: str, folder: Path) -> str:
    """`equal` or `refused`, or `untried` where transformers makes or saves no small model, and its
    default configuration alone is no reason to refuse it.

    Raises:
        AssertionError: for a refusal without its name, and for other logits.
    """
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    model = tiny(model_type)
    try:
        checkpoint = None if model is None else save_random(model, folder)
    except (NotImplementedError, RuntimeError, ValueError):
        checkpoint = None
    if checkpoint is None:
        return by_default(model_type, folder)
    refused: Exception | None = None
    try:
        bench = ModelBench(folder, model_impl="transformers")
    except (ConfigError, WeightError) as error:
        refused = error
    if refused is not None:
        assert (
            isinstance(refused, WeightError) or name in str(refused) or model_type in str(refused)
        )
        return "refused"
    tokens = prompt(LENGTH)
    expected = checkpoint.logits(tokens)
    limit = TOLERANCE * expected.std().item()
    for sizes in ([LENGTH], [11, 7, 1]):
        found = bench.run(tokens, sizes, str(sizes))
        torch.testing.assert_close(found, expected, atol=limit, rtol=0)
    return "equal"


def by_default(model_type: str, folder: Path) -> str:
    """`refused` if the default configuration is, for what the model is and not for its sizes."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    try:
        config = CONFIG_MAPPING[model_type](**SIZES.get(model_type, {}))
    except Exception:  # whatever their code raises for its own defaults
        return "untried"
    raw = config.to_dict() | {"architectures": [name]}
    (folder / "config.json").write_text(json.dumps(raw, default=str))
    with pytest.raises(ConfigError) as caught:
        resolve_model(ModelOptions(str(folder), load_format="dummy", model_impl="transformers"))
    said = str(caught.value)
    assert any(words in said for words in (name, f"of type {model_type}", f"({model_type}"))
    about_sizes = "cannot build it", "too many to try", "cannot be tried"
    return "untried" if any(words in said for words in about_sizes) else "refused"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_it_is_equal_or_refused_by_its_name(model_type: str, tmp_path: Path) -> None:
    """As recorded, where the version of transformers is that of the record."""
    found = outcome(model_type, tmp_path)
    if transformers.__version__ == VERSION:
        assert OUTCOMES[model_type] == found
