"""Drafts over several ranks compute what they compute on one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from model_ops.batches import Part
from models import checkpoints
from models.families import write_family
from models.harness import load_model
from ranks import run_ranks
from spec_decode import block_bench, draft_bench
from spec_decode.block_bench import BlockBench
from spec_decode.draft_bench import DraftBench
from spec_decode.mtp_reference import add_mtp_layers
from spec_decode.test_mtp import MTPBench

from atom.config import EngineConfig, ModelOptions, ParallelOptions, SpeculativeOptions
from atom.distributed.parallel_state import SINGLE, ParallelGroup
from atom.kv_cache.builders import attention_layers
from atom.model_loader.source import resolve_model
from atom.model_ops.embedding import ParallelLMHead, VocabParallelEmbedding
from atom.model_ops.layer_context import LayerContext
from atom.models.block_draft.draft import BlockDraft
from atom.models.eagle3.base import Eagle3Draft
from atom.models.layers.mtp import PredictionLayers
from atom.platform import cpu_platform
from atom.spec_decode.factory import create_proposer

VOCAB, DRAFT_VOCAB, HIDDEN = 97, 41, 48
TOKENS = checkpoints.prompt(9)
STATES = [torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(i)) for i in range(3)]

Draft = Eagle3Draft | PredictionLayers | BlockDraft
# Of each step of a chain: token, hidden state, logits.
Chain = tuple[list[int], torch.Tensor, torch.Tensor]


def load_draft(target: Path, speculative: SpeculativeOptions, group: ParallelGroup) -> Draft:
    """As an engine with these options loads it on one rank."""
    config = EngineConfig(
        model=ModelOptions(model=str(target), dtype="float32"),
        speculative=speculative,
        parallel=ParallelOptions(tensor_parallel_size=group.size),
    )
    context = LayerContext.create(torch.float32, 128, cpu_platform(), group)
    source = resolve_model(config.model)
    proposer = create_proposer(config, load_model(target, 128, group=group), source, context)
    assert isinstance(proposer.draft_model, Eagle3Draft | PredictionLayers | BlockDraft)
    return proposer.draft_model


@torch.inference_mode()
def chain(draft: Draft) -> Chain:
    """Rows at once, then single steps, as a proposer makes them."""
    if isinstance(draft, PredictionLayers):
        tokens, states = MTPBench(draft).propose("a", [5, 4], TOKENS, STATES[0], 3)
        logits = torch.cat([draft.compute_logits(i, states[i : i + 1]) for i in range(3)])
        chosen = [int(draft.choose_token(i, states[i : i + 1])) for i in range(3)]
    else:
        fused = draft.fuse(tuple(STATES))
        tokens, states = DraftBench(draft).propose("a", 0, TOKENS, fused, 3)
        logits = draft.compute_logits(states)
        chosen = draft.head.argmax(states, draft.target_ids).tolist()
    assert chosen == tokens
    return tokens, states, logits


def check(load: Callable[[ParallelGroup], Draft], size: int, vocab_size: int) -> None:
    expected = chain(load(SINGLE))
    for tokens, states, logits in run_ranks(size, lambda group: chain(load(group))):
        assert tokens == expected[0]
        assert logits.shape == (3, vocab_size)
        for got, whole in ((states, expected[1]), (logits, expected[2])):
            tolerance = 1e-5 * float(whole.abs().max())
            torch.testing.assert_close(got, whole, rtol=0, atol=tolerance)


# Kind, fields of its config, and whether it has an embedding and a head.
EAGLE3: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "mha": (draft_bench.MHA, {"num_key_value_heads": 2}, False),
    "mla": (draft_bench.MLA, {}, True),
    "mha with the target's head": (draft_bench.MHA, {"draft_vocab_size": VOCAB}, False),
    "peagle": (draft_bench.PARALLEL, {"num_key_value_heads": 2}, False),
}


def write_eagle3(folder: Path, name: str) -> tuple[Path, Path]:
    """A target and its draft."""
    base, fields, own = EAGLE3[name]
    target = checkpoints.llama(folder / "target", vocab_size=VOCAB, hidden_size=HIDDEN).folder
    raw = {**base, "hidden_size": HIDDEN, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB}
    raw |= {**fields, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}
    head = raw["draft_vocab_size"] != VOCAB
    tensors = draft_bench.draft_tensors(raw, embed=own, head=head)
    if name == "peagle":
        tensors = draft_bench.parallel_tensors(raw)
    return target, draft_bench.write_draft(folder / "draft", raw, tensors)


@pytest.mark.parametrize("draft_ranks", [None, 1])
@pytest.mark.parametrize(("name", "size"), [*zip(EAGLE3, [4, 2, 2, 2], strict=True)])
def test_eagle3(name: str, size: int, draft_ranks: int | None, tmp_path: Path) -> None:
    target, draft = write_eagle3(tmp_path, name)

    def load(group: ParallelGroup) -> Draft:
        options = SpeculativeOptions(
            method="eagle3",
            num_speculative_tokens=3,
            model=str(draft),
            draft_tensor_parallel_size=None if group.size == 1 else draft_ranks,
        )
        return load_draft(target, options, group)

    vocab_size = VOCAB if "target" in name else DRAFT_VOCAB
    check(load, size, vocab_size)


@pytest.mark.parametrize("draft_ranks", [None, 1])
@pytest.mark.parametrize("name", ["dflash2", "dspark rnn", "dspark kimi", "speculators dspark"])
def test_block_drafters(name: str, draft_ranks: int | None, tmp_path: Path) -> None:
    """Scores along the greedy path of a block, after a context."""
    folder = checkpoints.llama(tmp_path / "target", vocab_size=VOCAB, hidden_size=HIDDEN).folder
    ids = {"target_layer_ids": [-1, 0, 1], "aux_hidden_state_layer_ids": [0, 2, 3]}
    draft = block_bench.DRAFTS[name].changed(hidden_size=HIDDEN, vocab_size=VOCAB, **ids)
    block_bench.write_draft(tmp_path / "draft", draft)

    def scores(group: ParallelGroup) -> tuple[list[list[int]], torch.Tensor]:
        options = SpeculativeOptions(
            method=draft.kind,
            num_speculative_tokens=4,
            model=str(tmp_path / "draft"),
            draft_tensor_parallel_size=None if group.size == 1 else draft_ranks,
        )
        model = load_draft(folder, options, group)
        assert isinstance(model, BlockDraft)
        bench = BlockBench(model)
        part = Part(9, 0, bench.blocks(9 + 5))
        drafts, found, _ = bench.step([part], STATES, TOKENS, [8], 4)
        return drafts, found

    alone = scores(SINGLE)
    for together in run_ranks(2, scores):
        assert together[0] == alone[0]
        torch.testing.assert_close(together[1], alone[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("draft_ranks", [None, 1])
@pytest.mark.parametrize("own", [(), ("embed_tokens", "shared_head.head")], ids=["shared", "own"])
def test_mtp(own: tuple[str, ...], draft_ranks: int | None, tmp_path: Path) -> None:
    checkpoints.deepseek_v3(tmp_path, num_nextn_predict_layers=2, vocab_size=VOCAB)
    add_mtp_layers(tmp_path, own=own)
    check_mtp(tmp_path, draft_ranks)


@pytest.mark.parametrize("draft_ranks", [None, 1])
def test_mtp_with_grouped_query_attention(draft_ranks: int | None, tmp_path: Path) -> None:
    write_family("glm4_moe", tmp_path, num_nextn_predict_layers=1, vocab_size=VOCAB)
    add_mtp_layers(tmp_path)
    check_mtp(tmp_path, draft_ranks)


def check_mtp(folder: Path, draft_ranks: int | None) -> None:
    def load(group: ParallelGroup) -> Draft:
        options = SpeculativeOptions(
            method="mtp",
            num_speculative_tokens=3,
            draft_tensor_parallel_size=None if group.size == 1 else draft_ranks,
        )
        return load_draft(folder, options, group)

    check(load, 2, VOCAB)


def test_a_draft_on_one_rank_has_all_of_its_own_and_the_share_of_the_target(
    tmp_path: Path,
) -> None:
    target, draft = write_eagle3(tmp_path, "mha")
    create = partial(
        SpeculativeOptions, method="eagle3", num_speculative_tokens=3, model=str(draft)
    )
    group = ParallelGroup(1, 2)
    split = load_draft(target, create(), group)
    whole = load_draft(target, create(draft_tensor_parallel_size=1), group)
    assert isinstance(split, Eagle3Draft)
    assert isinstance(whole, Eagle3Draft)

    def heads(draft: Eagle3Draft) -> list[int]:
        return [layer.stored_parts()["key"][0] for layer in attention_layers(draft).values()]

    assert (heads(split), heads(whole)) == ([1], [2])
    assert isinstance(whole.lm_head, ParallelLMHead)
    assert whole.lm_head.weight.shape == (DRAFT_VOCAB, HIDDEN)
    # 97 tokens are 49 and 48.
    shared = whole.embed.__self__  # type: ignore[attr-defined]
    assert isinstance(shared, VocabParallelEmbedding)
    assert shared.weight.shape == (48, HIDDEN)
