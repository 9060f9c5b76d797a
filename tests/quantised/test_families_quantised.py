"""Quantised checkpoints of every native family: fused and renamed parts, and experts, are those of
the same model in numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from models import checkpoints, transformers_families
from models.families import FAMILIES, write_family
from models.harness import ModelBench
from models.hybrids import HYBRIDS, write_hybrid
from quantised import test_awq, test_gptq
from quantised.compressed import FORMATS
from quantised.packing import Pack, Packed, assert_same_model, but_the_tower, quantised

from atom.models.registry import model_types
from atom.models.transformers.model import TransformersForCausalLM

# Modules that are never quantised: heads, routers, gates of a shared expert, indexers; and what has
# fewer numbers than the formats have codes, here.
_PLAIN = (
    "lm_head",
    ".gate",
    ".shared_expert_gate",
    ".router",
    ".in_proj_a",
    ".in_proj_b",
    ".b_proj",
)
_IGNORED = [
    *("lm_head", "re:.*\\.gate$", "re:.*\\.shared_expert_gate$", "re:.*\\.indexer\\..*"),
    *("re:.*\\.in_proj_[ab]$", "re:.*\\.b_proj$"),
]
# By model types: what `write_hybrid` calls them.
_HYBRIDS = {
    "qwen3_next": "qwen3_next",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "kimi_linear": "kimi_linear",
}
_OTHERS: Mapping[str, Callable[..., checkpoints.Checkpoint]] = {
    "deepseek_v2": checkpoints.deepseek_v2,
    "deepseek_v3": checkpoints.deepseek_v3,
    "kimi_k2": checkpoints.kimi_k2,
    "kimi_k25": checkpoints.kimi_k25,
    **{kind: partial(write_hybrid, name) for kind, name in _HYBRIDS.items()},
}
NAMES = [*(name for name in FAMILIES if "-" not in name), *_OTHERS]
# One of the others beside a tower, which is not quantised or not read.
_SEEING = {
    *("idefics3", "smolvlm", "gemma3", "mistral3", "qwen3_5", "qwen3_5_moe"),
    *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
}
# Published in MXFP4 alone, which its own tests have.
_IN_MXFP4 = {"kimi_k3"}
# Fused attention, fused MLPs, experts, renamed experts, latent attention, recurrent states.
OFTEN = ("phi3", "qwen2_moe", "mixtral", "deepseek_v3", "qwen3_next", "kimi_linear")


def test_all_families_are_here() -> None:
    assert {kind for kinds in model_types().values() for kind in kinds} == {
        *(*_SEEING, *_IN_MXFP4, *NAMES)
    }


def write(name: str, folder: Path, **fields: Any) -> Path:
    if name in _OTHERS:
        return _OTHERS[name](folder, **fields).folder
    return write_family(name, folder, **fields).folder


def but_plain(pack: Pack) -> Pack:
    def packed(module: str, out: int, columns: int) -> Packed | None:
        is_plain = module.endswith(_PLAIN) or ".indexer." in module
        return None if is_plain else pack(module, out, columns)

    return but_the_tower(packed)


@pytest.mark.parametrize("form", ["int8 channel", "fp8 weight-only", "int8 zeros"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in NAMES]
)
@pytest.mark.usefixtures("exact_activations")
def test_compressed_tensors(name: str, form: str, tmp_path: Path) -> None:
    config, pack = FORMATS[form]
    ignored = [*_IGNORED, "re:.*(vision_tower|mm_projector|\\.router).*"]
    if name == "gpt_oss":  # its files have the experts of a layer in one tensor, or in MXFP4
        ignored.append("re:.*\\.experts.*")
    folder = write(name, tmp_path / "plain", num_hidden_layers=2, **_layers_of(name, 2))
    assert_same_model(*quantised(folder, {**config, "ignore": ignored}, but_plain(pack)))


@pytest.mark.parametrize("form", ["int8 channel", "fp8 weight-only", "int8 zeros"])
@pytest.mark.usefixtures("exact_activations")
def test_families_of_transformers(form: str, tmp_path: Path) -> None:
    """By its modelling code, with linear layers of ours."""
    config, pack = FORMATS[form]
    folder = transformers_families.write_family("arcee", tmp_path / "plain").folder
    stored, dense = quantised(folder, {**config, "ignore": _IGNORED}, but_plain(pack))
    assert isinstance(ModelBench(stored).model, TransformersForCausalLM)
    assert_same_model(stored, dense)


@pytest.mark.parametrize("name", ["qwen2", "phi3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.usefixtures("exact_activations")
def test_four_bits(method: str, name: str, tmp_path: Path) -> None:
    """Dense families, with and without fused files, and experts under both names."""
    is_dense = name in ("qwen2", "phi3")
    sizes = {} if is_dense else {"moe_intermediate_size": 32}
    folder = write(name, tmp_path / "plain", num_hidden_layers=2, **sizes)
    routers = [f"model.layers.{i}.{part}.gate" for i in range(2) for part in _MOE]
    if method == "awq":
        config = {**test_awq.CONFIG, "modules_to_not_convert": [] if is_dense else routers}
        pack = but_plain(test_awq.pack_model)
    else:
        config = {**test_gptq.CONFIG, "modules_in_block_to_quantize": None}
        pack = but_plain(lambda _, out, columns: test_gptq.pack(out, columns, test_gptq.CONFIG))
    assert_same_model(*quantised(folder, config, pack))


_MOE = ("mlp", "block_sparse_moe")


def _layers_of(name: str, count: int) -> dict[str, Any]:
    """Lists of a family's fields, cut to so many layers."""
    if name in _HYBRIDS:
        fields = HYBRIDS[_HYBRIDS[name]][2]
    else:
        fields = FAMILIES[name][1] if name in FAMILIES else {}
    return {key: value[:count] for key, value in fields.items() if isinstance(value, list)}
