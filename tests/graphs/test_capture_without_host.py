"""What a graph captures asks the device for nothing, and copies nothing to it.

Run on tensors that hold no data, with the ops of a GPU: a question raises, a copy is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs.pretended_graphs import leaves_of
from lone_rank import lone_rank
from models import checkpoints
from models.families import write_family
from spec_decode import draft_bench
from spec_decode.engines import EAGLE_DRAFTS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from atom.graphs.capture import CapturedWork, GraphKey, GraphPlan, ReexecuteBackend
from atom.graphs.runner import GraphRunner
from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.paged import PagedCache
from atom.model_engine.step.input_buffers import GraphInput
from atom.model_loader.drafts.tokenizer import TokenMaps
from atom.model_ops.attention.metadata import (
    AttentionMetadata,
    ModelInput,
    ModelOutput,
    SamplingMetadata,
)
from atom.model_ops.kernels.torch.speculation import place_drafts
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpTable
from atom.models.base import CausalLM
from atom.models.eagle3.config import Eagle3Config
from atom.models.eagle3.deepseek import Eagle3DeepseekV2ForCausalLM
from atom.models.eagle3.llama import LlamaForCausalLMEagle3
from atom.models.eagle3.parts import DraftParts
from atom.models.layers.mtp import MTPParts, PredictionLayers
from atom.models.moe.deepseek_v2 import DeepseekV3ForCausalLM
from atom.models.registry import create_model
from atom.platform import Platform
from atom.sampling.ops import SamplingOps
from atom.sampling.plan import KINDS, DecodeRows
from atom.sampling.rows import SamplingRows
from atom.sampling.sampler import Sampler
from atom.spec_decode.proposers.base import DraftSampler, Proposer, VerifiedStep
from atom.spec_decode.proposers.block_proposer import BlockProposer
from atom.spec_decode.proposers.chain_proposer import ChainProposer
from atom.spec_decode.proposers.draft_model import DraftModelChain
from atom.spec_decode.proposers.eagle3 import Eagle3Chain, ParallelEagleModel
from atom.spec_decode.proposers.mtp import MTPChain

BLOCK_SIZE = 4
AUX = (0, 2, 3)
Make = Callable[..., checkpoints.Checkpoint]


class NoHostTensors(TorchDispatchMode):
    """Fails for an operation on a tensor of the host's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in leaves_of((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                raise AssertionError(f"{func} has a tensor on the host: {tuple(leaf.shape)}")
        return out


class NoHostNumbers(TorchFunctionMode):
    """Fails where numbers of the host's become a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_index = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
        if func in (torch.tensor, torch.as_tensor, torch.from_numpy) or (
            is_index and any(isinstance(part, list) for part in (args[1], *_parts(args[1])))
        ):
            raise AssertionError(f"{func} copies numbers from the host")
        return func(*args, **(kwargs or {}))


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else ()


@contextmanager
def nothing_from_the_host() -> Iterator[None]:
    with NoHostTensors(), NoHostNumbers():
        yield


RANKS = {1: "one rank", 4: "a rank of four"}


def on_ranks(name: str, **cases: tuple[Any, int]) -> pytest.MarkDecorator:
    """Each case with one rank and on a rank of four; each commit asks one of the two.

    Args:
        cases: values of the parameter `name` by their ids, and the ranks of each commit.
    """
    return pytest.mark.parametrize(
        ("on_no_device", name),
        [
            pytest.param(
                size,
                value,
                id=f"{ranks}-{case}",
                marks=() if size == often else pytest.mark.slow,
            )
            for case, (value, often) in cases.items()
            for size, ranks in RANKS.items()
        ],
        indirect=["on_no_device"],
    )


@pytest.fixture(params=RANKS, ids=RANKS.values())
def on_no_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LayerContext:
    """Layers whose tensors hold nothing, so that asking for a number raises; ops as on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    # Those of plain torch: a kernel of our own cannot run on tensors that hold no data.
    torch_ops = {op: tuple(i for i in OPS[op] if i.name == "torch") for op in OPS}
    ops = OpTable(Platform("cuda", "sm90", True), torch_ops)
    group, _ = lone_rank(request.param - 1, request.param)
    return LayerContext(torch.float32, torch.device("meta"), ops, 128, group)


def choose(
    scores: torch.Tensor, options: SamplingMetadata, *_: object
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As a kernel, whose code holds the constants of the noise; those of plain torch are here."""
    chosen = scores.argmax(-1)
    return chosen if options.positions is None else chosen + 0 * options.positions, None


def plan_of(context: LayerContext) -> GraphPlan:
    return GraphPlan(ReexecuteBackend(), (1, 2, 4), (16, 48), (1, 3), BLOCK_SIZE, context.device)


def bind(model: torch.nn.Module, context: LayerContext) -> PagedCache:
    layers = attention_layers(model)
    cache = PagedCache(layers, BLOCK_SIZE, context.dtype, context.device)
    cache.allocate_kv_cache_tensors(8)
    bind_kv_caches(model, [cache])
    return cache


def target_on(context: LayerContext, make: Make, folder: Path, **fields: Any) -> CausalLM:
    make(folder, **fields)
    return create_model(AutoConfig.from_pretrained(folder), context)


def padding(key: GraphKey, plan: GraphPlan) -> ModelInput:
    """Tensors of a graph's shapes."""
    size, tokens, query_len = key.batch_size, key.num_rows, key.query_len
    at = torch.zeros(tokens, dtype=torch.int64, device=plan.device)
    each = torch.zeros(size, dtype=torch.int32, device=plan.device)
    return ModelInput(
        at,
        at,
        AttentionMetadata(
            slot_mapping=at,
            block_tables=each[:, None].expand(size, plan.table_width).contiguous(),
            block_counts=each,
            context_lens=each,
            cu_seqlens_q=torch.zeros(size + 1, dtype=torch.int32, device=plan.device),
            max_seqlen_q=query_len,
            max_context_len=key.max_context_len,
            query_lens_cpu=(query_len,) * size,
            context_lens_cpu=None,
        ),
    )


def glm_moe_dsa(folder: Path, **fields: Any) -> checkpoints.Checkpoint:
    return write_family("glm_moe_dsa", folder, **fields)


@on_ranks(
    "make",
    llama=(checkpoints.llama, 4),
    qwen3=(checkpoints.qwen3, 1),
    deepseek_v3=(checkpoints.deepseek_v3, 1),
    glm_moe_dsa=(glm_moe_dsa, 4),
)
def test_a_target_asks_the_device_for_nothing(
    make: Make, on_no_device: LayerContext, tmp_path: Path
) -> None:
    model = target_on(on_no_device, make, tmp_path)
    model.set_aux_layer_ids(AUX)
    bind(model, on_no_device)
    plan = plan_of(on_no_device)
    runner = GraphRunner(model.forward, plan)

    def inputs(key: GraphKey) -> Callable[[], ModelInput]:
        model_input = padding(key, plan)
        rows = torch.zeros(key.batch_size, dtype=torch.int64, device=plan.device)
        tables = torch.zeros(8, plan.table_width, dtype=torch.int32, device=plan.device)
        ids = model_input.input_ids
        return GraphInput(model_input, ids, rows, rows, None, tables).read

    with nothing_from_the_host():
        runner.capture(inputs)


def check_drafts(proposer: Proposer, context: LayerContext, width: int, aux: int) -> None:
    """All that a proposer does after a step: its first pass, the chain, what is left without."""
    plan = plan_of(context)
    graphs = CapturedWork(plan.backend)
    hidden = torch.zeros(12, width, device=context.device)

    def step(key: GraphKey, is_sampled: bool) -> VerifiedStep:
        model_input = padding(key, plan)
        last = model_input.attention.block_counts.long()
        options = torch.zeros(4, len(last), device=plan.device)
        draft_sampling = SamplingMetadata(options[0], None, options[1], options[2], last)
        return VerifiedStep(
            [],
            model_input,
            ModelOutput(hidden[: key.num_rows], (hidden[: key.num_rows],) * aux),
            model_input.input_ids,
            last,
            None,
            draft_sampling if is_sampled else None,
        )

    def propose(key: GraphKey, num_drafts: int, is_sampled: bool) -> list[torch.Tensor]:
        return proposer.propose(step(key, is_sampled), num_drafts).tensors

    with torch.inference_mode(), nothing_from_the_host():
        # Graphs differ in sizes alone, and most of the time goes into the ops' own code.
        for key in (GraphKey(1, 3, 16, "draft"), GraphKey(4, 3, 48, "draft")):
            for num_drafts, is_sampled in ((0, False), (4, False), (4, True)):
                work = partial(propose, key, num_drafts, is_sampled)
                graphs.capture(key, work, work())


@on_ranks(
    "kind", **{kind: (kind, size) for kind, size in zip(EAGLE_DRAFTS, (4, 1, 4), strict=True)}
)
def test_eagle3_drafts_ask_the_device_for_nothing(
    kind: str, on_no_device: LayerContext, tmp_path: Path
) -> None:
    raw = EAGLE_DRAFTS[kind]
    draft_bench.write_draft(tmp_path, raw, draft_bench.draft_tensors(raw))
    draft_class = Eagle3DeepseekV2ForCausalLM if kind == "mla" else LlamaForCausalLMEagle3
    config = Eagle3Config.from_folder(tmp_path)
    draft = draft_class(config, DraftParts(True, True, True), AUX, on_no_device)
    limits, choice = (bind(draft, on_no_device), 4, BLOCK_SIZE, 128), DraftSampler(op=choose)
    proposer: Proposer = ChainProposer(Eagle3Chain(draft), *limits, place_drafts, choice)
    if kind == "peagle":
        proposer = BlockProposer(ParallelEagleModel(draft), *limits, place_drafts, choice)
    check_drafts(proposer, on_no_device, draft_bench.HIDDEN, len(AUX))


def test_mtp_drafts_ask_the_device_for_nothing(on_no_device: LayerContext, tmp_path: Path) -> None:
    target = target_on(on_no_device, checkpoints.deepseek_v3, tmp_path, num_nextn_predict_layers=2)
    assert isinstance(target, DeepseekV3ForCausalLM)
    mtp = PredictionLayers(target, [MTPParts(), MTPParts()], on_no_device)
    limits, choice = (bind(mtp, on_no_device), 4, BLOCK_SIZE, 128), DraftSampler(op=choose)
    proposer = ChainProposer(MTPChain(mtp, 60), *limits, place_drafts, choice)
    check_drafts(proposer, on_no_device, 48, 0)


@on_ranks("maps", same=(None, 1), mapped=(TokenMaps([*range(5)] * 12, [*range(60)], 5), 4))
def test_drafts_of_a_model_ask_the_device_for_nothing(
    maps: TokenMaps | None, on_no_device: LayerContext, tmp_path: Path
) -> None:
    model = target_on(on_no_device, checkpoints.llama, tmp_path)
    limits, choice = (bind(model, on_no_device), 4, BLOCK_SIZE, 128), DraftSampler(op=choose)
    proposer = ChainProposer(DraftModelChain(model, maps), *limits, place_drafts, choice)
    check_drafts(proposer, on_no_device, 48, 0)


@pytest.mark.parametrize("query_len", [1, 3])
def test_choosing_tokens_asks_the_device_for_nothing(
    query_len: int, on_no_device: LayerContext, tmp_path: Path
) -> None:
    model, size = target_on(on_no_device, checkpoints.llama, tmp_path), 4
    vocab_size, device = model.token_embedding.vocab_size, on_no_device.device
    rows = SamplingRows(8, vocab_size, frozenset(), device, None)
    ops = SamplingOps(choose_tokens=lambda scores, options: choose(scores, options)[0])
    greedily = model.output_head.choose_greedily if on_no_device.group.size > 1 else None
    ranks = [replace(on_no_device.group, rank=rank) for rank in (0, on_no_device.group.size - 1)]
    options: dict[str, Any] = {"choose_greedily": greedily}
    samplers = [
        Sampler(model.compute_logits, rows, vocab_size, device, ops, own, **options)
        for own in ranks
    ]
    each = torch.zeros(size, dtype=torch.int64, device=device)
    at = torch.zeros(size * query_len, dtype=torch.int64, device=device)
    given = DecodeRows(each, at, at, at, each, at)
    hidden = torch.zeros(size * query_len, 48, device=device)
    with nothing_from_the_host():
        for sampler, kind in product(samplers, KINDS):
            tokens, _, _ = sampler.sample_decode_rows(given, hidden, kind, None)
            assert tokens.shape == (size, query_len)
            sampler.draft_sampling_of_decode_rows(each)


def test_the_host_is_noticed(on_no_device: LayerContext) -> None:
    """The tests above would see what a capture forbids."""
    x = torch.zeros(3, 3, device=on_no_device.device)
    with pytest.raises(RuntimeError):
        x.sum().item()
    for copies in (
        lambda: x[[0, 1]],
        lambda: x[:, [0]],
        lambda: torch.tensor([1], device=x.device),
    ):
        with nothing_from_the_host(), pytest.raises(AssertionError, match="host"):
            copies()
    with nothing_from_the_host(), pytest.raises(NotImplementedError):
        x.cpu()
