"""Our logits are those of transformers, however a sequence is split into steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from models import checkpoints
from models.checkpoints import Checkpoint, prompt
from models.harness import ModelBench, split

TOLERANCE = 1e-4
LENGTH = 34
MakeCheckpoint = Callable[[Path], Checkpoint]

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
QWEN3_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}

LLAMA = {
    "grouped": {},
    "one_kv_head": {"num_key_value_heads": 1},
    "ungrouped": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "own_head_dim": {"head_dim": 20},
}
QWEN3 = {
    "full": {},
    "windows": QWEN3_WINDOWS,
    "tied_biases": {"tie_word_embeddings": True, "attention_bias": True},
}
DEEPSEEK_V2 = {
    "greedy": {},
    "groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "plain_q": {"q_lora_rank": None, "routed_scaling_factor": 3.0},
    "biases": {"attention_bias": True, "mlp_bias": True, "n_shared_experts": 2},
    "all_moe": {"first_k_dense_replace": 0},
    "all_dense": {"first_k_dense_replace": 3},
    "yarn": {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
}
DEEPSEEK_V3 = {
    "groups": {},
    "plain_q": {"q_lora_rank": None},
    "no_groups": {"n_group": 1, "topk_group": 1},
    "two_dense": {"first_k_dense_replace": 2, "n_shared_experts": 2},
    "weights_as_scored": {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "biases": {"attention_bias": True},
    "halves": {"rope_interleave": False},
    "yarn": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "yarn_mscale": {"rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5}},
    "wide_values": {"v_head_dim": 24, "kv_lora_rank": 16},
    "tied": {"tie_word_embeddings": True},
}


def _cases() -> list[object]:
    families = {
        checkpoints.llama: LLAMA,
        checkpoints.qwen3: QWEN3,
        checkpoints.deepseek_v2: DEEPSEEK_V2,
        checkpoints.deepseek_v3: DEEPSEEK_V3,
        checkpoints.kimi_k2: {"published_config": {}},
        checkpoints.kimi_k25: {"nested": {}},
    }
    return [
        pytest.param(partial(make, **fields), id=f"{make.__name__}-{name}")
        for make, variants in families.items()
        for name, fields in variants.items()
    ]


@pytest.mark.parametrize("make", _cases())
def test_logits_equal_transformers_in_every_split(make: MakeCheckpoint, tmp_path: Path) -> None:
    checkpoint = make(tmp_path)
    bench = ModelBench(tmp_path)
    tokens = prompt(LENGTH)
    expected = checkpoint.logits(tokens)
    assert expected.std() > 0.5  # else agreement would mean little
    for name, sizes in {
        "whole": [LENGTH],
        "chunked": [7],
        "decoded": [1],
        "prefill_and_decode": [20, 1],
        "verified": [20, 4],
    }.items():
        _assert_close(bench.run(tokens, sizes, name), expected, name)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(checkpoints.llama, id="llama"),
        pytest.param(partial(checkpoints.qwen3, **QWEN3_WINDOWS), id="qwen3-windows"),
        pytest.param(checkpoints.deepseek_v2, id="deepseek_v2"),
        pytest.param(checkpoints.deepseek_v3, id="deepseek_v3"),
        pytest.param(checkpoints.kimi_k25, id="kimi_k25"),
    ],
)
class TestBatches:
    def test_sequences_at_different_stages_share_a_batch(
        self, make: MakeCheckpoint, tmp_path: Path
    ) -> None:
        checkpoint = make(tmp_path)
        bench = ModelBench(tmp_path)
        # A long prefill, a chunked one, a decoding and two verifying sequences.
        pieces = {
            "long": split(prompt(30, 1), [25, 1]),
            "chunks": split(prompt(19, 2), [5]),
            "decodes": split(prompt(9, 3), [4, 1]),
            "verifies": split(prompt(24, 4), [8, 4]),
            "verifies_too": split(prompt(20, 5), [4]),
        }
        for seed, (name, logits) in enumerate(bench.run_beside(pieces).items(), start=1):
            _assert_close(logits, checkpoint.logits(prompt(len(logits), seed)), name)

    def test_rejected_drafts_leave_no_trace(self, make: MakeCheckpoint, tmp_path: Path) -> None:
        checkpoint = make(tmp_path)
        bench = ModelBench(tmp_path)
        tokens = prompt(24)
        expected = checkpoint.logits(tokens)
        bench.step({"seq": tokens[:10]})
        for start in range(10, len(tokens), 2):
            wrong = [(t + 1) % checkpoints.VOCAB for t in tokens[start : start + 2]]
            # The anchor and one draft are right, two drafts are not.
            logits = bench.step({"seq": [*tokens[start : start + 2], *wrong]})["seq"]
            _assert_close(logits[:2], expected[start : start + 2], f"step at {start}")
            bench.rewind("seq", start + 2)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        YARN,
        {**YARN, "attention_factor": 0.8},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=["linear", "llama3", "yarn", "yarn-attention_factor", "dynamic"],
)
def test_rope_scaling(rope: dict[str, object], tmp_path: Path) -> None:
    checkpoint = checkpoints.llama(tmp_path, rope_parameters={"rope_theta": 10000.0, **rope})
    tokens = prompt(LENGTH)
    bench = ModelBench(tmp_path)
    expected = checkpoint.logits(tokens)
    _assert_close(bench.run(tokens, [LENGTH], "whole"), expected, "whole")
    _assert_close(bench.run(tokens, [5, 1], "decoded"), expected, "decoded")


def test_dynamic_rope_takes_the_base_of_the_longest_context(tmp_path: Path) -> None:
    """At that length it is what transformers computes for the whole sequence."""
    checkpoint = checkpoints.llama(
        tmp_path,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    )
    tokens = prompt(LENGTH)
    bench = ModelBench(tmp_path, max_model_len=LENGTH)
    _assert_close(bench.run(tokens, [9]), checkpoint.logits(tokens), "beyond the original context")


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    checkpoint = checkpoints.deepseek_v3(tmp_path)
    tokens = prompt(LENGTH)
    expected = checkpoint.logits(tokens)
    logits = ModelBench(tmp_path, dtype=torch.bfloat16).run(tokens, [20, 1])
    assert logits.dtype == torch.float32
    # A flipped choice of experts moves single rows, so only the bulk is compared.
    assert (logits.float() - expected).abs().median() < 0.1 * expected.std()


def _assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        found, expected, atol=TOLERANCE, rtol=0, msg=lambda text: f"{what}: {text}"
    )
