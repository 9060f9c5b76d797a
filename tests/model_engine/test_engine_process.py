"""The engine process: its loop on a scripted core, and its end with its parent."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from patience import PATIENCE_SECONDS, wait_until

from atom.config import ConfigError, EngineConfig
from atom.messages import (
    EngineDeadError,
    EngineLimits,
    EngineRequest,
    EngineStats,
    FinishReason,
    ModelFacts,
    RequestRefusedError,
    SequenceOutput,
    StepReport,
)
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.processes import heartbeat, wire
from atom.model_engine.processes.engine_process import EngineLoop
from atom.model_engine.processes.memory import give_back_memory
from atom.sampling_params import SamplingParams

LIMITS = EngineLimits(max_model_len=64, num_blocks=8, block_size=16, vocab_size=100, max_logprobs=5)


class ScriptedCore:
    """Each step gives every sequence one token: its number of steps so far.

    A prompt token 13 is refused; a step with a prompt token 66 or 67 fails.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.cache.block_size == 3:
            raise ConfigError("a block size of 3 is odd")
        if config.cache.block_size == 5:
            raise ZeroDivisionError("oops")
        self.limits = LIMITS
        self.prompts: dict[str, list[int]] = {}
        self.num_steps = 0
        self.num_asked = 0
        self.num_step_tokens = 0
        self.max_idle_ms: int | None = None
        self.may_step = threading.Event()
        self.may_step.set()
        self.is_shut_down = False

    @property
    def has_work(self) -> bool:
        self.num_asked += 1
        return bool(self.prompts)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.prompts))

    def add_request(self, request: EngineRequest) -> None:
        if 13 in request.prompt_token_ids:
            raise RequestRefusedError("13 is bad luck", "prompt")
        self.prompts[request.id] = request.prompt_token_ids

    def abort(self, ids: Iterable[str]) -> list[SequenceOutput]:
        known = [i for i in ids if self.prompts.pop(i, None) is not None]
        return [SequenceOutput(id=i, finish_reason=FinishReason.ABORT) for i in known]

    def step(self) -> StepReport:
        if any(66 in prompt for prompt in self.prompts.values()):
            raise RuntimeError("the device is lost")
        if any(67 in prompt for prompt in self.prompts.values()):
            raise EngineDeadError("RuntimeError: HIP error: the device is lost")
        time.sleep(0.001)
        self.num_step_tokens = sum(map(len, self.prompts.values()))
        assert self.may_step.wait(PATIENCE_SECONDS)
        self.num_steps += 1
        outputs = [SequenceOutput(id=i, token_ids=[self.num_steps]) for i in self.prompts]
        return StepReport(outputs=outputs, stats=self.stats)

    def shutdown(self) -> None:
        self.is_shut_down = True


class Frontend:
    """The other end of a loop that runs in a thread."""

    def __init__(self) -> None:
        context = zmq.Context.instance()
        name = uuid.uuid4().hex
        kinds = (zmq.PUSH, zmq.PULL, zmq.PULL, zmq.PUSH, zmq.PUSH)
        sockets = [context.socket(kind) for kind in kinds]
        for socket in sockets:
            socket.set_hwm(0)
        self.requests, requests, self.reports, reports, heartbeats = sockets
        self.requests.bind(f"inproc://{name}-requests")
        requests.connect(f"inproc://{name}-requests")
        self.reports.bind(f"inproc://{name}-reports")
        reports.connect(f"inproc://{name}-reports")
        heartbeats.connect(f"inproc://{name}-reports")
        self._sockets = sockets
        self.may_build = threading.Event()
        self.may_build.set()
        self.facts: ModelFacts | None = None
        self.core: ScriptedCore | None = None
        self.status: int | None = None
        self.num_tidied = 0
        loop = EngineLoop(requests, reports, heartbeats, self._create_core, self._tidy)
        self.thread = threading.Thread(target=self._run, args=(loop,), daemon=True)
        self.thread.start()

    def _create_core(
        self, config: EngineConfig, found: Callable[[ModelFacts], None]
    ) -> ScriptedCore:
        if self.facts is not None:
            found(self.facts)
        assert self.may_build.wait(PATIENCE_SECONDS)
        self.core = ScriptedCore(config)
        return self.core

    def _tidy(self) -> None:
        self.num_tidied += 1

    def _run(self, loop: EngineLoop) -> None:
        self.status = loop.run()

    def send(self, *messages: wire.ToEngine) -> None:
        for message in messages:
            self.requests.send(wire.encode(message))

    def add(self, name: str, prompt: list[int]) -> None:
        params = SamplingParams(logit_bias={3: 1.5}, temperature=0)
        request = EngineRequest(id=name, prompt_token_ids=prompt, params=params, seed=2**63 - 1)
        self.send(wire.AddRequests.of([request]))

    def receive(self) -> wire.FromEngine:
        """The next message that is no heartbeat."""
        return self.until(lambda message: not isinstance(message, wire.Heartbeat))

    def until(self, condition: Callable[[wire.FromEngine], bool]) -> wire.FromEngine:
        while not condition(message := self._receive_any()):
            pass
        return message

    def beat(self) -> wire.Heartbeat:
        message = self._receive_any()
        assert isinstance(message, wire.Heartbeat)
        return message

    def _receive_any(self) -> wire.FromEngine:
        assert self.reports.poll(1000 * PATIENCE_SECONDS), "the engine is silent"
        return wire.decode_from_engine(self.reports.recv())

    def start(self, **options: int) -> wire.FromEngine:
        self.send(wire.Start(engine_config(**options), 30))
        return self.receive()

    def join(self) -> int | None:
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()
        return self.status

    def close(self) -> None:
        if self.thread.is_alive():
            self.send(wire.Shutdown())
            self.thread.join(PATIENCE_SECONDS)
        for socket in self._sockets:
            socket.close(linger=0)


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    frontend = Frontend()
    yield frontend
    frontend.close()


def test_steps_that_other_engines_wait_for_are_not_reported(frontend: Frontend) -> None:
    frontend.start()
    assert frontend.core is not None
    frontend.core.max_idle_ms = 1
    frontend.send(wire.Abort([]))  # wakes the loop
    assert isinstance(frontend.receive(), wire.Step)
    core = frontend.core
    wait_until(lambda: core.num_steps >= 4)
    frontend.add("a", [1, 2])
    step = frontend.until(lambda m: isinstance(m, wire.Step))
    assert isinstance(step, wire.Step)
    assert [o.id for o in step.report.outputs] == ["a"]


def test_an_idle_engine_tidies_once(frontend: Frontend) -> None:
    frontend.start()
    wait_until(lambda: frontend.num_tidied == 1)
    frontend.add("a", [1, 2])
    assert isinstance(frontend.receive(), wire.Step)
    assert frontend.num_tidied == 1
    frontend.send(wire.Abort(["a"]))
    wait_until(lambda: frontend.num_tidied == 2)


def test_freed_memory_goes_back() -> None:
    """Also what lies below something that is still used."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("this is not glibc")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    size, process = 2**16, psutil.Process()
    blocks = [libc.malloc(size) for _ in range(1024)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:
        libc.free(block)
    before = process.memory_info().rss
    give_back_memory()
    assert process.memory_info().rss < before - size * 1000
    libc.free(blocks[-1])


def test_requests_run_until_aborted(frontend: Frontend) -> None:
    ready = frontend.start()
    assert isinstance(ready, wire.Ready)
    assert ready.limits == LIMITS
    frontend.add("a", [1, 2])
    report = frontend.receive()
    assert isinstance(report, wire.Step)
    assert [(o.id, o.token_ids) for o in report.report.outputs] == [("a", [1])]
    frontend.send(wire.Abort(["a", "unknown"]))
    last = frontend.until(
        lambda m: isinstance(m, wire.Step) and any(o.finish_reason for o in m.report.outputs)
    )
    assert isinstance(last, wire.Step)
    assert last.report.outputs == [SequenceOutput(id="a", finish_reason=FinishReason.ABORT)]
    assert last.report.stats.num_running == 0  # the numbers are true when the loop falls idle
    frontend.send(wire.Shutdown())
    assert frontend.join() == 0
    assert frontend.core is not None
    assert frontend.core.is_shut_down


def test_the_model_is_known_before_the_engine_is_built(frontend: Frontend) -> None:
    frontend.facts = ModelFacts(
        folder="/models/a", name="a", model_type="llama", sampling_defaults={"top_k": 3}, sees=False
    )
    frontend.may_build.clear()
    assert frontend.start() == wire.Found(frontend.facts)
    frontend.may_build.set()
    assert isinstance(frontend.receive(), wire.Ready)


def test_all_pending_messages_are_taken_before_a_step(frontend: Frontend) -> None:
    frontend.may_build.clear()
    frontend.send(wire.Start(engine_config(), 30))
    for name in ("a", "b", "c"):
        frontend.add(name, [1])
    frontend.send(wire.Abort(["b"]))
    frontend.may_build.set()
    assert isinstance(frontend.receive(), wire.Ready)
    first = frontend.until(
        lambda m: isinstance(m, wire.Step) and any(o.token_ids for o in m.report.outputs)
    )
    assert isinstance(first, wire.Step)
    assert [o.id for o in first.report.outputs] == ["a", "c"]


def test_refused_request(frontend: Frontend) -> None:
    frontend.start()
    frontend.add("bad", [13])
    assert frontend.receive() == wire.RequestRefused("bad", "13 is bad luck", "prompt")
    frontend.add("good", [1])
    assert isinstance(frontend.receive(), wire.Step)


def test_idle_loop_blocks_and_beats(frontend: Frontend) -> None:
    begin = time.monotonic()
    frontend.start()
    beats = [frontend.beat() for _ in range(2)]
    assert beats == [wire.Heartbeat(None)] * 2
    assert time.monotonic() - begin >= 2 * heartbeat.HEARTBEAT_SECONDS
    assert frontend.core is not None
    assert frontend.core.num_asked == 1, "it looks for work again and again"


def test_a_long_step_beats_on(frontend: Frontend) -> None:
    frontend.start()
    assert frontend.core is not None
    frontend.core.may_step.clear()
    frontend.add("a", [1, 2, 3])
    seen = list[wire.StepProgress]()
    while len(seen) < 2:
        if (step := frontend.beat().step) is not None:  # the first may have come before the step
            seen.append(step)
    assert seen[0].seconds < seen[1].seconds
    assert all(step.num_tokens == 3 for step in seen)
    assert all(step.allowed_seconds >= heartbeat.MIN_STEP_SECONDS for step in seen)
    assert not seen[-1].is_overdue
    frontend.core.may_step.set()
    assert isinstance(frontend.receive(), wire.Step)


def test_a_step_may_take_longer_the_more_tokens_it_has() -> None:
    pace = heartbeat.StepPace()
    floor = heartbeat.MIN_STEP_SECONDS
    assert pace.allowed_seconds(0) == floor
    unknown = pace.allowed_seconds(8192)
    assert unknown > 600  # a first prompt on a slow machine
    pace.learn(1, 50.0)  # a kernel was compiled: it says nothing of the speed
    assert pace.allowed_seconds(8192) == unknown
    pace.learn(1000, 2.0)
    pace.learn(2000, 1.0)
    assert pace.allowed_seconds(8192) == pytest.approx(floor + 10 * 8192 * 0.002)


def test_startup_errors(frontend: Frontend) -> None:
    assert frontend.start(block_size=3) == wire.StartupFailed("a block size of 3 is odd", True)
    assert frontend.join() == 1


def test_unforeseen_startup_error(frontend: Frontend, caplog: pytest.LogCaptureFixture) -> None:
    failed = frontend.start(block_size=5)
    assert failed == wire.StartupFailed("ZeroDivisionError: oops", False)
    assert frontend.join() == 1
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("token", "cause"),
    [
        (66, "RuntimeError: the device is lost"),
        (67, "RuntimeError: HIP error: the device is lost"),
    ],
)
def test_failing_step(
    frontend: Frontend, caplog: pytest.LogCaptureFixture, token: int, cause: str
) -> None:
    frontend.start()
    frontend.add("a", [token])
    assert frontend.receive() == wire.EngineFailed(cause)
    assert frontend.join() == 1
    assert "Traceback" in caplog.text


def test_the_configuration_crosses_whole() -> None:
    config = engine_config(
        model="m",
        kv_cache_memory="2GiB",
        gpu_memory_utilization=0.5,
        method="suffix",
        num_speculative_tokens=2,
        cudagraph_capture_sizes="1,2",
        seed=3,
    )
    message = wire.decode_to_engine(wire.encode(wire.Start(config, 20)))
    assert message == wire.Start(config, 20)
    with pytest.raises(wire.WireError):
        wire.decode_to_engine(wire.encode(wire.Heartbeat(None)))


def test_what_sequences_share_crosses_once() -> None:
    prompt, params = [7] * 1000, SamplingParams(logit_bias=dict.fromkeys(range(300), 1.0))
    requests = [
        EngineRequest(id=f"r/{i}", prompt_token_ids=prompt, params=params, seed=i, cache_salt="s")
        for i in range(64)
    ]
    other = EngineRequest(
        id="o/0", prompt_token_ids=[1], params=SamplingParams(), seed=0, priority=-3
    )
    alone = len(wire.encode(wire.AddRequests.of(requests[:1])))
    data = wire.encode(wire.AddRequests.of([*requests, other]))
    assert len(data) < 3 * alone
    message = wire.decode_to_engine(data)
    assert isinstance(message, wire.AddRequests)
    crossed = list(message.requests())
    assert crossed == [*requests, other]
    assert len({id(r.params) for r in crossed}) == 2
    assert len({id(r.prompt_token_ids) for r in crossed}) == 2


def test_process_ends_with_its_parent_alone(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "atom.model_engine.processes.engine_process",
            "--socket-dir",
            str(tmp_path),
        ],
        stdin=subprocess.PIPE,
    )
    try:
        wait_until((tmp_path / "requests").exists)
        # Terminals and service managers signal whole groups; the frontend decides.
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE_SECONDS) == 1
    finally:
        process.kill()
        process.wait()
