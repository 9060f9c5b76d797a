"""Latent-attention targets run in the engine: sizing, scheduling, prefixes, chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import checkpoints
from models.checkpoints import prompt
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams

NEW_TOKENS = 12


@pytest.mark.parametrize(
    "make", [checkpoints.deepseek_v2, checkpoints.deepseek_v3, checkpoints.kimi_k25]
)
def test_greedy_tokens_equal_transformers(
    make, tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    checkpoint = make(tmp_path, vocab_size=len(byte_level_tokenizer))
    byte_level_tokenizer.save_pretrained(tmp_path)
    shared = prompt(20)
    prompts = [[*shared, *prompt(n, seed=n)] for n in (1, 7, 30)]
    engine = LLM(
        str(tmp_path),
        dtype="float32",
        block_size=4,
        max_num_batched_tokens=24,
        max_num_seqs=8,
        max_model_len=96,
        kv_cache_memory="4MB",
        num_threads=1,
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = engine.generate(prompts, params, use_tqdm=False)
    for token_ids, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == _greedy(checkpoint, token_ids)


def _greedy(checkpoint: checkpoints.Checkpoint, token_ids: list[int]) -> list[int]:
    tokens = list(token_ids)
    for _ in range(NEW_TOKENS):
        tokens.append(int(torch.argmax(checkpoint.logits(tokens)[-1])))
    return tokens[len(token_ids) :]
