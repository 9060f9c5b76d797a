"""Layers with a window keep its blocks alone, and tokens are those of transformers.

What they do not hold is NaN, so that nobody can read it unnoticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.coupled import add, coupled_config, on_coupled, serve
from graphs.pretended_graphs import pretend_kernels
from graphs.test_graphs_in_engine import CountingBackend
from models.checkpoints import Checkpoint, prompt
from models.families import write_family
from ranks import engines_of_threads
from spec_decode import engines
from spec_decode.engines import create_engine, generate
from transformers import PreTrainedTokenizerFast

from atom import SamplingParams
from atom.entrypoints.llm import LLM
from atom.kv_cache.base import KVCachePlan
from atom.kv_cache.builders import attention_layers
from atom.model_engine.admission import AdmissionLimits
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.async_engine import AsyncEngine
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.executor import RanksExecutor
from atom.model_engine.processes import wire
from atom.model_engine.start_up import kv_memory
from atom.model_engine.step import planned_graphs
from atom.model_ops.attention.mha import Attention
from atom.model_ops.kernels.native.build import native_build
from atom.outputs import RequestOutput

# Windows of 9 tokens on some layers, on all, and on all but one.
NAMES = ("gemma3_text", "mistral-window", "cohere2")
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
LENGTHS = (70, 3, 41)


class Models:
    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self.checkpoint, self.draft = cache(self._checkpoint), cache(self._draft)
        self.expected = cache(self._expected)

    def _checkpoint(self, name: str) -> Checkpoint:
        checkpoint = write_family(name, self._folder / name, vocab_size=len(self._tokenizer))
        self._tokenizer.save_pretrained(checkpoint.folder)
        return checkpoint

    def _draft(self) -> str:
        return str(engines.write_draft("mha", self._folder / "draft", len(self._tokenizer)))

    def _expected(self, name: str) -> list[list[int]]:
        return [self.greedy(name, prompt_ids, GREEDY.max_tokens or 0) for prompt_ids in PROMPTS]

    def greedy(self, name: str, prompt_ids: list[int], count: int) -> list[int]:
        tokens = list(prompt_ids)
        for _ in range(count):
            tokens.append(int(self.checkpoint(name).logits(tokens)[-1].argmax()))
        return tokens[len(prompt_ids) :]

    def engine(self, name: str, **options: Any) -> LLM:
        given = {"max_num_batched_tokens": 16, **options}
        return create_engine(self.checkpoint(name).folder, **given)


PROMPTS = [prompt(length, seed=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Models:
    return Models(tmp_path_factory.mktemp("windows"), byte_level_tokenizer)


def spoil_free_blocks(engine: LLM) -> Callable[[], int]:
    """Fill what nobody holds with NaN after each step -> the most blocks that were ever held."""
    core: Any = engine.engine.core
    windows, step = core._scheduler._windows, core.step
    worker = core.executor._worker if isinstance(core.executor, RanksExecutor) else core.executor
    caches = [
        layer.kv_cache
        for layer in attention_layers(worker.parts.model).values()
        if isinstance(layer, Attention) and layer.window is not None
    ]
    assert windows is not None
    assert all(held.is_windowed for held in caches)
    most = [0]

    def step_and_spoil() -> Any:
        report = step()
        counts = torch.tensor(windows._ref_counts)
        most[0] = max(most[0], int((counts > 0).sum()))
        for held in caches:
            held.key[counts == 0] = held.value[counts == 0] = float("nan")
        core._scheduler.check_integrity()
        return report

    core.step = step_and_spoil
    return lambda: most[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "how",
    [
        *("alone", "draft", "op by op", "by torch", "overlapped", "overlapped draft"),
        *("graphs overlapped draft", "ranks overlapped draft"),
    ],
)
def test_blocks_behind_the_window_are_not_read(
    models: Models, name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"enable_prefix_caching": False}
    if "draft" in how:
        options |= {"method": "eagle3", "draft_model": models.draft(), "num_speculative_tokens": 3}
    if how == "op by op":
        options["enforce_eager"] = True
    if how == "by torch":
        for op in ("PAGED_ATTENTION", "PREFILL_ATTENTION"):
            monkeypatch.setenv(f"ATOM_OP_{op}", "torch")
    if "overlapped" in how:
        options["overlap"] = True
    backend = CountingBackend()
    with ExitStack() as stack:
        if "graphs" in how:  # whose padding the C++ kernels cannot be told of
            pretend_kernels(monkeypatch)
            patch = stack.enter_context(monkeypatch.context())
            patch.setattr(planned_graphs, "capture_backend", lambda _: backend)
        if "ranks" in how:
            stack.enter_context(engines_of_threads())
            options["tensor_parallel_size"] = 2
        engine = models.engine(name, **options)
    most = spoil_free_blocks(engine)
    assert generate(engine, GREEDY, PROMPTS) == models.expected(name)
    # 8 of a window and a part of the steps' tokens each; the contexts have 25 + 9 + 18.
    assert most() <= 3 * 4 + 9
    assert ("graphs" in how) == (backend.replays["target"] > 0)


@pytest.mark.parametrize("name", NAMES)
def test_prefixes_preemption_and_several_answers(
    models: Models, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="atom")
    with monkeypatch.context() as patch:
        patch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(34, 0, 14))
        engine = models.engine(name, max_model_len=120)
    assert generate(engine, GREEDY, PROMPTS) == models.expected(name)
    core: Any = engine.engine.core
    assert core.stats.num_preemptions > 0
    assert core.stats.num_window_blocks == 14
    core._scheduler.check_integrity()
    again = engine.generate([PROMPTS[0]], GREEDY, use_tqdm=False)[0]
    assert list(again.outputs[0].token_ids) == models.expected(name)[0]
    several = SamplingParams(temperature=1, seed=3, n=3, max_tokens=25, ignore_eos=True)
    found = [list(o.token_ids) for o in engine.generate(PROMPTS[:1], several)[0].outputs]
    whole = models.engine(name, max_num_batched_tokens=2048, enable_prefix_caching=False)
    assert whole.engine.core.limits.window is None
    wanted = [list(o.token_ids) for o in whole.generate(PROMPTS[:1], several)[0].outputs]
    assert found == wanted
    if native_build().reason is None:
        assert not [r.getMessage() for r in caplog.records if "op by op" in r.getMessage()]
    assert any("KV blocks of their own: 14" in r.getMessage() for r in caplog.records)


def test_a_conversation_goes_on_behind_its_prefix(models: Models) -> None:
    engine = models.engine("gemma3_text")
    first = engine.generate(PROMPTS[:1], GREEDY, use_tqdm=False)[0]
    longer = [*PROMPTS[0], *first.outputs[0].token_ids, 5, 6, 7]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = engine.generate([longer], sampling, use_tqdm=False)[0]
    # All but the last block's tokens, and the newest, which was never computed.
    assert found.num_cached_tokens == 96
    fresh = models.engine("gemma3_text", enable_prefix_caching=False)
    assert generate(fresh, sampling, [longer]) == [list(found.outputs[0].token_ids)]


class LocalEngine:
    """In place of an `EngineClient`: an engine in this process, which steps when it is read."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.pid = core, id(core)
        self.is_alive = self.is_open = True
        self.num_requests = 0
        self._has_work = asyncio.Event()

    def send(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.AddRequests):
            for request in message.requests():
                self.core.add_request(request)
                self.num_requests += 1
            self._has_work.set()

    async def receive(self) -> list[wire.FromEngine]:
        while not self.core.has_work:
            self._has_work.clear()
            await self._has_work.wait()
        await asyncio.sleep(0)
        return [wire.Step(self.core.step())]

    async def stop(self) -> None:
        self.is_alive = self.is_open = False

    kill = stop


async def test_replicas(models: Models, byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    """Each has windows of its own, and a conversation finds those of the replica that it was on."""
    name = "gemma3_text"
    cores = [models.engine(name).engine.core for _ in range(2)]
    assert all(core.limits.window is not None for core in cores)
    replicas = [LocalEngine(core) for core in cores]
    frontend = AsyncEngine(
        [(each, wire.Ready(each.core.limits, each.core.stats, 0.0)) for each in replicas],  # type: ignore[misc]
        None,  # type: ignore[arg-type]  # none dies
        engine_config(data_parallel_size=2),
        "windows",
        name,
        byte_level_tokenizer,
        AdmissionLimits(6),
        None,
    )

    async def answer(request: str, prompt_ids: list[int], count: int) -> RequestOutput:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        (output,) = [o async for o in frontend.generate(request, prompt_ids, params, stream=False)]
        return output

    try:
        count = GREEDY.max_tokens or 0
        first = await asyncio.gather(*(answer(str(len(p)), p, count) for p in PROMPTS))
        found = [list(output.outputs[0].token_ids) for output in first]
        assert found == models.expected(name)
        assert sorted(each.num_requests for each in replicas) == [1, 2]
        longer = [*PROMPTS[0], *found[0], 5, 6, 7]
        second = await answer("longer", longer, 8)
        assert list(second.outputs[0].token_ids) == models.greedy(name, longer, 8)
        assert second.num_cached_tokens == 96
    finally:
        await frontend.shutdown(0)


def test_engines_that_share_experts(models: Models) -> None:
    """One has no requests at first, and computes padding beside the other's; then it has all."""
    name = "gpt_oss"
    folder, expected = models.checkpoint(name).folder, models.expected(name)
    options = {"max_num_batched_tokens": 16, "enable_prefix_caching": False}

    def use(index: int, core: Any) -> list[list[int]]:
        assert core.limits.window is not None
        if index == 0:
            add(core, PROMPTS, GREEDY)
        first = serve(core)
        if index == 1:
            add(core, PROMPTS, GREEDY)
        return first + serve(core)

    assert on_coupled(coupled_config(folder, 2, **options), use) == [expected, expected]
