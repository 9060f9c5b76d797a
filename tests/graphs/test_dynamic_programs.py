"""Programs of work on any number of rows against the same work run op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from graphs.test_programs import SIZE, layers, random
from models import checkpoints
from spec_decode.engines import create_engine
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.graphs.recorded_forward import RecordedForward
from atom.model_engine.step.recorded_steps import RecordedSteps
from atom.model_engine.worker import Worker
from atom.model_ops.kernels.native import elementwise, gather
from atom.model_ops.kernels.native.bindings import between_kernels
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.native.dynamic_program import DynamicProgram, Trace, trace
from atom.model_ops.kernels.native.program import Arena
from atom.model_ops.kernels.native.recorder import NotRecordableError

pytestmark = pytest.mark.skipif(
    native_build().reason is not None, reason=str(native_build().reason)
)
Work = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def traced(work: Work, rows: int) -> Trace:
    x = random(rows, SIZE)
    return trace(lambda: [work(x)], rows, [x])


def program_of(work: Work, *rows: int) -> DynamicProgram:
    program = DynamicProgram(traced(work, rows[0]), Arena())
    assert all(program.add(traced(work, count)) for count in rows[1:])
    return program


def test_any_number_between_recordings_has_the_bits_of_the_work_itself() -> None:
    forward = layers(4)
    program = program_of(forward, 60, 3, 101)
    for rows in range(3, 102):
        assert program.holds(rows)
        x = random(rows, SIZE, seed=rows)
        (found,) = program.run(rows, [x])
        assert torch.equal(found, forward(x))


def test_it_holds_what_was_recorded_until_recordings_agree() -> None:
    forward = layers(1)
    program = program_of(forward, 20)
    assert [rows for rows in range(60) if program.holds(rows)] == [20]
    assert program.add(traced(forward, 40))
    assert [rows for rows in range(60) if program.holds(rows)] == [20, 40]
    # Multiples of 10, as if sizes were rounded up to them.
    assert program.add(traced(forward, 30))
    assert not program.holds(35)
    assert program.add(traced(forward, 33))
    assert [rows for rows in range(60) if program.holds(rows)] == list(range(20, 41))


def test_other_kernels_are_another_program() -> None:
    few, many = layers(1), layers(2)

    def work(x: torch.Tensor) -> torch.Tensor:
        return few(x) if len(x) < 64 else many(x)

    program = program_of(work, 20, 31, 63)
    assert not program.add(traced(work, 64))
    assert not program.holds(64)
    assert program.holds(62)


def test_numbers_that_do_not_grow_evenly_are_refused() -> None:
    def padded(x: torch.Tensor) -> torch.Tensor:
        rounded = x.new_empty(-(-len(x) // 16) * 16, SIZE)
        rounded[: len(x)].copy_(x)
        return elementwise.add(rounded, rounded)

    program = program_of(padded, 16, 48, 32)
    assert not program.holds(40)
    assert not program.add(traced(padded, 40))
    assert not program_of(padded, 16).add(traced(padded, 21))


def test_sizes_that_shrink_are_refused() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        return gather.gather_rows(
            x.new_empty(200 - len(x), SIZE), x.new_empty(3, dtype=torch.int64)
        )

    assert not program_of(work, 10).add(traced(work, 20))


def test_results_have_memory_of_their_own() -> None:
    forward = layers(2)
    program = program_of(forward, 9)
    x, y = random(9, SIZE), random(9, SIZE, seed=1)
    (first,), (second,) = program.run(9, [x]), program.run(9, [y])
    assert torch.equal(first, forward(x))
    assert torch.equal(second, forward(y))


def test_results_may_be_empty_and_views() -> None:
    forward = layers(1)

    def work(x: torch.Tensor) -> list[torch.Tensor]:
        out = forward(x)
        return [out[1:, 8:16], out[:0], x.new_empty(0, SIZE)]

    def recorded(rows: int) -> Trace:
        x = random(rows, SIZE)
        return trace(lambda: work(x), rows, [x])

    program = DynamicProgram(recorded(5), Arena())
    assert all(program.add(recorded(rows)) for rows in (12, 8))
    x = random(11, SIZE, seed=3)
    for found, expected in zip(program.run(11, [x]), work(x), strict=True):
        assert found.shape == expected.shape
        assert torch.equal(found, expected)


def test_an_index_out_of_range_is_named() -> None:
    table = random(10, SIZE)

    def recorded(rows: int) -> Trace:
        index = torch.zeros(rows, dtype=torch.int64)
        return trace(lambda: [gather.gather_rows(table, index)], rows, [index])

    program = DynamicProgram(recorded(4), Arena())
    with pytest.raises(IndexError, match="gather_rows: row or sequence 2 "):
        program.run(4, [torch.tensor([1, 2, 10, 3])])


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda x: x, "was there before"),
        (lambda x: torch.sin(x), "is no kernel"),
        (lambda x: between_kernels(lambda: None, x), "the host"),
    ],
)
def test_what_no_program_can_hold_is_named(work: Work, reason: str) -> None:
    with pytest.raises(NotRecordableError, match=reason):
        traced(work, 3)


def outputs(engine: LLM, batches: list[list[list[int]]]) -> list[object]:
    """Of batches of prompts one after the other, tokens and logprobs."""
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=3)
    made = [engine.generate(batch, sampling, use_tqdm=False) for batch in batches]
    of_all = [output.outputs[0] for batch in made for output in batch]
    return [(answer.token_ids, answer.logprobs) for answer in of_all]


LATENTS = {"kv_lora_rank": 64, "hidden_size": 64}
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@torch.inference_mode(False)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("make", "sizes"),
    [(checkpoints.llama, HEADS), (checkpoints.deepseek_v3, LATENTS)],
    ids=["llama", "deepseek_v3"],
)
def test_prompts_of_any_length_have_the_bits_of_those_run_op_by_op(
    make: Callable[..., object],
    sizes: dict[str, int],
    dtype: str,
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> None:
    make(tmp_path, vocab_size=len(byte_level_tokenizer), **sizes)
    byte_level_tokenizer.save_pretrained(tmp_path)
    lengths = [60, 20, 101, *range(3, 110, 5), 60, 13, 61]
    batches = [[checkpoints.prompt(length, length)] for length in lengths]
    options = {"dtype": dtype, "enable_prefix_caching": False, "max_num_batched_tokens": 96}
    with create_engine(tmp_path, enforce_eager=True, **options) as engine:
        expected = outputs(engine, batches)
    with create_engine(tmp_path, **options) as engine:
        assert outputs(engine, batches) == expected
        forward = recorded_forward(engine)
        assert forward.was_replayed
        assert not forward._recorder._refused
        # Of a few tokens other kernels may run.
        assert max(map(len, forward._programs.values())) <= 3


@torch.inference_mode(False)
def test_prompts_together_and_behind_known_prefixes_have_the_bits_of_those_run_op_by_op(
    tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    checkpoints.llama(tmp_path, vocab_size=len(byte_level_tokenizer), **HEADS)
    byte_level_tokenizer.save_pretrained(tmp_path)
    prefix = checkpoints.prompt(40, 1)
    batches = [
        [prefix[: 7 * (i % 5)] + checkpoints.prompt(18 + i + 9 * j, 10 * i + j) for j in range(2)]
        for i in range(24)
    ]
    with create_engine(tmp_path, enforce_eager=True) as engine:
        expected = outputs(engine, batches)
    with create_engine(tmp_path) as engine:
        assert outputs(engine, batches) == expected
        forward = recorded_forward(engine)
        assert any(key[0][0] == 2 and len(known) == 1 for key, known in forward._programs.items())
        assert forward.was_replayed


@torch.inference_mode(False)
def test_programs_that_are_known_serve_behind_a_refusal(
    tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    checkpoints.llama(tmp_path, vocab_size=len(byte_level_tokenizer), **HEADS)
    byte_level_tokenizer.save_pretrained(tmp_path)
    batches = [[checkpoints.prompt(length, length)] for length in (30, 40, 55, 47, 60)]
    options = {"enable_prefix_caching": False}
    with create_engine(tmp_path, enforce_eager=True, **options) as engine:
        expected = outputs(engine, batches)
    with create_engine(tmp_path, **options) as engine:
        assert outputs(engine, batches[:3]) == expected[:3]
        forward = recorded_forward(engine)
        for kind in forward._programs:
            forward._recorder.refuse("a prompt", kind, NotRecordableError("too many ranges"))
        for batch, wanted, replayed in (
            (batches[1], expected[1], True),
            (batches[3], expected[3], False),
            (batches[4], expected[4], False),
        ):
            assert outputs(engine, [batch]) == [wanted]
            assert forward.was_replayed == replayed


def recorded_forward(engine: LLM) -> RecordedForward:
    worker = engine.engine.core.executor
    assert isinstance(worker, Worker)
    steps = worker._runner.steps
    assert isinstance(steps, RecordedSteps)
    return steps._prompts
