"""P-EAGLE: all drafts of one pass equal those of a dense causal pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_ops.batches import Part
from spec_decode import draft_bench
from spec_decode.block_bench import RecordedChoice, step_of
from spec_decode.draft_bench import HIDDEN, MHA, PARALLEL, VOCAB
from spec_decode.eagle3_reference import ReferenceDraft

from atom.config import ConfigError
from atom.graphs.recorded import Recordable, Recording, StepRecorder
from atom.kv_cache.builders import bind_kv_caches
from atom.model_loader.errors import WeightError
from atom.model_loader.source import ModelSource
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.torch.speculation import place_drafts
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM
from atom.models.eagle3.base import Eagle3Draft
from atom.models.eagle3.config import Eagle3Config
from atom.platform import cpu_platform
from atom.spec_decode.eagle3_draft_builder import Eagle3DraftBuilder
from atom.spec_decode.proposers.base import DraftSampler
from atom.spec_decode.proposers.block_proposer import BlockProposer
from atom.spec_decode.proposers.eagle3 import ParallelEagleModel

Target = tuple[CausalLM, ModelSource]
MASK, LAYERS = PARALLEL["ptd_token_id"], PARALLEL["num_hidden_layers"]
NATIVE: dict[str, Any] = {
    **PARALLEL,
    "expected_acceptance_length": {
        "tokens_per_forward": 2.5,
        "num_speculative_tokens": 5,
        "data": "none",
    },
}
_LAYER = {
    key: MHA[key] for key in MHA if key not in ("architectures", "eagle_config", "draft_vocab_size")
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "speculators_version": "0.9.0",
    "speculators_config": {"algorithm": "peagle"},
    "transformer_layer_config": {**_LAYER, "num_hidden_layers": LAYERS},
    "draft_vocab_size": MHA["draft_vocab_size"],
    "eagle_aux_hidden_state_layer_ids": [1, 4, 5],
    "norm_before_fc": True,
    "mask_token_id": MASK,
}


def tensors_of(raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A random checkpoint."""
    return draft_bench.parallel_tensors({**NATIVE, **raw})


class Reference(ReferenceDraft):
    """One causal pass over the rows of the text and the masks, through all layers."""

    def scores(self, next_tokens: list[int], aux: list[torch.Tensor], k: int) -> torch.Tensor:
        """[k, draft vocabulary]."""
        mask = list(self.tensors["mask_hidden"].view(1, -1).chunk(len(aux), -1))
        hidden = torch.cat([self.fuse(aux), self.fuse(mask).expand(k - 1, -1)])
        tokens = torch.tensor(next_tokens + [MASK] * (k - 1))
        _, state = self.forward(tokens, hidden)
        own = self.tensors
        for i in range(1, LAYERS):
            name = f"layers.{i}."
            self.tensors = {
                key.replace(name, "midlayer."): value
                for key, value in own.items()
                if not key.startswith("midlayer.")
            }
            x = self.norm(state, "midlayer.input_layernorm")
            state = state + self.mha(x)
            x = self.norm(state, "midlayer.post_attention_layernorm")
            gate = torch.nn.functional.silu(self.linear(x, "mlp.gate_proj"))
            state = state + self.linear(gate * self.linear(x, "mlp.up_proj"), "mlp.down_proj")
        self.tensors = own
        return self.norm(state[-k:], "norm") @ self.head.T

    def fuse(self, aux: list[torch.Tensor]) -> torch.Tensor:
        states = torch.cat(aux, -1).double()
        if "input_norm.weight" in self.tensors:
            states = self.norm(states, "input_norm")
        return states @ self.tensors["fc.weight"].T


def proposer_of(
    model: Eagle3Draft,
    place: Callable[..., Any] = place_drafts,
    choice: DraftSampler | None = None,
) -> BlockProposer:
    """Of up to 5 drafts, with an empty cache of 16 blocks of 4 tokens."""
    builder = Eagle3DraftBuilder(model, 4, torch.float32, draft_bench.CPU)
    choice = choice or DraftSampler(model.target_ids)
    proposer = BlockProposer(ParallelEagleModel(model), builder, 5, 4, 128, place, choice)
    builder.allocate_kv_cache_tensors(16)
    bind_kv_caches(model, [builder])
    return proposer


def random_text() -> tuple[list[int], list[torch.Tensor]]:
    """12 tokens, and three hidden states of each."""
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(0, VOCAB, (12,), generator=generator).tolist()
    return tokens, list(torch.randn(3, 12, HIDDEN, generator=generator) * 3)


@pytest.mark.parametrize("raw", [NATIVE, SPECULATORS], ids=["native", "speculators"])
def test_drafts_equal_those_of_one_dense_pass(
    raw: dict[str, Any], tmp_path: Path, llama_target: Target
) -> None:
    """Whole, and in chunks with a step without drafts between."""
    tensors = tensors_of(raw)
    model = draft_bench.load(draft_bench.write_draft(tmp_path, raw, tensors), *llama_target)
    embed, head = llama_target[0].token_embedding.weight, llama_target[0].output_head.weight
    double = {k: v.double() if v.is_floating_point() else v for k, v in tensors.items()}
    reference = Reference({**NATIVE, **raw}, double, embed.double(), head.double())
    choice = RecordedChoice(model.target_ids)
    proposer = proposer_of(model, choice=choice)
    assert (proposer.lookahead.expected_acceptance is not None) == (raw is NATIVE)
    tokens, aux = random_text()

    def check(blocks: list[int], begin: int, end: int) -> None:
        rows = [a[begin:end] for a in aux]
        step = step_of(
            [Part(end - begin, begin, blocks)], rows, tokens[begin:end], [end - begin - 1], 4
        )
        choice.logits = []
        with torch.inference_mode():
            (drafts,) = proposer.propose(step, 5).token_ids.tolist()
        expected = reference.scores(tokens[:end], [a[:end] for a in aux], 5)
        torch.testing.assert_close(torch.cat(choice.logits).double(), expected, atol=1e-4, rtol=0)
        best = expected.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-4, "no tie"
        assert drafts == [reference.to_target(int(row.argmax())) for row in expected]

    check([3, 9, 1, 14], 0, 10)
    blocks = [5, 0, 12, 7]
    with torch.inference_mode():
        first = step_of([Part(4, 0, blocks)], [a[:4] for a in aux], tokens[:4], [3], 4)
        proposer.propose(first, 5)
        second = step_of([Part(5, 4, blocks)], [a[4:9] for a in aux], tokens[4:9], [4], 4)
        proposer.propose(second, 0)
    check(blocks, 9, 11)


@pytest.mark.skipif(native_build().reason is not None, reason=str(native_build().reason))
def test_the_first_proposal_of_all_may_be_recorded(tmp_path: Path, llama_target: Target) -> None:
    """Recorded under several keys, it is the one that is made op by op."""
    folder = draft_bench.write_draft(tmp_path, NATIVE, tensors_of(NATIVE))
    model = draft_bench.load(folder, *llama_target)
    ops = LayerContext.create(torch.float32, 128, cpu_platform()).ops
    place = ops.resolve("place_drafts", torch.float32)
    tokens, aux = random_text()
    step = replace(
        step_of([Part(12, 0, [3, 9, 1, 14, 0])], aux, tokens, [11], 4), draft_sampling=None
    )
    recorder, recorded = StepRecorder(), proposer_of(model, place=place)
    known: dict[Hashable, Recording[Any]] = {}

    def replayed(num_drafts: int) -> list[list[int]]:
        work = Recordable(
            "drafting",
            num_drafts,
            step.tensors,
            lambda: recorded.propose(step, num_drafts),
            lambda made: made.tensors,
        )
        proposal = recorder.run(known, num_drafts, lambda: work)
        return proposal.token_ids.tolist()

    numbers = (5, 3, 4, 5)
    with torch.inference_mode():
        found = [replayed(n) for n in numbers]
        assert recorder.was_replayed
        op_by_op = proposer_of(model, place=place)
        assert found == [op_by_op.propose(step, n).token_ids.tolist() for n in numbers]


def test_a_mask_state_is_required(tmp_path: Path, llama_target: Target) -> None:
    tensors = tensors_of(NATIVE)
    del tensors["mask_hidden"]
    with pytest.raises(WeightError, match="mask_hidden"):
        draft_bench.load(draft_bench.write_draft(tmp_path, NATIVE, tensors), *llama_target)


@pytest.mark.parametrize(
    ("raw", "changes", "message"),
    [
        (NATIVE, {"ptd_token_id": None}, "no mask token"),
        (NATIVE, {"num_hidden_layers": None}, "num_hidden_layers"),
        (NATIVE, {"parallel_drafting": False}, "parallel_drafting=false"),
        (SPECULATORS, {"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        (SPECULATORS, {"transformer_layer_config": {**_LAYER, "model_type": "qwen3"}}, "'qwen3'"),
    ],
)
def test_what_is_refused(raw: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Eagle3Config.from_dict({**raw, **changes})


def test_ids_of_the_speculators_layout_are_boundaries() -> None:
    aux = Eagle3Config.from_dict(SPECULATORS).aux_layers
    assert aux is not None
    assert aux.resolve(8) == ((1, 4, 5), "boundary")
