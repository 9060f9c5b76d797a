"""A GGUF file of the random Qwen3-Next of `_random_models.py`, laid out as llama.cpp's converter
does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from _random_models import SHAPES
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    get_tensor_name_map,
)
from gguf.quants import quantize

from atom.model_loader.locate import embedded_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NAME = "qwen3next"
_SHAPE = "qwen3-next-200m"
_KIND, _KIND_OF_FILE = GGMLQuantizationType.Q8_0, 7
_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "moe_intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
# What llama.cpp keeps as it is besides vectors.
_PLAIN = ("ffn_gate_inp", "ssm_conv1d")


def write_hybrid_gguf(path: Path) -> None:
    """Its matrices as Q8_0, with the embedded model's tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = SHAPES[_SHAPE]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    temporary = path.with_suffix(".part")
    writer = GGUFWriter(temporary, _NAME)
    _add_keys(writer, config)
    copy_fields(GGUFReader(embedded_model()), writer, lambda key: key.startswith("tokenizer."))
    names = get_tensor_name_map(MODEL_ARCH.QWEN3NEXT, config.num_hidden_layers)
    for module, tensor in model.state_dict().items():
        for piece, values in _pieces(module, tensor.numpy(), config):
            name = piece
            if not piece.startswith("blk."):
                name = names.get_name(piece, try_suffixes=(".weight", ".bias"))
            is_plain = values.ndim == 1 or any(part in name for part in _PLAIN)
            kind = GGMLQuantizationType.F32 if is_plain else _KIND
            raw = quantize(np.ascontiguousarray(values), kind)
            writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.rename(path)


def copy_fields(reader: GGUFReader, writer: GGUFWriter, wants: Callable[[str], bool]) -> None:
    """Those whose names are wanted."""
    for key, value in reader.fields.items():
        if wants(key):
            inner = value.types[-1] if value.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, value.contents(), value.types[0], sub_type=inner)


def _add_keys(writer: GGUFWriter, config: PretrainedConfig) -> None:
    for field, key in _KEYS.items():
        writer.add_uint32(f"{_NAME}.{key}", getattr(config, field))
    writer.add_uint32(f"{_NAME}.expert_feed_forward_length", config.moe_intermediate_size)
    writer.add_uint32(f"{_NAME}.attention.key_length", config.head_dim)
    writer.add_uint32(f"{_NAME}.attention.value_length", config.head_dim)
    writer.add_float32(f"{_NAME}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    rope = config.rope_parameters
    rotated = int(config.head_dim * rope["partial_rotary_factor"])
    writer.add_uint32(f"{_NAME}.rope.dimension_count", rotated)
    writer.add_float32(f"{_NAME}.rope.freq_base", rope["rope_theta"])
    writer.add_uint32(f"{_NAME}.full_attention_interval", 4)
    inner = config.linear_value_head_dim * config.linear_num_value_heads
    writer.add_uint32(f"{_NAME}.ssm.inner_size", inner)
    writer.add_file_type(_KIND_OF_FILE)


def _pieces(
    module: str, values: np.ndarray, config: PretrainedConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """The file's tensors of one of a checkpoint."""
    if module == "lm_head.weight" and config.tie_word_embeddings:
        return
    stem, _, part = module.removesuffix(".weight").rpartition(".")
    if part == "in_proj_qkvz":
        # By head of keys in the checkpoint, queries of all heads first in the file.
        size, heads = config.linear_key_head_dim, config.linear_num_key_heads
        by_head = values.reshape(heads, -1, values.shape[1])
        width = by_head.shape[1] // 2 - size
        cuts = np.split(by_head, [size, 2 * size, 2 * size + width], axis=1)
        q, k, v, z = (cut.reshape(-1, values.shape[1]) for cut in cuts)
        layer = module.split(".")[2]
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate((q, k, v))
        yield f"blk.{layer}.attn_gate.weight", z
    elif part == "conv1d":
        yield module, values.reshape(len(values), -1)
    elif part == "A_log":
        yield module, -np.exp(values)
    elif part == "dt_bias":
        yield f"{stem}.dt_proj.bias", values
    elif part == "shared_expert_gate":
        yield module, values[0]
    elif part == "gate_up_proj" and "experts" in stem:
        gate, up = np.split(values, 2, axis=1)
        yield f"{stem}.gate_proj.weight", gate
        yield f"{stem}.up_proj.weight", up
    elif part == "down_proj" and stem.endswith(".experts"):
        yield f"{module}.weight", values
    elif module.endswith("norm.weight") and ".linear_attn." not in module:
        yield module, values + 1
    else:
        yield module, values
