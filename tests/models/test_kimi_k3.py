"""Kimi-K3's text model: the logits of its written-down computation, however sequences are run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import prompt
from models.harness import ModelBench, load_model, split
from models.kimi_k3 import LINEAR, KimiK3, write_kimi_k3
from quantised.compressed import MXFP4, pack_mx
from quantised.packing import Packed, quantised
from ranks import engines_of_threads, run_ranks
from safetensors.torch import save_file
from spec_decode import block_bench, engines
from spec_decode.block_reference import BlockReference
from spec_decode.engines import create_engine, generate
from transformers import PreTrainedTokenizerFast

from atom import SamplingParams
from atom.config import ConfigError
from atom.model_loader.errors import WeightError
from atom.model_ops.kernels.native.build import native_build

LENGTH = 22
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [prompt(5, seed=4) * 3, prompt(17), prompt(2, seed=1)]


@pytest.fixture(scope="module")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> KimiK3:
    folder = tmp_path_factory.mktemp("kimi_k3")
    made = write_kimi_k3(folder, vocab_size=len(byte_level_tokenizer))
    byte_level_tokenizer.save_pretrained(folder)
    return made


@pytest.fixture(scope="module")
def expected(checkpoint: KimiK3) -> list[list[int]]:
    return [checkpoint.greedy(tokens, GREEDY.max_tokens or 0) for tokens in PROMPTS]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_logits_in_every_split(checkpoint: KimiK3, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="atom"):
        bench = ModelBench(checkpoint.folder)
    assert sum("vision weights are skipped" in r.message for r in caplog.records) == 1
    tokens = prompt(LENGTH)
    expected = checkpoint.logits(tokens)
    assert expected.std() > 0.1
    assert_close(bench.run(tokens, [LENGTH], "whole"), expected)
    assert_close(bench.run(tokens, [9, 1], "chunked"), expected)
    others = {str(seed): prompt(4 + 3 * seed, seed) for seed in (1, 2)}
    pieces = {key: split(ids, [3 * int(key), 2, 1]) for key, ids in others.items()}
    found = bench.run_beside(pieces)
    for key, ids in others.items():
        assert_close(found[key], checkpoint.logits(ids))


def test_drafts_read_the_running_sums(checkpoint: KimiK3) -> None:
    bench = ModelBench(checkpoint.folder)
    bench.model.set_aux_layer_ids((0, 2, 3, 5))
    tokens = prompt(7)
    bench.step({"some": tokens})
    assert bench.output is not None
    sums, last = checkpoint.states(tokens)
    for found, layer in zip(bench.output.aux_hidden_states, (0, 2, 3, 5), strict=True):
        assert_close(found, sums[layer])
    assert_close(bench.output.hidden_states, last)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks(checkpoint: KimiK3, size: int) -> None:
    tokens = prompt(LENGTH)
    found = run_ranks(
        size, lambda group: ModelBench(checkpoint.folder, group=group).run(tokens, [19, 1])
    )
    assert_close(found[0], checkpoint.logits(tokens))


def test_ranks_that_hold_whole_experts(checkpoint: KimiK3, expected: list[list[int]]) -> None:
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with engines_of_threads(), create_engine(checkpoint.folder, **options) as engine:
        assert generate(engine, GREEDY, PROMPTS) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_change_no_token(
    checkpoint: KimiK3,
    expected: list[list[int]],
    overlap: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="atom")
    engine = create_engine(
        checkpoint.folder,
        method="suffix",
        num_speculative_tokens=3,
        speculative_adaptive=False,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        overlap=overlap,
    )
    assert generate(engine, GREEDY, PROMPTS) == expected
    assert engine.engine.core.stats.spec_decode.num_draft_tokens > 0
    if native_build().reason is None:
        assert not [r.getMessage() for r in caplog.records if "op by op" in r.getMessage()]


def test_drafts_of_latent_blocks(
    checkpoint: KimiK3, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first draft behind each text is that of the written-down draft."""
    layers = [0, 2, 3]
    fields = {"target_layer_ids": layers, "block_size": 4}
    vocab_size = checkpoint.config["vocab_size"]
    folder = engines.write_draft("kimi k3", tmp_path, vocab_size, **fields)
    draft = engines.block_draft("kimi k3", vocab_size, **fields)
    tensors = block_bench.draft_tensors(draft)
    embed = checkpoint.tensors["language_model.model.embed_tokens.weight"]
    head = checkpoint.tensors["language_model.lm_head.weight"]
    own = draft.flat, draft.meaning, tensors, embed, head, 4, draft.mask_token
    reference = BlockReference(*own)
    with engines.drafts_recorded(monkeypatch) as recorded:
        engine = create_engine(
            checkpoint.folder,
            method="dspark",
            draft_model=str(folder),
            num_speculative_tokens=3,
            speculative_adaptive=False,
        )
        assert generate(engine, GREEDY, PROMPTS) == expected
    (made,) = recorded
    # Of the others the block's last rows have no slots.
    ends = [(*tokens, *outputs) for tokens, outputs in zip(PROMPTS, expected, strict=True)]
    made = {
        text: drafts
        for text, drafts in made.items()
        if any(end[: len(text)] == text and len(text) + 3 < len(end) for end in ends)
    }
    assert len(made) > 10
    for text, drafts in [*made.items()][::3]:
        sums, _ = checkpoint.states([*text[:-1]])
        _, tokens = reference.scores([sums[i + 1] for i in layers], text[-1])
        assert drafts == tokens[: len(drafts)]


def of_experts(module: str, out: int, columns: int) -> Packed | None:
    return pack_mx()(module, out, columns) if ".experts." in module else None


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """The projections to the latent space are not named as plain, but are."""
    made = write_kimi_k3(tmp_path / "plain")
    names = ("self_attn", "shared_experts", "mlp\\.(gate|up|gate_up|down)_proj", "lm_head")
    ignored = [f"re:.*{name}.*" for name in names]
    stored, dense = quantised(made.folder, {**MXFP4, "ignore": ignored}, of_experts)
    tokens = prompt(LENGTH)
    exact = ModelBench(dense).run(tokens, [LENGTH])
    found = ModelBench(stored).run(tokens, [13, 1])
    torch.testing.assert_close(found, exact, atol=5e-4, rtol=5e-4)
    assert (exact - made.logits(tokens)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act='silu' is not supported"),
        ({"activation_situ_beta": None}, "activation_situ_beta=None"),
        ({"mla_use_output_gate": False}, "mla_use_output_gate=False"),
        ({"latent_moe_use_norm": False}, "latent_moe_use_norm=False"),
        ({"attn_res_block_size": None}, "without attn_res_block_size"),
        ({"routed_expert_hidden_size": None}, "without routed_expert_hidden_size"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ({"routed_scaling_factor": None}, "should state routed_scaling_factor"),
        ({"model_type": "deepseek_v3"}, "text_config of model_type kimi_linear"),
        ({"linear_attn_config": {**LINEAR, "use_full_rank_gate": False}}, "use_full_rank_gate"),
        (
            {"linear_attn_config": {**LINEAR, "state_decay_kind": "scalar"}},
            "state_decay_kind='scalar' in linear_attn_config is not supported",
        ),
    ],
)
def test_what_is_not_published(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    made = write_kimi_k3(tmp_path)
    raw = json.loads((made.folder / "config.json").read_text())
    raw["text_config"] |= fields
    (made.folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, 32)


def test_heads_behind_the_last_are_nobodys(checkpoint: KimiK3, tmp_path: Path) -> None:
    """`A_log` has numbers for more heads than there are, all of them zeros."""
    tensors = dict(checkpoint.tensors)
    (name,) = (n for n in tensors if n.endswith("layers.0.self_attn.A_log"))
    tensors[name] = tensors[name] + 1
    write_kimi_k3(tmp_path, vocab_size=checkpoint.config["vocab_size"])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match="A_log"):
        load_model(tmp_path, 32)
