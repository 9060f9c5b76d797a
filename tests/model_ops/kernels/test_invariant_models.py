"""Whole models in bfloat16 with `--batch-invariant`, through interpreted Triton kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import checkpoints
from spec_decode import draft_bench, engines
from test_paths_agree import THROUGH_TRITON, tables
from transformers import PreTrainedTokenizerFast

from atom import SamplingParams
from atom.environment import triton_is_interpreted
from atom.platform import cpu_platform

MAKE = {"llama": checkpoints.llama, "kimi": checkpoints.kimi_k2}
DRAFTS = {"llama": draft_bench.MHA, "kimi": draft_bench.MLA}
PROMPTS = [checkpoints.prompt(18), checkpoints.prompt(3, seed=1)]

# Each token with its log probability.
Answer = list[tuple[int, float]]


def write_models(kind: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> tuple[Path, Path]:
    """A target of two layers and an Eagle3 draft."""
    sizes = {"hidden_size": 48, "vocab_size": len(tokenizer)}
    MAKE[kind](folder / "target", num_hidden_layers=2, **sizes)
    tokenizer.save_pretrained(folder / "target")
    raw = {**DRAFTS[kind], **sizes, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    draft_bench.write_draft(folder / "draft", raw, draft_bench.draft_tensors(raw))
    return folder / "target", folder / "draft"


def answers(folder: Path, prompts: list[list[int]], **options: Any) -> list[Answer]:
    engine = engines.create_engine(
        folder, dtype="bfloat16", batch_invariant=True, device="cpu", max_num_seqs=4, **options
    )
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=3, ignore_eos=True, logprobs=0)
    found = []
    for output in engine.generate(prompts, sampling, use_tqdm=False):
        [text] = output.outputs
        assert text.logprobs is not None
        chosen = zip(text.token_ids, text.logprobs, strict=True)
        found.append([(token, place[token].logprob) for token, place in chosen])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKE)
def test_a_request_has_the_same_bits_alone_and_with_drafts_beside_another(
    kind: str,
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside another its prompt is cut in two, as well."""
    pytest.importorskip("triton")
    if not triton_is_interpreted():
        pytest.skip("where there is a GPU, Triton is not interpreted")
    from interpreter import ordered_products

    monkeypatch.setattr("atom.model_ops.kernels.triton.attention.fixed_splits.SPLIT_KEYS", 16)
    target, draft = write_models(kind, tmp_path, byte_level_tokenizer)
    drafts = {"method": "eagle3", "draft_model": str(draft), "num_speculative_tokens": 2}
    with tables(monkeypatch, cpu_platform(), ("triton", "torch")) as built, ordered_products():
        alone = answers(target, PROMPTS[:1])
        together = answers(target, PROMPTS, max_num_batched_tokens=12, **drafts)
    assert together[0] == alone[0]
    rows = [row.split()[:2] for row in built[0].describe().splitlines()]
    through_triton = {op for op, *name in rows if name == ["triton"]}
    assert through_triton >= THROUGH_TRITON[kind] | {"linear", "logits", "rms_norm"}
