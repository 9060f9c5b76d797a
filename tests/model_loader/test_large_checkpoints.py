"""Checkpoints of many tensors and of many bytes, and refusals before weights are read."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from models import checkpoints
from quantised.packing import Packed, quantised
from safetensors.torch import load_file, save_file
from work import count_lines

from atom.config import ConfigError, ModelOptions
from atom.model_loader import checkpoint as checkpoint_module
from atom.model_loader import weights as weights_module
from atom.model_loader.checkpoint import list_tensors
from atom.model_loader.sketch import check_fit
from atom.model_loader.source import resolve_model
from atom.model_loader.weights import WeightError
from atom.model_ops.layer_context import LayerContext
from atom.models.registry import create_model

TENSOR_SCALES = {"quant_method": "fp8"}


def pack(module: str, out: int, columns: int) -> Packed | None:
    if module.endswith(("lm_head", "mlp.gate")):
        return None
    codes = torch.ones(out, columns, dtype=torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": torch.tensor(0.01)}
    return Packed(tensors, torch.full((out, columns), 0.01, dtype=torch.float64))


def check(folder: Path) -> None:
    """What a start does before it allocates memory."""
    source = resolve_model(ModelOptions(model=str(folder)))
    context = replace(LayerContext.create(torch.float32, 64), quant=source.quantization)
    check_fit(partial(create_model, source.hf_config), list_tensors(folder), source, context)


def test_headers_are_read_once_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, file)
    assert [tensor.shape for tensor in list_tensors(tmp_path)] == [(2,)]
    original = checkpoint_module.read_header
    monkeypatch.setattr(checkpoint_module, "read_header", None)
    assert [tensor.shape for tensor in list_tensors(tmp_path)] == [(2,)]
    monkeypatch.setattr(checkpoint_module, "read_header", original)
    save_file({"a": torch.ones(3)}, file)
    assert [tensor.shape for tensor in list_tensors(tmp_path)] == [(3,)]


def rename_dtype(folder: Path, name: str, dtype: str) -> None:
    """State another dtype of the same size in the header."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header[name]["dtype"] = dtype
    new = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(new)) + new + content[8 + size :])


def test_refused_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_copy_group", None)
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1).folder
    folder, _ = quantised(plain, TENSOR_SCALES, pack)
    check(folder)
    file = folder / "model.safetensors"
    good, content = load_file(file), file.read_bytes()
    layer = "model.layers.0.mlp.down_proj"

    def refuse(match: str) -> None:
        with pytest.raises(WeightError, match=match):
            check(folder)

    rename_dtype(folder, f"{layer}.weight", "I8")
    refuse(r"down_proj\.weight .*holds torch\.int8, the model wants torch\.float8_e4m3fn")
    file.write_bytes(content)
    rename_dtype(folder, f"{layer}.weight", "F8_E5M2")
    refuse(r"down_proj\.weight is stored as F8_E5M2, which is not supported")
    file.write_bytes(content[:-1])
    refuse("damaged or incomplete")
    save_file({**good, f"{layer}.weight_scale": torch.ones(48)}, file)
    refuse(r"weight_scale \[48\]: the checkpoint holds shape \[48\], the model wants \[\]")
    save_file({n: t for n, t in good.items() if n != f"{layer}.weight_scale"}, file)
    refuse(r"missing tensors \(1\): .*down_proj\.weight_scale")
    name = "model.layers.0.self_attn.k_scale"
    save_file({**good, name: torch.ones(2)}, file)
    refuse(r"k_scale \[2\]: the checkpoint holds KV cache scales of shape \[2\]")
    blocks = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    checkpoints.edit_config(folder, quantization_config=blocks)
    with pytest.raises(ConfigError, match="weight_block_size"):
        check(folder)


def many_experts(folder: Path, num_experts: int, num_layers: int, num_files: int) -> int:
    """A Kimi checkpoint of one small expert, repeated -> the number of its tensors."""
    plain = checkpoints.kimi_k2(
        folder.with_name("plain"), num_hidden_layers=2, hidden_size=16, moe_intermediate_size=8
    ).folder
    small, _ = quantised(plain, TENSOR_SCALES, pack)
    tensors = {}
    for name, tensor in load_file(small / "model.safetensors").items():
        if ".layers.1." not in name:
            tensors[name] = tensor
            continue
        if ".experts." in name and ".experts.0." not in name:
            continue
        if ".mlp.gate." in name:
            shape = (num_experts, *tensor.shape[1:])
            tensor = torch.zeros(shape, dtype=tensor.dtype)
        copies = num_experts if ".experts." in name else 1
        for layer in range(1, num_layers):
            moved = name.replace(".layers.1.", f".layers.{layer}.")
            for i in range(copies):
                tensors[moved.replace(".experts.0.", f".experts.{i}.")] = tensor
    shutil.copytree(small, folder)
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    for i in range(num_files):
        part = {name: tensors[name].clone() for name in names[i::num_files]}
        save_file(part, folder / f"model-{i:05}.safetensors", metadata={"format": "pt"})
    checkpoints.edit_config(folder, num_hidden_layers=num_layers, n_routed_experts=num_experts)
    return len(tensors)


def test_checking_takes_linear_time(tmp_path: Path) -> None:
    """Eight times the tensors are eight times the work, in lines that are executed."""
    took = []
    for factor in (1, 8):
        folder = tmp_path / str(factor) / "model"
        count = many_experts(folder, 40 * factor, 4, 2)
        check(folder)  # what is made but once does not count
        took.append(count_lines(partial(check, folder)) / count)
    assert took[1] < 1.2 * took[0]


@pytest.mark.slow
def test_two_hundred_thousand_tensors_are_checked(tmp_path: Path) -> None:
    """As many as the largest checkpoints have; what takes more than linear time has no end."""
    count = many_experts(tmp_path / "model", 384, 61, 64)
    assert count > 130_000
    check(tmp_path / "model")


# Peak memory above that of a finished load, for one of `size` ranks, in bytes.
MEASURE = """
import gc, resource, sys
from dataclasses import replace
from functools import partial
import torch
from atom.config import ModelOptions
from atom.distributed.parallel_state import ParallelGroup
from atom.model_loader.source import resolve_model
from atom.model_loader.weights import build_model
from atom.model_ops.layer_context import LayerContext
from atom.models.registry import create_model
from atom.platform import cpu_platform

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

options = ModelOptions(model=sys.argv[1], tokenizer=sys.argv[3] or None)
source = resolve_model(options)
context = LayerContext.create(torch.bfloat16, 64, cpu_platform())
context = replace(context, group=ParallelGroup(0, int(sys.argv[2])))
before = status("VmRSS")
model = build_model(partial(create_model, source.hf_config), source, context, options)
gc.collect()
print(status("VmHWM") - before, status("VmRSS") - before)
"""
GIB = 1 << 30


def peak_and_kept(folder: Path, size: int, tokenizer: str = "") -> tuple[int, int]:
    command = [sys.executable, "-c", MEASURE, str(folder), str(size), tokenizer]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    peak, kept = out.split()
    return int(peak), int(kept)


def write_wide(folder: Path, config: dict[str, Any] | None) -> int:
    """Six layers, 20480 wide -> bytes; zeros, in files with holes."""
    hidden, wide, layers = 4096, 20480, 6
    small = checkpoints.llama(folder, hidden_size=32, num_hidden_layers=layers).folder
    small_tensors = load_file(small / "model.safetensors")
    sizes = {32: hidden, 64: wide}
    total = 0
    (small / "model.safetensors").unlink()
    for layer in range(-1, layers):
        header: dict[str, Any] = {}
        offset = 0
        for name, tensor in small_tensors.items():
            if (f".layers.{layer}." in name) != (layer >= 0) or (layer < 0 and ".layers." in name):
                continue
            shape = [sizes.get(n, n) for n in tensor.shape]
            if "k_proj" in name or "v_proj" in name:
                shape = [hidden // 2, hidden]
            quantise = config is not None and len(shape) == 2 and ".layers." in name
            num_bytes = torch.Size(shape).numel() * (1 if quantise else 2)
            dtype = "F8_E4M3" if quantise else "BF16"
            end = offset + num_bytes
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
            offset = end
            if quantise:
                scale = name.replace(".weight", ".weight_scale")
                header[scale] = {"dtype": "F32", "shape": [], "data_offsets": [end, end + 4]}
                offset = end + 4
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with (folder / f"model-{layer + 1}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            file.truncate(8 + len(encoded) + offset)
        total += offset
    changes = {"hidden_size": hidden, "intermediate_size": wide, "head_dim": hidden // 4}
    checkpoints.edit_config(folder, **changes)
    if config is not None:
        checkpoints.edit_config(folder, quantization_config=config)
    return total


@pytest.mark.slow
def test_peak_memory(tmp_path: Path) -> None:
    """Above the model's own memory: the largest tensor and 2 GB at most."""
    largest = 20480 * 4096 * 2
    total = write_wide(tmp_path / "plain", None)
    assert total > 3 * GIB
    peak, kept = peak_and_kept(tmp_path / "plain", 1)
    assert kept > 0.9 * total
    assert peak - kept < largest + 2e9
    peak, kept = peak_and_kept(tmp_path / "plain", 4)
    assert kept < 0.4 * total
    assert peak - kept < largest + 2e9
    # Converted to twice the size: not both forms at once.
    total = write_wide(tmp_path / "fp8", TENSOR_SCALES)
    peak, kept = peak_and_kept(tmp_path / "fp8", 1)
    assert kept > 1.8 * total
    assert peak - kept < total


def write_experts_gguf(path: Path, layers: int) -> int:
    """Qwen3-30B-A3B's shape in Q4_K, narrower and with fewer experts -> bytes; a hole of zeros."""
    hidden, heads, wide, experts, vocabulary = 1024, 8, 768, 48, 4096
    writer, total = GGUFWriter(path, "qwen3moe"), 0
    for key, value in {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": hidden,
        "feed_forward_length": wide,
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "attention.key_length": hidden // heads,
        "attention.value_length": hidden // heads,
        "expert_count": experts,
        "expert_used_count": 8,
        "expert_feed_forward_length": wide,
    }.items():
        writer.add_uint32(f"qwen3moe.{key}", value)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
    numbers, blocks = GGMLQuantizationType.F32, GGMLQuantizationType.Q4_K
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("token_embd", "output"), (vocabulary, hidden)),
        "output_norm": (hidden,),
    }
    parts: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("attn_norm", "ffn_norm"), (hidden,)),
        **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (hidden // heads,)),
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (hidden, hidden)),
        "ffn_gate_inp": (experts, hidden),
        **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (experts, wide, hidden)),
        "ffn_down_exps": (experts, hidden, wide),
    }
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
    for name, shape in shapes.items():
        kind = numbers if len(shape) == 1 or "inp" in name else blocks
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row = shape if kind == numbers else (*shape[:-1], shape[-1] // block * block_bytes)
        dtype = np.dtype(np.float32 if kind == numbers else np.uint8)
        num_bytes = int(np.prod(shape)) // block * block_bytes
        writer.add_tensor_info(f"{name}.weight", row, dtype, num_bytes, raw_dtype=kind)
        total += -(-num_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as handle:
        handle.truncate(-(-path.stat().st_size // 32) * 32 + total)
    return path.stat().st_size


@pytest.mark.slow
def test_a_gguf_file_of_experts_starts_within_its_size(tmp_path: Path) -> None:
    """The conversion included. Above it are what 32 numbers of Q4_K take more (a fortieth), the
    largest layer (a twelfth) while it is packed, and libraries.
    """
    path = tmp_path / "experts.gguf"
    size = write_experts_gguf(path, 12)
    peak, kept = peak_and_kept(path, 1, str(tmp_path))
    assert 0.9 * size < kept < 1.15 * size
    assert peak < 1.25 * size
