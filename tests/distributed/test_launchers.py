"""Ranks as processes: whatever starts them, and that nothing is left of them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from patience import PATIENCE_SECONDS, wait_until
from ports import free_port

from atom import LLM, SamplingParams
from atom.distributed import launch, ray_launch
from atom.distributed.launch import LocalRanks, RankStartError
from atom.distributed.rank_environment import RankEnvironment
from atom.distributed.ray_launch import NodePlan, plan_nodes
from atom.messages import EngineDeadError
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.processes.join import join_as_driver
from atom.model_engine.processes.launched import instructions
from atom.options.fields import ConfigError

OPTIONS = {"dtype": "float32", "kv_cache_memory": "4MB", "max_model_len": 128, "num_threads": 1}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = "hello world"
START_SECONDS = 150.0
# Prints what it generates with the model in the folder that is its argument.
SCRIPT = f"""
import sys
from atom import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, **{OPTIONS})
sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
[output] = llm.generate(["{PROMPT}"], sampling, use_tqdm=False)
print(output.outputs[0].token_ids)
"""


@pytest.fixture(scope="module")
def expected(tiny_llama_dir: Path) -> list[int]:
    with LLM(str(tiny_llama_dir), **OPTIONS) as llm:
        return tokens(llm)


def tokens(llm: LLM) -> list[int]:
    return llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def rank_processes(parent: int | None = None) -> list[psutil.Process]:
    children = psutil.Process(parent).children(recursive=True)
    return [each for each in children if launch.RANK_MODULE in each.cmdline()]


def test_a_rank_that_cannot_start_is_reported_at_once(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "RANK_MODULE", "no_such_module")
    config = engine_config(model=str(tiny_llama_dir), tensor_parallel_size=2, **OPTIONS)
    with pytest.raises(
        RankStartError, match=r"rank 1 \(pid \d+\) ended with status 1; .* no_such_module"
    ):
        join_as_driver(config)


def test_a_rank_ends_with_the_process_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it notices by its standard input, also while it waits for rank 0."""
    monkeypatch.setattr(launch, "_EXIT_SECONDS", PATIENCE_SECONDS)
    meeting = RankEnvironment(1, 2, 1, master_port=free_port())
    ranks = LocalRanks([meeting], instructions(engine_config()))
    [pid] = ranks.pids
    wait_until(
        lambda: "torch" in "".join(m.path for m in psutil.Process(pid).memory_maps()),
        START_SECONDS,
    )
    ranks.check()
    ranks.close()
    assert ranks.wait(threading.Event()) == 1, "it was killed instead"
    assert not psutil.pid_exists(pid)


def test_ranks_generate_together_until_one_is_killed(
    tiny_llama_dir: Path, expected: list[int]
) -> None:
    llm = LLM(str(tiny_llama_dir), tensor_parallel_size=2, **OPTIONS)
    try:
        [rank] = rank_processes()
        assert tokens(llm) == expected
        rank.kill()
        with pytest.raises(EngineDeadError, match=rf"rank 1 \(pid {rank.pid}.* signal 9"):
            tokens(llm)
    finally:
        llm.shutdown()
    assert rank_processes() == []


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_lost(tiny_llama_dir: Path) -> None:
    with LLM(str(tiny_llama_dir), tensor_parallel_size=2, **OPTIONS) as llm:
        [rank] = rank_processes()
        rank.suspend()
        with pytest.raises(EngineDeadError, match=r"rank 1 .* is silent"):
            tokens(llm)


@pytest.mark.slow
def test_nothing_is_left_when_rank_0_is_killed(tiny_llama_dir: Path) -> None:
    script = SCRIPT + "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    process = subprocess.Popen([sys.executable, "-c", script, str(tiny_llama_dir)])
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, START_SECONDS)
    [rank] = rank_processes(process.pid)
    process.kill()
    process.wait()
    wait_until(lambda: not rank.is_running())


@pytest.mark.slow
def test_torchrun(tiny_llama_dir: Path, expected: list[int], tmp_path: Path) -> None:
    """All processes run one script, whose end only rank 0 reaches, without a word about ending."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script), str(tiny_llama_dir)],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    assert done.stdout.split("\n")[:-1] == [str(expected)]


class Machine:
    """A server's command on one of two machines, which are this one."""

    def __init__(self, model: Path, node: int, master_port: int, server_port: int) -> None:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
        flags += ["--tensor-parallel-size=2", "--nnodes=2", f"--node-rank={node}"]
        flags += ["--master-addr=127.0.0.1", f"--master-port={master_port}"]
        flags += [f"--port={server_port}"]
        command = [sys.executable, "-m", "atom.entrypoints.openai_server", str(model)]
        self.process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
        self._log: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @property
    def log(self) -> str:
        return "".join(self._log)

    def wait(self) -> int:
        status = self.process.wait(START_SECONDS)
        self._reading.join(PATIENCE_SECONDS)
        return status

    def _read(self) -> None:
        assert self.process.stderr is not None
        self._log.extend(self.process.stderr)


@contextmanager
def machines(model: Path) -> Iterator[tuple[Callable[[int], Machine], str]]:
    """What starts a machine by its number, and the server's address."""
    ports, started = (free_port(), free_port()), list[Machine]()

    def start(node: int) -> Machine:
        started.append(Machine(model, node, *ports))
        return started[-1]

    try:
        yield start, f"http://127.0.0.1:{ports[1]}"
    finally:
        for machine in started:
            machine.process.kill()
            machine.process.wait()


def completion(url: str) -> str:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


@pytest.mark.slow
def test_machines_joined_by_hand(tiny_llama_dir: Path) -> None:
    with machines(tiny_llama_dir) as (start, url):
        other, first = start(1), start(0)
        wait_until(lambda: "Ready" in first.log or first.process.poll() is not None, START_SECONDS)
        text = completion(url)
        late = start(1)
        assert late.wait() == 1
        assert "there is a rank 1" in late.log
        assert completion(url) == text
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == 0
        assert other.wait() == 0


@pytest.mark.slow
def test_the_server_says_which_rank_was_lost(tiny_llama_dir: Path) -> None:
    with machines(tiny_llama_dir) as (start, url):
        other, first = start(1), start(0)
        wait_until(lambda: "Ready" in first.log or first.process.poll() is not None, START_SECONDS)
        other.process.send_signal(signal.SIGTERM)
        assert other.wait() == 0
        with pytest.raises(httpx.HTTPError):
            completion(url)
        assert first.wait() == 1
        assert "rank 1" in first.log


def test_ray_is_asked_for_the_fewest_nodes() -> None:
    assert plan_nodes(4, 4, [4, 4]) == NodePlan(4, 1)
    assert plan_nodes(8, 4, [4, 2]) == NodePlan(4, 2)
    assert plan_nodes(6, 2, [8, 8]) == NodePlan(2, 3)
    with pytest.raises(ConfigError, match=r"4, 3 devices.* 8 ranks do not fit"):
        plan_nodes(8, 4, [3])


def test_ray_that_is_not_installed(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = engine_config(
        model=str(tiny_llama_dir), tensor_parallel_size=2, distributed_executor_backend="ray"
    )
    with pytest.raises(ConfigError, match=r"needs Ray.* pip install 'atom-llm\[ray\]'"):
        join_as_driver(config)


@pytest.fixture
def ray_cluster() -> Iterator[Any]:
    """Two nodes of one processor each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address)
    yield ray
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_ray(ray_cluster: Any, tiny_llama_dir: Path, expected: list[int]) -> None:
    options = {**OPTIONS, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    llm = LLM(str(tiny_llama_dir), **options)
    assert ray_cluster.available_resources().get("CPU", 0) == 0
    assert tokens(llm) == expected
    llm.shutdown()
    wait_until(lambda: ray_cluster.available_resources().get("CPU", 0) == 2)
    with pytest.raises(ConfigError, match="3 ranks do not fit"):
        ray_launch.place_ranks(engine_config(tensor_parallel_size=3).parallel, "cpu")
