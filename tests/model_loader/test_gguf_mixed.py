"""GGUF files whose fused layers have parts of several types, as Q4_K_M files do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import tiny_model
from models.harness import ModelBench
from quantised.packing import TOKENS, layer_context, logits
from safetensors.torch import load_file
from spec_decode.engines import create_engine

from atom import SamplingParams
from atom.config import ModelOptions
from atom.distributed.parallel_state import ParallelGroup
from atom.kv_cache.block_tables import StepTables
from atom.model_engine.worker import Worker
from atom.model_loader.gguf.convert import converted_folder
from atom.model_loader.gguf.file import read_gguf
from atom.model_loader.source import resolve_model
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.native.program import Arena, record
from atom.model_ops.linear import QKVParallelLinear
from atom.model_ops.quant.formats.gguf import GgufConfig
from atom.model_ops.quant.summary import describe_weights

WriteTiny = Callable[..., Path]
_KINDS = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_output", "ffn_gate"), GGMLQuantizationType.Q4_K),
    **dict.fromkeys(("attn_v", "ffn_up", "ffn_down"), GGMLQuantizationType.Q6_K),
}
_SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 330}

needs_native = pytest.mark.skipif(
    native_build().reason is not None, reason=str(native_build().reason)
)


@pytest.fixture
def mixed(write_tiny: WriteTiny) -> Path:
    """q and k in Q4_K, v in Q6_K; gate in Q4_K, up in Q6_K."""
    kind = GGMLQuantizationType.Q8_0
    return write_tiny(tiny_model(**_SIZES), kind, random_kinds=_KINDS)


def kept(path: Path) -> Path:
    return resolve_model(ModelOptions(str(path), dtype="float32")).path


@pytest.fixture
def attention(mixed: Path) -> QKVParallelLinear:
    """The first layer's queries, keys and values, as a CPU multiplies them."""
    layer = ModelBench(kept(mixed)).model.get_submodule("model.layers.0.self_attn.qkv_proj")
    assert isinstance(layer, QKVParallelLinear)
    assert layer.storage.is_split
    return layer


def test_every_matrix_keeps_its_bits(mixed: Path) -> None:
    source = resolve_model(ModelOptions(str(mixed), dtype="float32"))
    assert isinstance(source.quantization, GgufConfig)
    types = source.quantization.types
    assert types["model.layers.0.self_attn.q_proj"] == "Q4_K"
    assert types["model.layers.0.self_attn.v_proj"] == "Q6_K"
    assert types["model.layers.1.mlp.up_proj"] == "Q6_K"
    assert str(source.quantization) == (
        "GGUF Q4_K (8 matrices), Q6_K (6 matrices), Q8_0 (2 matrices)"
    )
    bench = ModelBench(source.path)
    described = describe_weights(bench.model, source.quantization)
    assert described.startswith("Q4_K and Q6_K and Q8_0 weights, inputs ")
    numbers = sum(p.nbytes for p in bench.model.parameters() if p.dim() == 2)
    assert numbers == 0 or native_build().reason is not None


@pytest.mark.parametrize("inputs", ["float", "auto"])
def test_kept_and_unpacked_files_give_the_same_logits(mixed: Path, inputs: str) -> None:
    expected = logits(converted_folder(read_gguf(mixed), torch.float32, True))
    assert expected.std() > 0.1
    found = logits(kept(mixed), activations=inputs)
    near = 1e-4 if inputs == "float" else 0.01 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=near)


def test_other_implementations_copy_their_columns(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(converted_folder(read_gguf(mixed), torch.float32, True))
    monkeypatch.setenv("ATOM_OP_QUANT_LINEAR", "torch")
    found = logits(kept(mixed), activations="float")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_parts_may_be_numbers(write_tiny: WriteTiny) -> None:
    """There is no format for IQ3_S."""
    kinds = {**_KINDS, "attn_v": GGMLQuantizationType.IQ3_S}
    path = write_tiny(tiny_model(**_SIZES), GGMLQuantizationType.Q8_0, random_kinds=kinds)
    folder = kept(path)
    layer = ModelBench(folder).model.get_submodule("model.layers.0.self_attn.qkv_proj")
    assert isinstance(layer, QKVParallelLinear)
    assert layer.alone("q_proj").storage.format is not None
    assert layer.alone("v_proj").storage.format is None
    expected = logits(converted_folder(read_gguf(path), torch.float32, True))
    found = logits(folder, activations="float")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@needs_native
def test_parts_are_the_products_of_their_own_matrices(attention: QKVParallelLinear) -> None:
    x = torch.randn(9, attention.in_features, generator=torch.Generator().manual_seed(1))
    alone = [attention.alone(part)(x) for part in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(attention(x), torch.cat(alone, 1))


@needs_native
def test_ranks_have_their_heads_of_each_part(mixed: Path, attention: QKVParallelLinear) -> None:
    source = resolve_model(ModelOptions(str(mixed), dtype="float32"))
    stored = load_file(source.path / "model.safetensors")
    prefix = "model.layers.0.self_attn"
    x = torch.randn(3, attention.in_features, generator=torch.Generator().manual_seed(1))
    whole = attention.split(attention(x))
    for rank in range(2):
        context = layer_context(source.quantization, ParallelGroup(rank, 2))
        sizes = attention.in_features, attention.head_dim, 4, 2
        layer = QKVParallelLinear(*sizes, False, context, f"{prefix}.qkv_proj")
        for part in ("q_proj", "k_proj", "v_proj"):
            alone = layer.alone(part)
            for name in alone.storage.stored:
                alone.load_weight(name, stored[f"{prefix}.{part}.{name}"], None)
            alone.process_after_loading()
        for ours, of_all in zip(layer.split(layer(x)), whole, strict=True):
            heads = ours.shape[1]
            assert torch.equal(ours, of_all[:, rank * heads : (rank + 1) * heads])


@needs_native
def test_a_row_has_the_same_bits_in_every_batch(attention: QKVParallelLinear) -> None:
    x = torch.randn(130, attention.in_features, generator=torch.Generator().manual_seed(1))
    everything = attention(x)
    for rows in (1, 2, 7, 16, 33, 129):
        assert torch.equal(attention(x[-rows:]), everything[-rows:])


@needs_native
def test_a_recorded_program_writes_the_same_columns(attention: QKVParallelLinear) -> None:
    x = torch.zeros(3, attention.in_features)
    with torch.inference_mode():
        out, program = record(lambda: attention(x), lambda out: (out,), Arena())
        # One kernel for each part, and no copies.
        assert len(program) == 3
        for seed in range(2):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            program.replay()
            assert torch.equal(out, attention(x))


@needs_native
def test_recorded_steps_choose_the_tokens_of_others(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine = create_engine(mixed, dtype="float32")
    recorded = engine.generate([TOKENS], greedy, use_tqdm=False)[0].outputs[0].token_ids
    stats = engine.engine.core.stats
    replayed = stats.num_replayed_decode_steps
    assert replayed > 0
    worker = engine.engine.core.executor
    assert isinstance(worker, Worker)
    monkeypatch.setattr(worker._runner, "steps", worker._runner.steps.without_draft_replay())
    monkeypatch.setattr(
        worker._runner.inputs, "_step_tables", StepTables(worker._runner.inputs._tables)
    )
    again = engine.generate([TOKENS], greedy, use_tqdm=False)[0].outputs[0].token_ids
    assert engine.engine.core.stats.num_replayed_decode_steps == replayed
    assert again == recorded
