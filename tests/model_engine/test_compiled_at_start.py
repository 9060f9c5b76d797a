"""Serving compiles nothing: Triton's kernels are all compiled while an engine starts.

Engines run in processes of their own on a GPU that is pretended: Triton looks up each launch among
the kernels that it has compiled, by types, constants, tiles and what it specialises on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
}
LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
DRAFT = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 256}
KIMI = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
ENGINE = {
    "dtype": "bfloat16",
    "block_size": 64,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "max_model_len": 2048,
}
EAGER = {**ENGINE, "enforce_eager": True}
EAGLE = {"method": "eagle3", "num_speculative_tokens": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("sm90", {"target": LLAMA, "engine": ENGINE}),
    "llama eager": ("gfx942", {"target": LLAMA, "engine": EAGER}),
    "llama int4 eager": ("sm90", {"target": LLAMA, "engine": EAGER | {"quantization": "int4"}}),
    "llama eagle3": ("gfx942", {"target": LLAMA, "draft": DRAFT, "engine": ENGINE | EAGLE}),
    "kimi eagle3 eager": ("sm90", {"target": KIMI, "draft": DRAFT, "engine": EAGER | EAGLE}),
    "kimi int4 eagle3": (
        "gfx942",
        {"target": KIMI, "draft": DRAFT, "engine": ENGINE | EAGLE | {"quantization": "int4"}},
    ),
    "kimi int4": ("gfx942", {"target": KIMI, "engine": ENGINE | {"quantization": "int4"}}),
    "kimi int4 eager": ("sm90", {"target": KIMI, "engine": EAGER | {"quantization": "int4"}}),
}

# Of these a target and a draft with graphs, and a target without, on the two archs.
AT_EACH_COMMIT = ("kimi int4 eagle3", "llama int4 eager")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in AT_EACH_COMMIT else pytest.mark.slow)
        for name in CASES
    ],
)
def test_nothing_is_compiled_while_serving(name: str) -> None:
    arch, options = CASES[name]
    program = Path(__file__).with_name("launch_worker.py")
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program), arch, json.dumps(options)],
        cwd=ROOT,
        env={**variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["known"]) > 15
    assert not found["anew"], Counter(kernel for kernel, _ in found["anew"])
