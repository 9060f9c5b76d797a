"""Eagle3 drafts in the layouts of those published for a family, with a target of that family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models.checkpoints import DENSE
from models.families import write_family
from models.published_drafts import PUBLISHED
from spec_decode import draft_bench
from spec_decode.engines import PROMPTS, create_engine, generate, params
from transformers import PreTrainedTokenizerFast

# The family of a draft's target, and how its file spells a tensor of the draft's layer.
_TARGETS = {
    "AngelSlim/Qwen3-8B_eagle3": ("qwen3", "midlayer"),
    "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3": ("qwen3_moe", "layers.0"),
    "nvidia/Qwen3-235B-A22B-Eagle3": ("qwen3_moe", "layers.0"),
    "lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex": ("qwen3_moe", "midlayer"),
    "nvidia/gpt-oss-120b-Eagle3-v3": ("gpt_oss", "layers.0"),
    "RedHatAI/gpt-oss-20b-speculator.eagle3": ("gpt_oss", "layers.0"),
    "thoughtworks/MiniMax-M2.5-Eagle3": ("minimax_m2", "midlayer"),
    "witcheer/gemma-3-27b-eagle3-drafter": ("gemma3_text", "midlayer"),
}
_PRUNED = 64


def shrunk(raw: dict[str, Any], num_layers: int, vocab_size: int) -> dict[str, Any]:
    """The config with the sizes of a tiny target, whose layers are `DENSE`'s.

    Args:
        num_layers: of the target that it was published for.
    """
    tiny = dict(raw)
    layer = dict(raw.get("transformer_layer_config", raw))
    is_pruned = raw["draft_vocab_size"] != layer["vocab_size"]
    layer |= {"hidden_size": DENSE["hidden_size"], "intermediate_size": 64, "head_dim": 16}
    layer |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab_size}
    tiny |= {"transformer_layer_config": layer} if "transformer_layer_config" in raw else layer
    tiny["draft_vocab_size"] = _PRUNED if is_pruned else vocab_size
    nested = raw.get("eagle_config", {})
    if ids := nested.get("eagle_aux_hidden_state_layer_ids"):
        # 3 layers: from the first boundary to the last, if it is among them.
        ids = [0, 2, 3] if num_layers in ids else [0, 1, 2]
        tiny["eagle_config"] = {**nested, "eagle_aux_hidden_state_layer_ids": ids}
    return tiny


def write_draft(name: str, folder: Path, vocab_size: int) -> Path:
    raw, num_layers, *_ = PUBLISHED[name]
    tiny = shrunk(raw, num_layers, vocab_size)
    flat = {"eagle_config": {}, **tiny, **tiny.get("transformer_layer_config", {})}
    tensors = {
        key.replace("midlayer", _TARGETS[name][1]): tensor
        for key, tensor in draft_bench.draft_tensors(flat).items()
    }
    if "reuse_target_lm_head" in raw:
        del tensors["lm_head.weight"]
    return draft_bench.write_draft(folder, tiny, tensors)


@pytest.mark.parametrize("name", _TARGETS)
def test_it_loads_and_loses_nothing(
    name: str, tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    size = len(byte_level_tokenizer)
    target = write_family(_TARGETS[name][0], tmp_path / "target", vocab_size=size).folder
    byte_level_tokenizer.save_pretrained(target)
    draft = write_draft(name, tmp_path / "draft", size)
    sampling, prompts = params("warm", max_tokens=12), PROMPTS[:4]
    expected = generate(create_engine(target), sampling, prompts)
    engine = create_engine(
        target, method="eagle3", draft_model=str(draft), num_speculative_tokens=2
    )
    assert generate(engine, sampling, prompts) == expected
    assert engine.engine.core.stats.spec_decode.num_drafts > 0
