"""The Eagle3 chain as the engine runs it, against a dense reading of it in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from safetensors.torch import load_file
from spec_decode import engines
from spec_decode.eagle3_reference import ReferenceDraft
from spec_decode.engines import create_engine, generate, params
from transformers import PreTrainedTokenizerFast

from atom import SamplingParams
from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.torch.sampling import choose_tokens
from atom.models.eagle3.base import Eagle3Draft
from atom.spec_decode.draft_policy import DraftNumbers
from atom.spec_decode.drafter import Drafter
from atom.spec_decode.proposers.base import DraftSampler, Proposal, VerifiedStep
from atom.spec_decode.proposers.chain_proposer import ChainProposer
from atom.spec_decode.proposers.eagle3 import Eagle3Chain

K = 3
NEW_TOKENS = 14
AUX = [0, 2, 3]
# The longest is computed in chunks, and by the prompts' path.
PROMPTS = [checkpoints.prompt(n, seed=n) for n in (1, 4, 9, 16, 70)] + [checkpoints.prompt(5) * 4]
SAMPLING = [
    params("greedy", max_tokens=NEW_TOKENS),
    params("warm", max_tokens=NEW_TOKENS, temperature=0.8),
]


class Reading:
    """What the draft proposes behind a text, in float64."""

    def __init__(self, target: checkpoints.Checkpoint, kind: str, folder: Path) -> None:
        self._target = target.reference.double()
        self._target.set_experts_implementation("eager")
        # The last hidden states that transformers returns are normed.
        self._last: list[torch.Tensor] = []
        norm = self._target.model.norm
        norm.register_forward_pre_hook(lambda _, inputs: self._last.append(inputs[0]))
        tensors = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
        tensors = {n: t.long() if n in ("d2t", "t2d") else t for n, t in tensors.items()}
        raw = engines.EAGLE_DRAFTS[kind] | {"hidden_size": engines.HIDDEN}
        embed = self._target.get_input_embeddings().weight
        head = self._target.get_output_embeddings().weight
        self._draft = ReferenceDraft(raw, tensors, embed, head)
        self._vocab_size = len(head)

    @torch.inference_mode()
    def propose(self, text: list[int], sampling: SamplingParams) -> list[int]:
        self._last.clear()
        states = self._target(torch.tensor([text]), output_hidden_states=True).hidden_states
        states = (*states[:-1], self._last[0])
        fused = self._draft.fuse([states[layer][0, :-1] for layer in AUX])
        tokens, drafts = text[1:], []
        for _ in range(K):
            post, fed = self._draft.forward(torch.tensor(tokens), fused)
            drafts.append(self._choose(post[-1] @ self._draft.head.T, sampling, len(tokens) + 1))
            tokens, fused = [*tokens, drafts[-1]], torch.cat([fused, fed[-1:]])
        return drafts

    def _choose(self, logits: torch.Tensor, sampling: SamplingParams, position: int) -> int:
        """The token that the target would sample there, had it these logits."""
        ids = torch.tensor([self._draft.to_target(i) for i in range(len(logits))])
        every = torch.full((1, self._vocab_size), -torch.inf)
        every[0, ids] = logits.float()
        if sampling.is_greedy:
            return int(every.argmax())
        place = SamplingMetadata(
            temperature=torch.tensor([sampling.temperature]),
            seeds=torch.tensor([sampling.seed or 0]),
            positions=torch.tensor([position]),
        )
        return int(choose_tokens(every, place))


@pytest.fixture
def check(
    tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], None]:
    def check(target_kind: str, draft_kind: str) -> None:
        checkpoint = engines.write_checkpoint(
            target_kind, tmp_path / "target", byte_level_tokenizer
        )
        draft = engines.write_draft(draft_kind, tmp_path / "draft", len(byte_level_tokenizer))
        reading = Reading(checkpoint, draft_kind, draft)
        # Every third step makes no drafts, and the next one builds on what it wrote.
        turns, begin = itertools.count(), Drafter.begin

        def sometimes(self: Drafter, num_drafting: int) -> DraftNumbers:
            numbers = begin(self, num_drafting)
            return DraftNumbers() if next(turns) % 3 == 2 else numbers

        monkeypatch.setattr(Drafter, "begin", sometimes)
        with engines.drafts_recorded(monkeypatch) as recorders:
            engine = create_engine(
                checkpoint.folder,
                method="eagle3",
                draft_model=str(draft),
                num_speculative_tokens=K,
                speculative_adaptive=False,
                max_num_batched_tokens=64,
            )
        drafts = recorders[0]
        for sampling in SAMPLING:
            drafts.clear()
            generate(engine, sampling, PROMPTS)
            made = {text: tokens for text, tokens in drafts.items() if tokens}
            assert 0 < len(made) < len(drafts)
            whole = [text for text in made if [*text] in [[*p, text[-1]] for p in PROMPTS]]
            for text in [*whole, *[*made][::3]]:
                (prompt,) = (p for p in PROMPTS if [*text[: len(p)]] == p)
                # No blocks are kept for drafts past the last token.
                room = max(len(prompt) + NEW_TOKENS - len(text) - 1, 0)
                expected = reading.propose([*text], sampling)
                assert made[text][:room] == expected[:room], (sampling.temperature, len(text))

    return check


@pytest.mark.parametrize(
    ("target", "draft"), [("llama", "mha"), ("llama", "mla"), ("deepseek_v3", "mha")]
)
def test_drafts_are_those_of_the_reading(
    target: str, draft: str, check: Callable[[str, str], None]
) -> None:
    check(target, draft)


def _aux_in_another_order(patch: pytest.MonkeyPatch) -> None:
    fuse = Eagle3Draft.fuse
    patch.setattr(Eagle3Draft, "fuse", lambda self, aux: fuse(self, aux[::-1]))


def _no_shift(patch: pytest.MonkeyPatch) -> None:
    propose = ChainProposer.propose

    def faulty(self: ChainProposer, step: VerifiedStep, num_drafts: int) -> Proposal:
        unshifted = replace(step, next_token_ids=step.model_input.input_ids)
        return propose(self, unshifted, num_drafts)

    patch.setattr(ChainProposer, "propose", faulty)


def _prompts_write_nothing(patch: pytest.MonkeyPatch) -> None:
    create = Eagle3Chain.__init__

    def faulty(self: Eagle3Chain, *arguments: Any, **options: Any) -> None:
        create(self, *arguments, **options)
        write = self.write_kv
        self.write_kv = (  # type: ignore[method-assign]
            lambda rows, hidden: write(rows, hidden) if len(rows.input_ids) < 20 else None
        )

    patch.setattr(Eagle3Chain, "__init__", faulty)


def _sampled_a_place_early(patch: pytest.MonkeyPatch) -> None:
    choose = DraftSampler.choose

    def faulty(self: DraftSampler, *arguments: Any) -> Any:
        *others, ahead = arguments
        return choose(self, *others, ahead - 1)

    patch.setattr(DraftSampler, "choose", faulty)


def _steps_without_drafts_write_nothing(patch: pytest.MonkeyPatch) -> None:
    propose = ChainProposer.propose

    def faulty(self: ChainProposer, step: VerifiedStep, num_drafts: int) -> Proposal:
        return propose(self, step, num_drafts) if num_drafts else Proposal.empty(step)

    patch.setattr(ChainProposer, "propose", faulty)


FAULTS = (
    _aux_in_another_order,
    _no_shift,
    _prompts_write_nothing,
    _sampled_a_place_early,
    _steps_without_drafts_write_nothing,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_faults_show(
    fault: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="assert "):
        check("llama", "mha")
