"""Block drafters in an engine, beside the dense reference on transformers' hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.harness import load_model
from safetensors.torch import load_file
from spec_decode import block_bench, engines
from spec_decode.block_reference import BlockReference
from spec_decode.engines import create_engine, generate, params
from spec_decode.test_draft_invariance import (
    MAX_TOKENS,
    PROMPTS,
    WAYS,
    check_tokens,
    num_verifiable,
    prepared,
)
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.config import ConfigError, ModelOptions
from atom.model_loader.source import resolve_model
from atom.model_ops.attention.metadata import SamplingMetadata
from atom.spec_decode.drafter import Drafter
from atom.spec_decode.proposers.base import Chosen, DraftSampler, Guide, Proposer
from atom.spec_decode.suffix_lookup import RecentOutputs, SuffixLookup

SETTINGS = {
    "greedy": params("greedy", max_tokens=MAX_TOKENS),
    "sampled": params("warm", max_tokens=MAX_TOKENS, temperature=1.0),
}
# What enters these layers of the target is what the drafts read.
BOUNDARIES = {"kimi": (2, 3, 5, 6), "dspark": (0, 2, 3), "dflash": (0, 1, 2)}
K = 5
# Several drafts are, in most steps.
ACCEPTED = "accepted"

History = tuple[int, ...]


class Bench:
    """A target with a draft, their reference, and what the target says without the draft."""

    def __init__(self, kind: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        kind, _, name = kind.partition(" ")
        self.target = engines.write_checkpoint(kind, folder / "target", tokenizer)
        self.folder, self.boundaries = folder, BOUNDARIES[name]
        self.draft = engines.block_draft(name, len(tokenizer))
        block_bench.write_draft(folder / "draft", self.draft)
        tensors = load_file(self.target.folder / "model.safetensors")
        embed, head = (
            next(tensor for name, tensor in tensors.items() if name.endswith(end))
            for end in ("embed_tokens.weight", "lm_head.weight")
        )
        own, self.block_size = self.draft.flat, self.draft.raw["block_size"]
        self.reference = BlockReference(
            own,
            self.draft.meaning,
            block_bench.draft_tensors(self.draft),
            embed,
            head,
            self.block_size,
            self.draft.mask_token,
        )
        plain = create_engine(self.target.folder)
        self.expected = {
            name: generate(plain, setting, PROMPTS) for name, setting in SETTINGS.items()
        }

    def engine(self, **changes: Any) -> LLM:
        return create_engine(
            self.target.folder,
            method=self.draft.kind,
            draft_model=str(self.folder / "draft"),
            num_speculative_tokens=K,
            **changes,
        )

    def scores(
        self, history: History, chosen: list[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """As `BlockReference.scores`, after a text whose last token is the anchor."""
        states = self.target.hidden_states(list(history))
        rows = [states[boundary][:-1] for boundary in self.boundaries]
        return self.reference.scores(rows, history[-1], chosen)

    def run(self, way: str, engine: LLM, setting: str, drafts: dict[History, list[int]]) -> None:
        """Generate, that way; the tokens are those without drafts."""
        expected = self.expected[setting]
        check_tokens(way, engine, SETTINGS[setting], expected)
        if way == ACCEPTED:
            drafts.clear()
            assert generate(engine, SETTINGS[setting], PROMPTS) == expected
            stats = engine.engine.core.stats.spec_decode
            assert stats is not None
            assert stats.num_accepted_tokens > 60

    def compared(self, drafts: dict[History, list[int]]) -> list[History]:
        """Some of the texts behind which a whole block has slots."""
        whole = [each for each in drafts if num_verifiable(each) >= self.block_size - 1]
        assert len(whole) > 10
        return whole[:: 1 + len(whole) // 20]


def drafter_of(_: object, proposer: Proposer, **__: bool) -> Drafter:
    """The draft model's drafts, or what others were answered: at the second time all of that."""
    lookup = SuffixLookup("lookup", K, RecentOutputs(2000))
    return Drafter(proposer, "draft", lookup, None, sync_is_free=False)


@pytest.fixture(scope="module", params=["kimi_k25 kimi", "kimi_k25 dspark", "llama dflash"])
def bench(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> Bench:
    folder = tmp_path_factory.mktemp("block")
    return Bench(request.param, folder, byte_level_tokenizer)


CREATES: dict[str, tuple[engines.CreateDrafter, ...]] = {ACCEPTED: (drafter_of,)}


def ways(first: int) -> list[Any]:
    """All ways; of the two tests that go them each commit runs one, in turns from `first` on."""
    return [
        pytest.param(way, marks=() if number % 2 == first else pytest.mark.slow)
        for number, way in enumerate(("whole", ACCEPTED, *WAYS))
    ]


@pytest.mark.parametrize("way", ways(0))
def test_scores_are_those_of_the_reference(
    bench: Bench, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Op by op, at temperature 1; and the tokens are those without drafts."""
    made: list[torch.Tensor] = []
    scores: dict[History, torch.Tensor] = {}
    choose = DraftSampler.choose

    def watch(
        self: DraftSampler,
        logits: torch.Tensor,
        draft_sampling: SamplingMetadata | None,
        positions: torch.Tensor,
        guide: Guide | None = None,
        ahead: int = 2,
    ) -> Chosen:
        made.append(logits.clone())
        return choose(self, logits, draft_sampling, positions, guide, ahead)

    def tell(histories: list[History]) -> None:
        if histories:
            scores.update(zip(histories, torch.stack(made, 1).double(), strict=True))
        made.clear()

    monkeypatch.setattr(DraftSampler, "choose", watch)
    with prepared(way, monkeypatch) as changes:
        with engines.drafts_recorded(monkeypatch, *CREATES.get(way, ()), tell=tell) as recorders:
            engine = bench.engine(enforce_eager=True, **changes)
        (drafts,) = recorders
        bench.run(way, engine, "sampled", drafts)
    for history in bench.compared(drafts):
        expected, _ = bench.scores(history, drafts[history])
        torch.testing.assert_close(scores[history], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("way", ways(1))
def test_greedy_drafts_are_those_of_the_reference(
    bench: Bench, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As steps are recorded."""
    with prepared(way, monkeypatch) as changes:
        with engines.drafts_recorded(monkeypatch, *CREATES.get(way, ())) as recorders:
            engine = bench.engine(**changes)
        (drafts,) = recorders
        bench.run(way, engine, "greedy", drafts)
    for history in bench.compared(drafts):
        assert drafts[history] == bench.scores(history)[1][:K]


def test_what_is_loaded(bench: Bench) -> None:
    folder = bench.target.folder
    target, source = load_model(folder, 128), resolve_model(ModelOptions(model=str(folder)))
    draft = block_bench.load(bench.folder / "draft", target, source, bench.draft.kind)
    assert draft.aux_layer_ids == bench.boundaries
    assert draft.config.mask_token_id == bench.draft.mask_token
    tokens = torch.arange(bench.draft.flat["vocab_size"])
    assert torch.equal(draft.embed(tokens).double(), bench.reference.embed)
    d2t = bench.reference.tensors.get("d2t")
    if d2t is None:
        assert draft.head is target.output_head
        assert draft.target_ids is None
    else:
        assert draft.head is not target.output_head
        assert torch.equal(draft.target_ids, d2t + torch.arange(len(d2t)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_target_layers": 61}, "num_target_layers is 61 and the target's num_hidden_layers"),
        ({"vocab_size": 163840}, "vocab_size is 163840"),
        ({"hidden_size": 64}, "target_hidden_size is 64"),
        ({"target_layer_ids": [1, 2, 4, 7]}, "the output of the last of 8 layers"),
        ({"mask_token_id": 163838}, "mask_token_id should be a token of"),
    ],
)
def test_drafts_for_another_kimi_are_refused(
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """The numbers compared are those of the nested text config."""
    folder = engines.write_target("kimi_k25", tmp_path / "target", byte_level_tokenizer)
    fields = {"vocab_size": len(byte_level_tokenizer), **changes}
    draft = engines.write_draft("kimi", tmp_path / "draft", **fields)
    with pytest.raises(ConfigError, match=message):
        create_engine(folder, method="dflash", draft_model=str(draft), num_speculative_tokens=K)
