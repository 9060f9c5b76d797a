"""The steps that are measured before the KV pool is sized: valid, and as large as any."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from spec_decode.engines import Folders, create_engine, generate, params

from atom.batch import LaunchedStep, ScheduledBatch, StepOutput
from atom.config import EngineConfig
from atom.kv_cache.base import KVCacheMemoryError
from atom.model_engine import runner_parts
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.start_up import kv_memory
from atom.model_engine.start_up import largest_steps as steps_module
from atom.model_engine.start_up.largest_steps import largest_steps
from atom.sampling.plan import SamplePlan
from atom.sampling.sampler import Sampler, Verified
from atom.sampling_params import Needs


def config(budget: int, num_seqs: int, block_size: int) -> EngineConfig:
    return engine_config(
        model="none",
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=num_seqs,
        max_logprobs=3,
    )


def num_rows(batch: ScheduledBatch) -> int:
    return sum(1 + s.num_drafts for s in batch.sequences if s.wants_sample)


def check_step(batch: ScheduledBatch, options: EngineConfig, context: int, drafts: int) -> None:
    """The batch keeps the limits that the scheduler keeps."""
    scheduler = options.scheduler
    assert 0 < batch.num_tokens <= scheduler.max_num_batched_tokens
    assert 0 < len(batch.sequences) <= scheduler.max_num_seqs
    assert [s.id for s in batch.sequences] == [n.id for n in batch.new]
    for sequence, known in zip(batch.sequences, batch.new, strict=True):
        num_known = len(known.prompt_token_ids) + len(known.output_token_ids)
        assert known.prompt_token_ids
        assert len(sequence.token_ids) > sequence.num_drafts <= drafts
        assert sequence.context_len == num_known + sequence.num_drafts
        # The drafts and the token after them end within the context.
        assert sequence.context_len < context
        assert set(sequence.new_block_ids) == {0}
        assert sequence.num_blocks * options.cache.block_size >= sequence.context_len


@given(
    st.integers(1, 12), st.integers(0, 90), st.integers(2, 24), st.integers(0, 5), st.integers(1, 5)
)
def test_no_step_is_larger(
    num_seqs: int, spare: int, context: int, drafts: int, block_size: int
) -> None:
    options = config(num_seqs + spare, num_seqs, block_size)
    steps = largest_steps(options, context, drafts, vocab_size=50)
    for batch in steps:
        check_step(batch, options, context, drafts)
    filling, verifying, _, _ = steps
    for batch in (filling, verifying):
        assert max(s.context_len for s in batch.sequences) == context - 1
    assert verifying.freed_rows == [s.row for s in filling.sequences]
    assert filling.num_tokens == min(num_seqs + spare, num_seqs * (context - 1))
    most_drafts = max(min(drafts, context - 3), 0)
    assert num_rows(verifying) == min(num_seqs + spare, num_seqs * (1 + most_drafts))
    assert all(len(s.token_ids) == 1 + s.num_drafts for s in verifying.sequences)


def test_one_prompt_beside_sequences_that_verify() -> None:
    filling, verifying, _, _ = largest_steps(config(100, 4, 16), 512, 3, vocab_size=50)
    assert [len(s.token_ids) for s in filling.sequences] == [88, 4, 4, 4]
    assert [s.num_drafts for s in filling.sequences] == [0, 3, 3, 3]
    assert [s.start for s in filling.sequences] == [511 - 88, 511 - 4, 1, 1]
    assert [len(s.token_ids) for s in verifying.sequences] == [4, 4, 4, 4]


def test_more_prompts_where_one_leaves_a_part_of_the_budget() -> None:
    filling, *_ = largest_steps(config(64, 4, 16), 25, 1, vocab_size=50)
    assert [len(s.token_ids) for s in filling.sequences] == [24, 24, 14, 2]


@pytest.mark.parametrize(
    ("budget", "num_seqs", "context", "prompts"),
    [
        (100, 4, 512, [(100, 511)]),
        # Contexts of 300 tokens that are expanded together.
        (100, 4, 121, [(66, 100), (17, 100), (17, 100)]),
        (100, 2, 121, [(83, 120), (17, 120)]),
        (40, 4, 121, [(23, 120), (17, 120)]),
        (10, 4, 121, [(10, 120)]),
        # More new tokens than are expanded together.
        (400, 6, 121, [(99, 100), (99, 100), (99, 100), (103, 120)]),
        # What is left of the budget decodes.
        (400, 6, 401, [(399, 400), (1, 400)]),
    ],
)
def test_prompts_of_the_most_cached_tokens(
    budget: int,
    num_seqs: int,
    context: int,
    prompts: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps_module, "MOST_EXPANDED_TOKENS", 300)
    _, _, expanding, _ = largest_steps(config(budget, num_seqs, 16), context, 3, vocab_size=50)
    assert [(len(s.token_ids), s.context_len) for s in expanding.sequences] == prompts


@pytest.mark.parametrize(
    ("budget", "num_seqs", "context", "prompts"),
    [
        (100, 4, 512, [(25, 50)] * 4),
        (100, 40, 512, [(20, 40)] * 5),
        (100, 4, 31, [(25, 30)] * 4),
        (10, 4, 31, [(10, 20)]),
    ],
)
def test_many_prompts_share_the_budget(
    budget: int, num_seqs: int, context: int, prompts: list[tuple[int, int]]
) -> None:
    *_, sharing = largest_steps(config(budget, num_seqs, 16), context, 3, vocab_size=50)
    assert [(len(s.token_ids), s.context_len) for s in sharing.sequences] == prompts


def measured_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest steps run before the pool is sized, which on a CPU nobody needs."""

    def budget(_: object, __: object, profile: Callable[[], None], *___: object) -> int:
        profile()
        return 16 << 20

    monkeypatch.setattr(kv_memory, "kv_cache_budget", budget)


def record_plans(monkeypatch: pytest.MonkeyPatch) -> list[SamplePlan]:
    """What every step from now on samples."""
    plans: list[SamplePlan] = []

    class RecordingSampler(Sampler):
        def sample(self, plan: SamplePlan, *states: torch.Tensor | None) -> Verified:
            plans.append(plan)
            return super().sample(plan, *states)  # type: ignore[arg-type]

    monkeypatch.setattr(runner_parts, "Sampler", RecordingSampler)
    return plans


def record(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[tuple[int, int]], list[tuple[ScheduledBatch, StepOutput]]]:
    """Tokens and sampled rows of every forward pass from now on; every step and its results."""
    sizes: list[tuple[int, int]] = []
    plans = record_plans(monkeypatch)
    steps: list[tuple[ScheduledBatch, StepOutput]] = []

    class RecordingRunner(ModelRunner):
        def launch(self, batch: ScheduledBatch) -> LaunchedStep:
            output = super().launch(batch).collect()
            sizes.append((batch.num_tokens, len(plans[-1].logits_indices)))
            steps.append((batch, output))
            return LaunchedStep(lambda: output)

    monkeypatch.setattr(runner_parts, "ModelRunner", RecordingRunner)
    return sizes, steps


@pytest.mark.parametrize(
    ("target", "draft", "drafts"),
    [
        ("llama", "none", 0),
        ("llama", "mha", 3),
        ("llama", "peagle", 3),
        ("llama", "dflash", 7),
        ("deepseek_v3", "mtp", 2),
        ("llama", "suffix", 3),
    ],
)
def test_the_runner_runs_them(
    target: str, draft: str, drafts: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 40,
        "max_model_len": 64,
        "max_logprobs": 7,
        **(folders.speculation(draft, drafts) if drafts else {}),
    }
    expected = generate(create_engine(folders(target), **options), params("warm", max_tokens=8))
    sizes, steps = record(monkeypatch)
    measured_as_on_a_gpu(monkeypatch)
    engine = create_engine(folders(target), **options)
    verified = 4 * (1 + drafts)
    assert sizes == [(40, 1 + 3 * (1 + drafts)), (verified, verified), (40, 2), (40, 2)]
    for batch, output in steps:
        for sequence, result in zip(batch.sequences, output.sequences, strict=True):
            assert 1 <= len(result.token_ids) <= 1 + sequence.num_drafts
            assert result.logprobs is not None
            assert all(len(entry.token_ids) == 1 + 7 for entry in result.logprobs)
            if draft not in ("none", "suffix"):
                assert len(result.draft_token_ids) == drafts
    # Nothing is left of them: the engine works as ever.
    assert generate(engine, params("warm", max_tokens=8)) == expected


def test_sampling_spends_all_that_it_can(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option of every row is there, but a grammar's mask."""
    plans = record_plans(monkeypatch)
    measured_as_on_a_gpu(monkeypatch)
    create_engine(folders("llama"), max_logprobs=5)
    assert len(plans) == 4
    for plan in plans:
        filters = Needs.TEMPERATURE | Needs.TOP_K | Needs.TOP_P | Needs.MIN_P
        assert plan.needs & filters == filters
        assert plan.create_edits is not None
        edits = plan.create_edits()
        num_rows = len(plan.logits_indices)
        # A logit bias for each sequence, and banned end tokens for all of them.
        assert len(edits.tokens) == len(plan.states) + 1
        assert edits.penalties is not None
        assert len(edits.rows) == len(edits.penalties.rows) == num_rows
        assert plan.logprob_rows is not None
        assert plan.logprob_rows[1] == [5] * num_rows


def test_too_little_memory_names_the_options(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(ModelRunner):
        def launch(self, batch: ScheduledBatch) -> LaunchedStep:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(runner_parts, "ModelRunner", Failing)
    measured_as_on_a_gpu(monkeypatch)
    with pytest.raises(KVCacheMemoryError, match=r"128 tokens, 16 seq.*9 GiB; lower --max-num"):
        create_engine(folders("llama"), max_num_batched_tokens=128)


def test_the_largest_pool_has_whole_blocks_for_each_sequence(
    folders: Folders,
) -> None:
    """Contexts of 10 tokens take three blocks of 4, though two of them have but 20 tokens."""
    engine = create_engine(folders("llama"), max_num_seqs=2, max_model_len=10, block_size=4)
    assert engine.engine.core.limits.num_blocks == 6
