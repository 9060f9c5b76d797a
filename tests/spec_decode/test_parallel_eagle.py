"""P-EAGLE: all drafts of one pass equal those of a dense causal pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_ops.batches import Part
from spec_decode import draft_bench
from spec_decode.block_bench import step_of
from spec_decode.draft_bench import HIDDEN, MHA, VOCAB
from spec_decode.eagle3_reference import ReferenceDraft

from atom.config import ConfigError
from atom.kv_cache.builders import bind_kv_caches
from atom.model_loader.errors import WeightError
from atom.model_loader.source import ModelSource
from atom.models.base import CausalLM
from atom.models.eagle3.config import Eagle3Config
from atom.spec_decode.eagle3_draft_builder import Eagle3DraftBuilder
from atom.spec_decode.parallel_eagle import ParallelEagleProposer

Target = tuple[CausalLM, ModelSource]
MASK, LAYERS = 7, 3
NATIVE: dict[str, Any] = {
    **MHA,
    "architectures": ["PeagleLlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "ptd_token_id": MASK,
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
    """A random checkpoint: an Eagle3 draft's, and what P-EAGLE adds."""
    flat = {**NATIVE, **raw}
    tensors = draft_bench.draft_tensors({**MHA, "draft_vocab_size": flat["draft_vocab_size"]})
    generator = torch.Generator().manual_seed(5)
    wide = 3 * HIDDEN
    shapes: dict[str, tuple[int, ...]] = {"mask_hidden": (1, 1, wide)}
    for i in range(1, LAYERS):
        for name, tensor in list(tensors.items()):
            if not name.startswith("midlayer.") or "hidden_norm" in name:
                continue
            shape = list(tensor.shape)
            if any(f".{part}_proj." in name for part in "qkv"):
                shape[1] = HIDDEN
            shapes[name.replace("midlayer", f"layers.{i}")] = tuple(shape)
    if flat.get("norm_before_fc"):
        shapes["input_norm.weight"] = (wide,)
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = noise * 0.3 + 1 if "norm" in name else noise * 0.2
    return tensors


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
    builder = Eagle3DraftBuilder(model, 4, torch.float32, draft_bench.CPU)
    proposer = ParallelEagleProposer(model, builder, 5, 4, 128)
    assert (proposer.lookahead.expected_acceptance is not None) == (raw is NATIVE)
    builder.allocate_kv_cache_tensors(16)
    bind_kv_caches(model, [builder])
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(0, VOCAB, (12,), generator=generator).tolist()
    aux = list(torch.randn(3, 12, HIDDEN, generator=generator) * 3)

    def check(blocks: list[int], begin: int, end: int) -> None:
        rows = [a[begin:end] for a in aux]
        step = step_of(
            [Part(end - begin, begin, blocks)], rows, tokens[begin:end], [end - begin - 1], 4
        )
        with torch.inference_mode():
            (drafts,) = proposer.propose(step, 5).token_ids.tolist()
        expected = reference.scores(tokens[:end], [a[:end] for a in aux], 5)
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
