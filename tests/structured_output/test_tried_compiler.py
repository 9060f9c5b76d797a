"""Hard grammars end, and nobody else waits for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

import psutil
import pytest
from patience import PATIENCE_SECONDS, is_gone, wait_until
from structured_output.pathological import easy, hard, settled_worker, workers

from atom import SamplingParams, StructuredOutput
from atom.messages import EngineRequest, RequestRefusedError
from atom.model_engine.grammar_queue import GrammarQueue
from atom.structured_output.base import CompileStoppedError
from atom.structured_output.cache import GrammarCache
from atom.structured_output.trials.client import TrialProcess
from atom.structured_output.trials.compiler import TriedCompiler
from atom.structured_output.xgrammar_backend import XGrammarBackend

NUM_HARD = 4


@pytest.fixture
def create(trials: TrialProcess, backend: XGrammarBackend) -> Callable[..., GrammarCache]:
    def create(**capacities: int) -> GrammarCache:
        return GrammarCache(TriedCompiler(lambda: backend, trials), **capacities)

    return create


CreateCache = Callable[..., GrammarCache]


@pytest.mark.parametrize("first_failing", [1, 2, 3])
def test_a_thread_that_cannot_be_started_leaves_none_waiting(
    first_failing: int, monkeypatch: pytest.MonkeyPatch, trials: TrialProcess
) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if len(started) + 1 == first_failing:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_some)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            TriedCompiler(lambda: pytest.fail("not wanted"), trials)
    # Threads of a pool that nobody holds end by themselves, unless they wait for others.
    wait_until(lambda: not any(thread.is_alive() for thread in started))


def test_easy_grammars_pass_hard_ones_which_are_refused(create: CreateCache) -> None:
    grammars = create()
    queue = GrammarQueue(grammars)
    grammars.get(easy(0))
    for i in range(NUM_HARD):
        queue.add(request(f"hard-{i}", hard(i)))
    for i in range(1, 6):
        queue.compile(easy(i))
    assert len(queue.waiting) == NUM_HARD
    assert queue.release(lambda admitted: pytest.fail(admitted.id)) == []
    refused = []

    def release() -> bool:
        refused.extend(queue.release(lambda admitted: pytest.fail(admitted.id)))
        return not queue.waiting

    wait_until(release)
    assert {sequence.id for sequence in refused} == {f"hard-{i}" for i in range(NUM_HARD)}
    for sequence in refused:
        assert sequence.message == (
            "structured_output: compiling it takes too long; make it smaller, or ask for fewer "
            "repetitions"
        )
        assert sequence.param == "structured_output"
    assert grammars.num_bytes < 1 << 20
    assert hard(0) not in grammars._known  # another time it may be compiled


def test_all_threads_are_there_before_the_first_grammar(create: CreateCache) -> None:
    before = set(threading.enumerate())
    grammars = create()
    started = set(threading.enumerate()) - before
    names = sorted(thread.name for thread in started)
    assert names == ["grammar_0", "grammar_1", "slow-grammar_0"]
    for i in range(4):
        grammars.get(easy(i))
    after = {thread for thread in threading.enumerate() if "grammar_" in thread.name} - before
    assert after == started


def request(name: str, wanted: StructuredOutput) -> EngineRequest:
    params = SamplingParams(structured_output=wanted)
    return EngineRequest(id=name, prompt_token_ids=[1], params=params, seed=0)


def test_abort_ends_compiling(create: CreateCache, trials: TrialProcess) -> None:
    """Of a grammar that two wait for, when both are gone; also of those that wait for a place."""
    queue = GrammarQueue(create())
    queue.compile(easy(0))
    for name, wanted in (("a", hard(10)), ("b", hard(10)), ("c", hard(11)), ("d", hard(12))):
        queue.add(request(name, wanted))
    wait_until(lambda: workers(trials.pid) != [])
    assert [output.id for output in queue.abort(["c", "a", "d"])] == ["c", "a", "d"]
    future = queue._futures["b"]
    wait_until(lambda: len(workers(trials.pid)) == 1)
    assert not future.done()
    queue.abort(["b"])
    assert future.cancelled()
    wait_until(lambda: workers(trials.pid) == [])


def test_a_reader_that_leaves_offline_ends_compiling(
    create: CreateCache, trials: TrialProcess
) -> None:
    queue = GrammarQueue(create(), compile_seconds=0.2)
    with pytest.raises(RequestRefusedError, match="takes too long"):
        queue.compile(hard(20))
    wait_until(lambda: workers(trials.pid) == [])


def test_the_end_of_a_worker_refuses_its_request_alone(
    create: CreateCache, trials: TrialProcess
) -> None:
    grammars = create()
    grammars.get(easy(0))
    future = grammars.submit(hard(30))
    wait_until(lambda: settled_worker(trials.pid))
    worker = settled_worker(trials.pid)
    assert worker is not None
    other = grammars.submit(easy(31))
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(CompileStoppedError, match="ended by signal 9"):
        future.result(PATIENCE_SECONDS)
    other.result(PATIENCE_SECONDS)


def test_the_end_of_the_process_is_made_good(create: CreateCache, trials: TrialProcess) -> None:
    """Another process tries what was on its way, and the workers of the first end soon."""
    grammars = create()
    grammars.get(easy(0))
    first = trials.pid
    assert first is not None
    hard_one = grammars.submit(hard(40))
    wait_until(lambda: settled_worker(first))
    orphan = settled_worker(first)
    assert orphan is not None
    os.kill(first, signal.SIGKILL)
    grammars.get(easy(41))
    assert trials.pid != first
    wait_until(lambda: workers(trials.pid) != [])
    assert not hard_one.done()
    grammars.abandon(hard(40))
    with pytest.raises(CancelledError):
        hard_one.result()
    wait_until(lambda: is_gone(orphan.pid))


_ENGINE = """
import sys
from atom import StructuredOutput
from atom.structured_output.trials.client import TrialProcess
from atom.structured_output.vocabulary import Vocabulary
from patience import wait_until
from structured_output.pathological import hard, settled_worker
tokens = [bytes([i]) for i in range(256)] + [bytes([a, b]) for a in b"abcxyz" for b in b"abcxyz"]
vocabulary = Vocabulary(
    tokens=[*tokens, b""], markers={}, stop_token_ids=[len(tokens)], add_prefix_space=False
)
trials = TrialProcess()
trial = trials.submit(vocabulary, hard(0))
wait_until(lambda: settled_worker(trials.pid))
print(trials.pid, settled_worker(trials.pid).pid, flush=True)
sys.stdin.read()
"""


def test_nothing_outlives_the_engine() -> None:
    """Though it is killed, and a grammar is on its way."""
    engine = subprocess.Popen(
        [sys.executable, "-c", _ENGINE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert engine.stdout is not None
    with engine:
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(is_gone(pid) for pid in pids)
        engine.kill()
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_the_process_is_light(create: CreateCache, trials: TrialProcess) -> None:
    """It does without torch, as long as xgrammar lets it."""
    create().get(easy(0))
    files = [entry.path for entry in psutil.Process(trials.pid).memory_maps()]
    assert [path for path in files if "xgrammar" in path] != []
    assert [path for path in files if "libtorch" in path] == []


def test_used_grammars_stay_though_many_follow(create: CreateCache) -> None:
    grammars = create(capacity=2)
    held = grammars.submit(easy(0))
    for i in range(1, 5):
        grammars.get(easy(i))
    assert grammars.submit(easy(0)) is held
    assert easy(4) in grammars._known
    wait_until(lambda: easy(1) not in grammars._known)  # its thread may hold it a moment longer


def test_kept_grammars_are_bounded_by_bytes(create: CreateCache) -> None:
    size = create().get(easy(0)).num_bytes
    limit = 3 * size + size // 2
    grammars = create(capacity_bytes=limit)
    for i in range(8):
        grammars.submit(easy(i)).result()
    wait_until(lambda: grammars.num_bytes <= limit)
    assert list(grammars._recent) == [easy(5), easy(6), easy(7)]
    small = create(capacity_bytes=1)
    assert small.get(easy(1)) is small.get(easy(1))


def test_wrong_grammars_are_remembered(create: CreateCache) -> None:
    grammars = create()
    first = grammars.submit(StructuredOutput.ebnf("root ::= other"))
    assert "not defined" in str(first.exception(PATIENCE_SECONDS))
    assert grammars.submit(StructuredOutput.ebnf("root ::= other")) is first
