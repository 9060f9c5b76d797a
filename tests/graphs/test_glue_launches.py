"""How many kernels a step launches beside its decoder layers: each is a node of its graphs.

The graphs of a step that decodes are captured as the engine does, on tensors that hold no data:
the target's without its decoder layers, the choice of tokens with verification, and all of the
drafts, the draft's own layers included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from graphs.launch_count import (
    BATCH,
    BLOCK_SIZE,
    CONTEXT,
    KIMI,
    LLAMA,
    META,
    Launches,
    assert_at_most,
    context_for,
    count_triton,
    rank_of,
    without,
)
from transformers import PretrainedConfig

from atom.graphs.capture import GraphKey, GraphPlan
from atom.graphs.runner import GraphRunner
from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.paged import PagedCache
from atom.model_engine.step.input_buffers import GraphInput, TakeOp
from atom.model_engine.step.input_builder import InputBuilder
from atom.model_engine.step.step_graphs import StepGraphs
from atom.model_ops.attention.metadata import AttentionMetadata, ModelInput
from atom.model_ops.layer_context import LayerContext
from atom.models.eagle3.config import Eagle3Config
from atom.models.eagle3.deepseek import Eagle3DeepseekV2ForCausalLM
from atom.models.eagle3.llama import LlamaForCausalLMEagle3
from atom.models.eagle3.parts import DraftParts
from atom.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from atom.models.moe.deepseek_v2 import DeepseekV3ForCausalLM
from atom.sampling.ops import SamplingOps
from atom.sampling.rows import SamplingRows
from atom.sampling.sampler import Sampler
from atom.spec_decode.proposers.base import DraftSampler, NullProposer, Proposer
from atom.spec_decode.proposers.chain_proposer import ChainProposer
from atom.spec_decode.proposers.eagle3 import Eagle3Chain

pytest.importorskip("triton")

K = 3
COMMON = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "draft_vocab_size": 32000,
    "max_position_embeddings": CONTEXT,
}
LLAMA_DRAFT = COMMON | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
# Eagle 3.1.
KIMI_DRAFT = COMMON | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "fc_norm": True,
    "norm_output": True,
}
MODELS: dict[str, tuple[PretrainedConfig, dict[str, Any], Any, Any]] = {
    "llama": (LLAMA, LLAMA_DRAFT, LlamaForCausalLM, LlamaForCausalLMEagle3),
    "kimi": (KIMI, KIMI_DRAFT, DeepseekV3ForCausalLM, Eagle3DeepseekV2ForCausalLM),
}


@dataclass
class CountingBackend:
    """Lists what each capture would launch, in order of the captures."""

    seen: Launches
    captured: list[list[str]] = field(default_factory=list)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()  # what all steps share is made here
        self.seen.names.clear()
        with self.seen:
            work()
        self.captured.append(list(self.seen.names))
        return work


def integers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=META)


@dataclass(frozen=True)
class Inputs:
    """Where graphs find their inputs."""

    drafts: bool
    take: TakeOp

    def graph_input(self, key: GraphKey) -> GraphInput:
        size, tokens, query_len = key.batch_size, key.num_rows, key.query_len
        lens = integers(size, dtype=torch.int32)
        width = -(-key.max_context_len // BLOCK_SIZE)
        attention = AttentionMetadata(
            slot_mapping=integers(tokens),
            block_tables=integers(size, width, dtype=torch.int32),
            block_counts=lens,
            context_lens=lens,
            cu_seqlens_q=integers(size + 1, dtype=torch.int32),
            max_seqlen_q=query_len,
            max_context_len=key.max_context_len,
            query_lens_cpu=(query_len,) * size,
            context_lens_cpu=None,
            padding_lens=lens,
        )
        return GraphInput(
            ModelInput(integers(tokens), integers(tokens), attention),
            integers(tokens),
            integers(size),
            integers(size),
            integers(tokens) if self.drafts else None,
            integers(64, width, dtype=torch.int32),
            self.take,
        )


def bind(model: torch.nn.Module, context: LayerContext) -> PagedCache:
    for module in model.modules():
        if convert := getattr(module, "process_after_loading", None):
            convert()
    cache = PagedCache(attention_layers(model), BLOCK_SIZE, context.dtype, META)
    cache.allocate_kv_cache_tensors(BATCH * CONTEXT // BLOCK_SIZE)
    bind_kv_caches(model, [cache])
    return cache


def proposer_of(
    raw: dict[str, Any], draft_class: Any, aux: tuple[int, ...], context: LayerContext
) -> ChainProposer:
    config = Eagle3Config.from_dict(raw)
    draft = draft_class(config, DraftParts(True, True, True), aux, context)
    limits = K, BLOCK_SIZE, CONTEXT
    choose = context.ops.resolve("choose_drafts", torch.float32, vocab_size=config.draft_vocab_size)
    place = context.ops.resolve("place_drafts", context.dtype)
    choice = DraftSampler(draft.target_ids, op=choose)
    return ChainProposer(Eagle3Chain(draft), bind(draft, context), *limits, place, choice)


def without_layers(patch: pytest.MonkeyPatch) -> None:
    """Decoder layers launch nothing."""
    patch.setattr(LlamaDecoderLayer, "enter", lambda _, hidden, residual: (hidden, hidden))
    patch.setattr(LlamaDecoderLayer, "forward", lambda _, hidden, residual, *__: (hidden, residual))


def step_launches(
    name: str, num_drafts: int, size: int, arch: str, num_ranks: int, patch: pytest.MonkeyPatch
) -> dict[str, list[str]]:
    """Of each graph of a step: `layers`, `greedy`, ... and `drafts`, `racing drafts`."""
    seen = Launches()
    group = rank_of(num_ranks, seen)
    context = context_for(arch, without("aiter", "flash_mla"), patch, group)
    config, raw, model_class, draft_class = MODELS[name]
    without_layers(patch)
    count_triton(seen, patch)
    model = model_class(config, context)
    bind(model, context)
    backend = CountingBackend(seen)
    plan = GraphPlan(backend, (size,), (CONTEXT,), (1 + num_drafts,), BLOCK_SIZE, META)
    proposer: Proposer = NullProposer()
    if num_drafts:
        aux = model.default_aux_layer_ids()
        model.set_aux_layer_ids(aux)
        proposer = proposer_of(raw, draft_class, aux, context)
    ops = SamplingOps.resolve(context.ops, config.vocab_size)
    rows = SamplingRows(64, config.vocab_size, frozenset(), META, None)
    greedily = model.output_head.choose_greedily if num_ranks > 1 else None
    inputs = Inputs(num_drafts > 0, context.ops.resolve("take_inputs", context.dtype))
    graphs = StepGraphs(
        GraphRunner(model.forward, plan),
        cast(InputBuilder, inputs),
        Sampler(
            model.compute_logits,
            rows,
            config.vocab_size,
            META,
            ops,
            group,
            choose_greedily=greedily,
        ),
        proposer,
        (num_drafts,) if num_drafts else (),
        synthetic=False,
    )
    graphs.capture()
    choices = "filtered", "sampled", "greedy"
    names = "layers", *choices, *(("drafts", "racing drafts") if num_drafts else ())
    return dict(zip(names, backend.captured, strict=True))


# Of the layers' graph, of the choice of greedy tokens, and of greedy drafts.
ALONE = {
    ("llama", 0): (4, 4, 0),
    ("llama", K): (4, 6, 51),
    ("kimi", 0): (4, 4, 0),
    ("kimi", K): (4, 6, 65),
}
# On a rank of eight, whose drafts are split, too.
OF_EIGHT = {
    ("llama", 0): (6, 5, 0),
    ("llama", K): (6, 7, 66),
    ("kimi", 0): (6, 5, 0),
    ("kimi", K): (6, 7, 80),
}
# More for drafts that draft_sampling, at a temperature and with filters.
RACING = 31


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
@pytest.mark.parametrize("size", [1, BATCH])
@pytest.mark.parametrize(("name", "num_drafts"), list(ALONE))
def test_of_one_rank(
    name: str, num_drafts: int, size: int, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = step_launches(name, num_drafts, size, arch, 1, monkeypatch)
    layers, choice, drafts = ALONE[name, num_drafts]
    assert_at_most(layers, found["layers"])
    assert_at_most(choice, found["greedy"])
    assert_at_most(choice + 3, found["sampled"])
    assert_at_most(choice + 11, found["filtered"])
    if num_drafts:
        assert_at_most(drafts, found["drafts"])
        assert_at_most(drafts + RACING, found["racing drafts"])


@pytest.mark.parametrize("size", [1, BATCH])
@pytest.mark.parametrize(("name", "num_drafts"), list(OF_EIGHT))
def test_of_a_rank_of_eight(
    name: str, num_drafts: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = step_launches(name, num_drafts, size, "sm90", 8, monkeypatch)
    layers, choice, drafts = OF_EIGHT[name, num_drafts]
    assert_at_most(layers, found["layers"])
    assert_at_most(choice, found["greedy"])
    assert_at_most(choice + 5, found["sampled"])
    assert_at_most(choice + 13, found["filtered"])
    if num_drafts:
        assert_at_most(drafts, found["drafts"])
        assert_at_most(drafts + RACING, found["racing drafts"])
