"""Decode steps on a CPU: native kernels compute, torch only allocates, views and moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from models import checkpoints
from spec_decode import draft_bench
from spec_decode.engines import PROMPTS, create_engine
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.kv_cache.block_tables import StepTables
from atom.model_engine.worker import Worker
from atom.model_ops.kernels.native.bindings import listening
from atom.model_ops.kernels.native.build import native_build

REASON = native_build().reason
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

NUM_SEQS = 4
# What a program replays without torch: see `native/recorder.py`.
VIEWS = "alias as_strided detach expand permute select slice split split_with_sizes squeeze t"
VIEWS += " transpose unbind unsqueeze view _unsafe_view"
ALLOCATIONS = "empty empty_like empty_strided new_empty new_empty_strided"
MOVEMENTS = "copy_ clone _to_copy cat index index_select embedding"
ALLOWED = {*VIEWS.split(), *ALLOCATIONS.split(), *MOVEMENTS.split()}


class Names(TorchDispatchMode):
    """The operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def watch(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, watched where it is recorded."""

        def watched(*args: Any) -> Any:
            with nullcontext() if listening.listener is None else self:
                return work(*args)

        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name not in ALLOWED:  # such as `reshape`, which is a view or a copy
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        self.seen.add(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module", params=["none", "eagle3"])
def engine(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> LLM:
    folder = tmp_path_factory.mktemp("recorded")
    size, vocab = 64, len(byte_level_tokenizer)
    sizes = {"hidden_size": size, "num_attention_heads": 2, "num_key_value_heads": 2}
    checkpoints.llama(folder / "target", vocab_size=vocab, intermediate_size=96, **sizes)
    byte_level_tokenizer.save_pretrained(folder / "target")
    if request.param == "none":
        return create_engine(folder / "target")
    raw = {**draft_bench.MHA, **sizes, "intermediate_size": 96, "vocab_size": vocab}
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    draft_bench.write_draft(folder / "draft", raw, draft_bench.draft_tensors(raw))
    return create_engine(
        folder / "target",
        method="eagle3",
        num_speculative_tokens=3,
        draft_model=str(folder / "draft"),
    )


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=["greedy", "sampled", "filtered"],
)
def test_torch_is_asked_for_views_and_copies_only(
    engine: LLM, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = engine.engine.core.executor
    assert isinstance(worker, Worker)
    assert worker.parts.recorder is not None
    names, runner, proposer = Names(), worker._runner, worker.parts.proposer
    compute = names.watch(runner.steps._compute)
    propose = names.watch(proposer.propose)
    monkeypatch.setattr(runner.steps, "_compute", compute)
    monkeypatch.setattr(proposer, "propose", propose)
    before = len(worker.parts.recorder._programs)
    before_run = engine.engine.core.stats
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, seed=1, **params)
    prompts, has_draft = PROMPTS[:NUM_SEQS], worker.parts.proposer.reads_steps
    recorded = [o.outputs[0].token_ids for o in engine.generate(prompts, sampling, use_tqdm=False)]
    assert names.seen
    assert names.seen - ALLOWED == set()
    assert worker.parts.recorder._refused == set()
    assert len(worker.parts.recorder._programs) > before
    stats = engine.engine.core.stats
    assert before_run.num_replayed_decode_steps < stats.num_replayed_decode_steps
    assert stats.num_replayed_decode_steps < stats.num_decode_steps < stats.num_steps
    assert stats.num_draft_steps == (stats.num_decode_steps if has_draft else 0)
    assert (stats.num_replayed_draft_steps > before_run.num_replayed_draft_steps) == has_draft
    replayed = stats.num_replayed_decode_steps, stats.num_replayed_draft_steps
    monkeypatch.setattr(runner, "steps", runner.steps.without_draft_replay())
    monkeypatch.setattr(runner.inputs, "_step_tables", StepTables(runner.inputs._tables))
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    assert recorded == [output.outputs[0].token_ids for output in outputs]
    stats = engine.engine.core.stats
    assert (stats.num_replayed_decode_steps, stats.num_replayed_draft_steps) == replayed
