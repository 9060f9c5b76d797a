"""Writing small GGUF files for tests, with the `gguf` package's own writer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers import PreTrainedTokenizerBase as Tokenizer

# Where a block has its float16 scales.
_SCALES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}


def tiny_model(architecture: str = "llama", **overrides: Any) -> torch.nn.Module:
    """A random float32 model of two layers; every matrix has rows of a multiple of 32."""
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[architecture]
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "initializer_range": 0.2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config_class(**(sizes | overrides))).to(torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # ones and zeros would hide a swap
                parameter.data.uniform_(0.5, 1.5)
            assert parameter.dtype == torch.float32, name
    return model


def metadata_of(model: torch.nn.Module) -> dict[str, Any]:
    """What a converter writes about such a model."""
    config = model.config
    own = config.model_type
    return {
        f"{own}.block_count": config.num_hidden_layers,
        f"{own}.context_length": config.max_position_embeddings,
        f"{own}.embedding_length": config.hidden_size,
        f"{own}.feed_forward_length": config.intermediate_size,
        f"{own}.attention.head_count": config.num_attention_heads,
        f"{own}.attention.head_count_kv": config.num_key_value_heads,
        f"{own}.attention.key_length": config.head_dim,
        f"{own}.attention.value_length": config.head_dim,
        f"{own}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{own}.rope.freq_base": config.rope_parameters["rope_theta"],
        f"{own}.vocab_size": config.vocab_size,
    }


def byte_level_metadata(tokenizer: Tokenizer, pre: str = "gpt-2") -> dict[str, Any]:
    """A `tokenizers` BPE tokenizer as GGUF metadata."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = {t["content"] for t in content["added_tokens"] if t["special"]}
    added = {t["content"] for t in content["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [
            3 if token in special else 4 if token in added else 1 for token, _ in vocabulary
        ],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def random_blocks(
    kind: GGMLQuantizationType, rows: int, columns: int, largest: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Random blocks of a matrix, uint8 [rows, bytes], with scales of at most `largest`."""
    elements, num_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows * columns // elements, num_bytes), np.uint8)
    if kind.name == "MXFP4":  # of exponents that leave numbers within `largest`
        blocks[:, 0] = random.integers(90, 124, len(blocks)) + round(np.log2(largest))
    for start in _SCALES[kind.name]:
        scale = random.uniform(-largest, largest, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def write_gguf(
    path: Path,
    model: torch.nn.Module,
    metadata: dict[str, Any],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra_tensors: dict[str, np.ndarray] | None = None,
    random_kinds: Mapping[str, GGMLQuantizationType] = MappingProxyType({}),
) -> Path:
    """Write the model as llama.cpp's converter does: matrices as `kind`, vectors as float32.

    Args:
        random_kinds: types of matrices that are random blocks instead, by parts of GGUF's names;
            the package does not quantise to all types.
    """
    writer = GGUFWriter(path, model.config.model_type)
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key, value)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = gguf_order(name, tensor.numpy(), model)
        stored = kind if values.ndim > 1 else GGMLQuantizationType.F32
        parts = gguf_name(name).split(".")
        if chosen := next((random_kinds[part] for part in parts if part in random_kinds), None):
            blocks = random_blocks(chosen, *values.shape, largest=1e-3, seed=len(name))
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=chosen)
            continue
        writer.add_tensor(gguf_name(name), quantize(values, stored), raw_dtype=stored)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"


def gguf_order(name: str, values: np.ndarray, model: torch.nn.Module) -> np.ndarray:
    """Llama's queries and keys are stored for a rotation of neighbouring elements."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if config.model_type != "llama" or part not in heads:
        return np.ascontiguousarray(values)
    shape = (heads[part], 2, config.head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(values.reshape(shape).swapaxes(1, 2).reshape(values.shape))


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
        list: GGUFValueType.ARRAY,
    }
    writer.add_key_value(key, value, kinds[type(value)])
