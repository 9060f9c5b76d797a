"""`--batch-invariant` on a CPU: what the C++ kernels do not compute ends the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import checkpoints
from spec_decode.engines import create_engine
from transformers import PreTrainedTokenizerFast

from atom import SamplingParams
from atom.model_ops.kernels.native import bindings
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.registry import OpUnavailableError

REASON = native_build().reason
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
# A name: the family, its config, options of the engine, the op that PyTorch would run.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "latents of no whole vectors": ("deepseek_v3", {"kv_lora_rank": None}, {}, "mla_decode"),
    "experts with rounded inputs": ("kimi_k25", {"quantization_config": FP8}, {}, "quant_experts"),
    "a cache of another type": ("llama", {}, {"kv_cache_dtype": "bf16"}, "paged_attention"),
}


def write(
    family: str, fields: dict[str, Any], folder: Path, tokenizer: PreTrainedTokenizerFast
) -> Path:
    fields = {**fields, "vocab_size": len(tokenizer)}
    config = {k: fields.pop(k) for k in [*fields] if k == "quantization_config"}
    if "kv_lora_rank" in fields:
        fields["kv_lora_rank"] = 2 * bindings.constant("lanes") + 4
    getattr(checkpoints, family)(folder, num_hidden_layers=2, **fields)
    (folder / "model.safetensors").unlink()
    checkpoints.edit_config(folder, **config)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def compiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nobody tests: Triton's kernels are not interpreted."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def answer(folder: Path, **options: Any) -> tuple[list[int], str]:
    """Some tokens, and the table of ops."""
    options = {"load_format": "dummy", "dtype": "float32", "device": "cpu", **options}
    with create_engine(folder, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        [output] = llm.generate([checkpoints.prompt(9)], params, use_tqdm=False)
        return output.outputs[0].token_ids, llm.engine.core.executor.ops.describe()


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize("case", CASES)
def test_what_depends_on_the_batch_is_refused(
    case: str, tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    family, fields, options, op = CASES[case]
    folder = write(family, fields, tmp_path, byte_level_tokenizer)
    with pytest.raises(OpUnavailableError, match=f"no batch-invariant implementation of {op} "):
        answer(folder, batch_invariant=True, **options)
    tokens, table = answer(folder, **options)  # the option alone is why
    assert len(tokens) == 3
    assert [op, "torch"] in [line.split()[:2] for line in table.splitlines()]


@pytest.mark.usefixtures("compiled_only")
@pytest.mark.parametrize(
    "options",
    [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}],
)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_other_models_start(
    family: str,
    options: dict[str, Any],
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    folder = write(family, {}, tmp_path, byte_level_tokenizer)
    with_it, table = answer(folder, batch_invariant=True, **options)
    assert (with_it, table) == answer(folder, **options)
