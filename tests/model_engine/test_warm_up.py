"""What a GPU runs before an engine is ready: steps within the limits, on the engine's own pool."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from spec_decode.engines import Folders, create_engine, generate, params

from atom.batch import LaunchedStep, ScheduledBatch
from atom.graphs.capture import ReexecuteBackend
from atom.kv_cache.base import KVCacheMemoryError
from atom.model_engine import worker
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.start_up.warm_up import warm_up
from atom.model_engine.start_up.warm_up_steps import StepLimits, warm_ups
from atom.model_engine.step import planned_graphs
from atom.model_engine.step.input_buffers import StepInput
from atom.model_engine.step.step_graphs import StepGraphs
from atom.model_engine.worker import Worker
from atom.model_ops.attention.metadata import MAX_DECODE_QUERIES
from atom.sampling.plan import KINDS, kind_of
from atom.sampling.rows import SamplingRows
from atom.sampling_params import EDITS, Needs

LIMITS = StepLimits(4096, 8192, 64, 3, 64, 500, 32000, 5, overlaps=True)


def check_step(batch: ScheduledBatch, limits: StepLimits, known: dict[int, int]) -> None:
    """The batch keeps the limits that the scheduler keeps."""
    assert 0 < batch.num_tokens <= limits.max_num_tokens
    assert len({s.row for s in batch.sequences}) == len(batch.sequences) <= limits.max_num_seqs
    for s in batch.sequences:
        assert s.row not in known or s.start == known[s.row]
        assert 0 <= s.num_drafts <= limits.num_drafts
        assert s.context_len + limits.num_drafts < limits.context_len
        assert s.num_blocks * limits.block_size >= s.context_len + limits.num_drafts
        assert s.num_blocks <= -(-limits.context_len // limits.block_size)
        assert all(0 <= block < limits.num_blocks for block in s.new_block_ids)
        assert s.row < limits.max_num_seqs
        known[s.row] = s.context_len


@given(
    st.builds(
        StepLimits,
        context_len=st.integers(2, 300),
        max_num_tokens=st.integers(20, 400),
        max_num_seqs=st.integers(1, 20),
        num_drafts=st.integers(0, 5),
        block_size=st.integers(1, 32),
        num_blocks=st.integers(1, 40),
        vocab_size=st.integers(2, 50),
        max_logprobs=st.integers(0, 3),
        overlaps=st.booleans(),
    )
)
def test_nothing_exceeds_the_limits(limits: StepLimits) -> None:
    limits = replace(limits, max_num_tokens=max(limits.max_num_tokens, limits.max_num_seqs))
    for steps in warm_ups(limits):
        known: dict[int, int] = {}
        for batch in steps.batches:
            check_step(batch, limits, known)
        assert sorted(known) == list(range(steps.num_rows))


def test_prompts_of_several_lengths() -> None:
    every = list(warm_ups(LIMITS))
    prompts = [[len(s.token_ids) for s in steps.batches[0].sequences] for steps in every]
    longest = LIMITS.longest_prompt
    ends = {len(b.new[0].prompt_token_ids) for steps in every for b in steps.batches[:1]}
    assert max(ends) == LIMITS.last_prompt_token == longest
    alone = [[n] for n in (2, MAX_DECODE_QUERIES, 17, 48, 128, 1024, longest)]
    for lens in (*alone, [17] * 64, [longest, longest, 8192 - 2 * longest]):
        assert lens in prompts
    # More queries than decode ops take, beside some that they do.
    for steps in every:
        if len(steps.batches) == 1:
            continue
        _, plain, *mixed = steps.batches[1:]
        assert {len(s.token_ids) for s in plain.sequences} == {1}
        for batch in mixed:
            lens = [len(s.token_ids) for s in batch.sequences]
            assert min(lens) <= MAX_DECODE_QUERIES < max(lens)


def test_a_prompt_that_goes_on_samples_nothing() -> None:
    alone = [steps for steps in warm_ups(LIMITS) if not steps.batches[0].sequences[0].wants_sample]
    assert [len(steps.batches[0].sequences[0].token_ids) for steps in alone] == [17]
    assert alone[0].kind == Needs(0)


@pytest.mark.parametrize("overlaps", [False, True])
def test_sequences_are_ahead_where_steps_overlap(overlaps: bool) -> None:
    for steps in warm_ups(replace(LIMITS, overlaps=overlaps)):
        has_edits = bool(steps.batches[0].new[0].params.logit_bias)
        for batch in steps.batches[1:]:
            ahead = {s.is_ahead for s in batch.sequences if s.start}
            assert ahead == {overlaps and not has_edits}


def test_contexts_without_room_have_no_steps() -> None:
    assert list(warm_ups(replace(LIMITS, context_len=13))) == []


class Recorded:
    """What an engine's runner and sampler did, from its start on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[ScheduledBatch] = []
        self.kinds: set[Needs] = set()
        launch, metadata = ModelRunner.launch, SamplingRows.metadata

        def launching(runner: ModelRunner, batch: ScheduledBatch) -> LaunchedStep:
            self.batches.append(batch)
            return launch(runner, batch)

        def gathering(rows: Any, ids: Any, positions: Any, needs: Needs, *how: Any) -> Any:
            self.kinds.add(needs)
            return metadata(rows, ids, positions, needs, *how)

        monkeypatch.setattr(ModelRunner, "launch", launching)
        monkeypatch.setattr(SamplingRows, "metadata", gathering)


# (target, draft, number of drafts, whether steps overlap)
ENGINES = [
    ("llama", "none", 0, False),
    ("llama", "none", 0, True),
    ("llama", "mha", 3, True),
    ("llama", "peagle", 3, True),
    ("llama", "dflash", 7, False),
    ("deepseek_v3", "mtp", 2, True),
    ("llama", "suffix", 3, False),
]


@pytest.mark.parametrize(("target", "draft", "k", "overlap"), ENGINES)
def test_an_engine_is_as_ever_after_it(
    target: str,
    draft: str,
    k: int,
    overlap: bool,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a GPU, on a pool too small for its steps without sharing blocks."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 96, "enforce_eager": True}
    options |= {"overlap": overlap, **(folders.speculation(draft, k) if k else {})}
    expected = generate(create_engine(folders(target), **options), params("warm", max_tokens=8))
    seen = Recorded(monkeypatch)
    with caplog.at_level(logging.INFO, "atom.model_engine.start_up.warm_up"):
        engine = warmed(monkeypatch, folders(target), **options)
    assert any(r.getMessage().startswith("warmed up with") for r in caplog.records)
    lens = {len(s.token_ids) for batch in seen.batches for s in batch.sequences}
    assert 17 in lens
    assert max(lens) == 96
    assert any(s.is_ahead for b in seen.batches for s in b.sequences) == overlap
    assert seen.kinds >= {KINDS[1], KINDS[2]}
    executor = engine.engine.core.executor
    assert isinstance(executor, Worker)
    assert not any(executor._runner._sampler._rows._states)
    monkeypatch.undo()
    assert generate(engine, params("warm", max_tokens=8)) == expected


def warmed(monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> Any:
    """An engine that starts as on a GPU."""
    log_start = worker.log_start
    made: list[Worker] = []

    def starting(rank: Any, *rest: Any) -> None:
        made.append(rank)
        log_start(rank, *rest)

    monkeypatch.setattr(worker, "log_start", starting)
    engine = create_engine(folder, **options)
    executor = engine.engine.core.executor
    assert isinstance(executor, Worker)
    warm_up(made[0], executor.parts, executor._runner, executor.limits.num_blocks)
    return engine


def test_a_gpu_warms_up_before_it_is_ready(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With whatever memory the pool was given, and before the log says that it is."""
    called: list[str] = []
    log_start = worker.log_start
    monkeypatch.setattr(worker, "warm_up", lambda *_: called.append("warm-up"))
    monkeypatch.setattr(
        worker, "log_start", lambda *given: called.append("ready") or log_start(*given)
    )
    create_engine(folders("llama"), kv_cache_memory="1MB")
    assert called == ["ready"]
    take_device = worker.take_device

    class Pretended:
        """A CPU that is called a GPU by the worker alone."""

        is_gpu = True

        def __init__(self, real: Any) -> None:
            self.real = real

    create = worker.Rank.create
    monkeypatch.setattr(worker, "take_device", lambda *given: Pretended(take_device(*given)))
    monkeypatch.setattr(worker, "take_threads", lambda *_: None)
    monkeypatch.setattr(
        worker.Rank, "create", lambda config, place, fake, source: create(
            config, place, fake.real, source
        ),
    )  # fmt: skip
    create_engine(folders("llama"), kv_cache_memory="1MB")
    assert called == ["ready", "warm-up", "ready"]


def test_graphs_are_replayed(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they were captured, on the buffers that serve."""
    draft = folders.speculation("mha")
    options = {**draft, "block_size": 16, "overlap": True}
    expected = generate(create_engine(folders("llama"), **options), params("warm", max_tokens=8))
    replayed: list[bool] = []
    run = StepGraphs.run

    def noted(runner: StepGraphs, sequences: Any, step: StepInput, *how: Any, **more: Any) -> Any:
        replayed.append(step.graph is not None)
        return run(runner, sequences, step, *how, **more)

    with monkeypatch.context() as patch:
        patch.setattr(planned_graphs, "capture_backend", lambda _: ReexecuteBackend())
        patch.setattr(StepGraphs, "run", noted)
        engine = warmed(monkeypatch, folders("llama"), **options)
    assert set(replayed) == {True, False}
    assert generate(engine, params("warm", max_tokens=8)) == expected


def test_too_little_memory_names_the_options(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(ModelRunner, "launch", fail)
    with pytest.raises(KVCacheMemoryError, match=r"9 GiB; lower --kv-cache-memory"):
        warmed(monkeypatch, folders("llama"))


def test_each_way_to_choose_is_there() -> None:
    wanted = set()
    for steps in warm_ups(LIMITS):
        own = steps.batches[0].new[0].params
        needs = int(own.needs)
        wanted.add((kind_of(needs), bool(needs & EDITS)))
        assert steps.kind == (None if needs & EDITS else kind_of(needs))
    assert wanted == {(KINDS[0], False), (KINDS[1], False), (KINDS[2], False), (KINDS[2], True)}
