"""Recorded programs of native kernels against the same work run op by op."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import pytest
import torch

from atom.graphs.recorded import Recordable, Recording, StepRecorder
from atom.model_ops.kernels.native import bindings, elementwise, gather, linear, movement
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.native.program import Arena, Program, record
from atom.model_ops.kernels.native.recorder import NotRecordableError

pytestmark = pytest.mark.skipif(
    native_build().reason is not None, reason=str(native_build().reason)
)
SIZE = 64


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layers(num_layers: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A few layers of a model with no attention."""
    up, down, weight = random(4 * SIZE, SIZE), random(SIZE, 2 * SIZE), torch.ones(SIZE)

    def forward(x: torch.Tensor) -> torch.Tensor:
        residual = x
        for i in range(num_layers):
            if i == 0:
                normed, residual = elementwise.rms_norm(x, weight, 1e-5), x
            else:
                normed, residual = elementwise.add_rms_norm(x, residual, weight, 1e-5)
            x = linear.linear(elementwise.silu_and_mul(linear.linear(normed, up, None)), down, None)
        return x

    return forward


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b)


def test_a_replay_computes_on_what_the_tensors_hold_now() -> None:
    x, out, forward = random(3, SIZE), torch.empty(3, SIZE), layers(5)
    _, program = record(lambda: out.copy_(forward(x)), lambda _: (), Arena())
    for seed in range(3):
        x.copy_(random(3, SIZE, seed=seed))
        program.replay()
        assert same(out, forward(x))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_replays_take_the_threads_of_the_moment(num_threads: int) -> None:
    x, forward = random(70, SIZE), layers(3)
    result, program = record(lambda: forward(x), lambda r: [r], Arena())
    expected = forward(x)
    torch.set_num_threads(num_threads)
    result.zero_()
    program.replay()
    assert same(result, expected)


def test_results_stay_while_other_programs_run() -> None:
    arena, forward = Arena(), layers(4)
    x = random(2, SIZE)
    first, program = record(lambda: forward(x), lambda r: [r], arena)
    program.replay()
    kept = first.clone()
    y = random(9, SIZE, seed=1)
    _, other = record(lambda: forward(y), lambda r: [r], arena)
    other.replay()
    assert same(first, kept)


def test_tensors_in_between_share_memory() -> None:
    def size(num_layers: int) -> int:
        arena, x, forward = Arena(), random(8, SIZE), layers(num_layers)
        record(lambda: forward(x), lambda r: [r], arena)
        return arena.reserve(0).numel()

    assert size(20) == size(4)


@pytest.mark.parametrize(
    "move",
    [
        lambda x, i: x[i],
        lambda x, i: x.index_select(0, i),
        lambda x, i: torch.nn.functional.embedding(i, x),
        lambda x, i: torch.cat((x[:2], x[3:]), dim=0),
        lambda x, i: torch.cat((x, x[:, :5]), dim=1),
        lambda x, i: x.to(torch.bfloat16),
        lambda x, i: x.to(torch.bfloat16).float(),
        lambda x, i: (i.int()).long(),
        lambda x, i: i.float(),
        lambda x, i: x.t().contiguous(),
        lambda x, i: x.view(2, 2, 4, -1).transpose(1, 3).reshape(2, -1),
        lambda x, i: x[:, ::2].clone(),
        lambda x, i: x.new_empty(3, 4, SIZE).copy_(x),
        lambda x, i: x.half(),
    ],
)
def test_data_movement_is_recorded(
    move: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    x, index = random(4, SIZE), torch.tensor([3, 0, 0])
    expected = move(x, index).clone()
    result, program = record(lambda: move(x, index), lambda r: [r], Arena())
    assert len(program) > 0
    assert result.dtype is expected.dtype
    program.replay()
    assert same(result, expected)


def test_what_is_no_kernel_is_refused_by_name() -> None:
    x = random(2, SIZE)
    with pytest.raises(NotRecordableError, match=r"aten\.cumsum\.default is no kernel"):
        record(lambda: x.cumsum(1), lambda r: [r], Arena())
    with pytest.raises(NotRecordableError, match=r"aten\._local_scalar_dense"):
        record(lambda: torch.empty(int(x[0, 0].item())), lambda r: [r], Arena())
    assert bindings.listening.listener is None


def test_a_wrong_index_in_a_replay_is_an_error() -> None:
    x, index = random(4, SIZE), torch.tensor([3, 0, 1])
    _, program = record(lambda: x[index], lambda r: [r], Arena())
    index[2] = 4
    with pytest.raises(IndexError, match="gather_rows: row or sequence 2"):
        program.replay()
    index[2] = 1
    program.replay()


def test_unknown_copies_are_errors() -> None:
    with pytest.raises(ValueError, match="copy"):
        movement.copy(torch.empty(2, dtype=torch.bool), torch.ones(2))
    with pytest.raises(ValueError, match="gather_rows"):
        gather.gather_rows(torch.ones(2, 2), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(IndexError, match="-1 is none of 2 rows"):
        gather.gather_rows(torch.ones(2, 2), torch.tensor([-1]))


def test_passing_results_lie_in_the_arena() -> None:
    """Until another program runs."""
    x, arena, forward = random(4, SIZE), Arena(), layers(2)
    expected = forward(x).clone()

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        result = forward(x)
        return result, forward(result)[1:, 2:]

    (_, passing), program = record(work, lambda r: r[:1], arena, lambda r: r[1:])
    start = arena.reserve(0).data_ptr()
    assert start <= passing.data_ptr() < start + arena.reserve(0).numel()
    program.replay()
    assert same(passing, forward(expected)[1:, 2:])
    _, other = record(lambda: forward(x), lambda r: [r], arena)
    other.replay()
    program.replay()
    assert same(passing, forward(expected)[1:, 2:])


def test_the_host_may_act_between_kernels() -> None:
    x, forward, added = random(4, SIZE), layers(1), [1.0]

    def work() -> torch.Tensor:
        middle = forward(x)
        bindings.between_kernels(lambda: middle.add_(added[0]), middle)
        after = forward(middle)
        bindings.between_kernels(lambda: after.mul_(2), after)
        return after

    result, program = record(work, lambda r: [r], Arena())
    for number in (1.0, 3.0):
        added[0] = number
        program.replay()
        assert same(result, work())


def run(recorder: StepRecorder, x: torch.Tensor, work: Callable[[], torch.Tensor]) -> torch.Tensor:
    described = Recordable("a step", None, [x, None], work, lambda r: [r])
    return recorder.run({}, None, lambda: described)


def test_steps_are_recorded_the_first_time() -> None:
    recorder, forward, runs = StepRecorder(), layers(2), []
    x = random(2, SIZE)

    def work() -> torch.Tensor:
        runs.append(len(runs))
        return forward(x)

    for seed in range(5):
        x.copy_(random(2, SIZE, seed=seed))
        assert same(run(recorder, x, work), forward(x))
    assert len(runs) == 1
    x = random(2, SIZE, seed=7)  # elsewhere
    assert same(run(recorder, x, work), forward(x))
    assert len(runs) == 2


def test_what_cannot_be_recorded_runs_op_by_op(caplog: pytest.LogCaptureFixture) -> None:
    recorder, x = StepRecorder(), random(2, SIZE)
    caplog.set_level("INFO")
    for _ in range(4):
        assert same(run(recorder, x, lambda: x.cumsum(1)), x.cumsum(1))
    messages = [r.getMessage() for r in caplog.records if r.name == "atom.graphs.recorded"]
    assert len(messages) == 1
    assert messages[0].startswith("a step runs op by op: aten.cumsum.default")


def test_what_else_has_the_same_name_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    recorder, x, forward = StepRecorder(), random(2, SIZE), layers(1)
    caplog.set_level("INFO")

    def run(key: int) -> torch.Tensor:
        run = forward if key == 0 else lambda x: x.cumsum(1)
        work = Recordable("a step", key, [x], lambda: run(x), lambda r: [r])
        return recorder.run({}, None, lambda: work)

    for key in (1, 0, 2, 0):
        run(key)
    assert recorder.was_replayed
    assert len([r for r in caplog.records if r.name == "atom.graphs.recorded"]) == 1


def test_known_work_is_not_described_again() -> None:
    """Nor dropped for it: what others recorded since does not matter."""
    recorder, x, forward = StepRecorder(), random(2, SIZE), layers(1)
    known: dict[Hashable, Recording[torch.Tensor]] = {}
    asked: list[int] = []

    def describe() -> Recordable[torch.Tensor]:
        asked.append(len(asked))
        return Recordable("a step", None, [x], lambda: forward(x), lambda r: [r])

    for seed in range(5):
        x.copy_(random(2, SIZE, seed=seed))
        assert same(recorder.run(known, "it", describe), forward(x))
    assert len(asked) == 2  # recorded, and found
    assert recorder.was_replayed
    recorder.release()
    assert same(recorder.run(known, "it", describe), forward(x))
    assert len(asked) == 2


def test_old_programs_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atom.graphs.recorded.MOST_PROGRAMS", 2)
    recorder, forward = StepRecorder(), layers(1)
    steps = [random(rows, SIZE, seed=rows) for rows in range(1, 5)]
    for _ in range(4):
        for x in steps:
            assert same(run(recorder, x, lambda x=x: forward(x)), forward(x))


def test_an_empty_program_runs() -> None:
    Program([], [], Arena()).replay()
