"""A process keeps to the processors of its GPU's NUMA node, and never gets more than it had."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atom import numa
from atom.numa import bind_to_gpu

ADDRESS = "0000:c5:00.0"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def machine(root: Path, node: str, cpulist: str, balancing: str = "0") -> Path:
    """A file system that says where the GPU is."""
    for name, text in {
        f"sys/bus/pci/devices/{ADDRESS}/numa_node": node,
        "sys/devices/system/node/node1/cpulist": cpulist,
        "proc/sys/kernel/numa_balancing": balancing,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


class Threads:
    """Stands for the kernel: what each thread of the process may use; 0 is the caller's."""

    def __init__(self, folder: Path, allowed: dict[int, set[int]]) -> None:
        self.allowed = allowed
        for thread in [*allowed, 99]:  # the last has ended meanwhile
            if thread:
                (folder / str(thread)).mkdir(parents=True)

    def get(self, thread: int) -> set[int]:
        if thread not in self.allowed:
            raise ProcessLookupError
        return self.allowed[thread]

    def set(self, thread: int, cpus: set[int]) -> None:
        assert cpus
        self.allowed[thread] = set(cpus)


@pytest.fixture
def threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Threads:
    kernel = Threads(
        tmp_path / "task", {0: set(range(8)), 10: set(range(8)), 11: {3, 4}, 12: {0, 1}}
    )
    monkeypatch.setattr(numa, "_THREADS", tmp_path / "task")
    monkeypatch.setattr(numa, "_before", None)
    monkeypatch.setattr(os, "sched_getaffinity", kernel.get)
    monkeypatch.setattr(os, "sched_setaffinity", kernel.set)
    return kernel


def test_every_thread_is_bound(
    threads: Threads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Within what it had; one that was kept elsewhere stays there."""
    with caplog.at_level(logging.INFO):
        bind_to_gpu(3, ADDRESS, machine(tmp_path, "1", "4-5,7,20-23", "1"))
    assert threads.allowed == {0: set(range(8)), 10: {4, 5, 7}, 11: {4}, 12: {0, 1}}
    assert caplog.messages == [
        f"GPU 3 ({ADDRESS}): bound to NUMA node 1, 3 of the 8 processors that it could use"
    ]


@pytest.mark.parametrize(
    ("node", "cpulist"),
    [("-1", "4-7"), ("1", "20-23"), ("1", ""), ("1", "x"), ("x", "4-7"), ("2", "4-7")],
)
def test_nothing_is_bound(threads: Threads, tmp_path: Path, node: str, cpulist: str) -> None:
    """Without a node, and where none of its processors may be used."""
    before = dict(threads.allowed)
    bind_to_gpu(0, ADDRESS, machine(tmp_path, node, cpulist))
    assert threads.allowed == before


def test_machines_that_tell_nothing(threads: Threads, tmp_path: Path) -> None:
    before = dict(threads.allowed)
    bind_to_gpu(0, ADDRESS, tmp_path / "empty")
    bind_to_gpu(0, None, machine(tmp_path, "1", "4-7"))
    assert threads.allowed == before


@pytest.mark.parametrize(("mode", "warns"), [("0", False), ("1", True), ("2", False), ("3", True)])
@pytest.mark.usefixtures("threads")
def test_the_log_warns_of_balancing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, warns: bool
) -> None:
    """Once a machine, whether or not its GPUs have nodes."""
    root = machine(tmp_path, "-1", "", mode)
    for index in range(8):
        bind_to_gpu(index, ADDRESS, root)
    assert [m.partition(":")[0] for m in caplog.messages] == (
        [f"kernel.numa_balancing is {mode}"] if warns else []
    )


PROGRAM = """
import os, sys, threading
from pathlib import Path
from atom import numa
done = threading.Event()
before = threading.Thread(target=done.wait)
before.start()
numa.bind_to_gpu(0, sys.argv[2], Path(sys.argv[1]))
after = threading.Thread(target=done.wait)
after.start()
print(*(sorted(os.sched_getaffinity(t)) for t in (0, before.native_id, after.native_id)), sep=";")
done.set()
"""


def test_threads_of_a_real_process(tmp_path: Path) -> None:
    """Those that run already, and those that come."""
    one = max(os.sched_getaffinity(0))
    command = [sys.executable, "-c", PROGRAM, str(machine(tmp_path, "1", str(one))), ADDRESS]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.strip() == ";".join([f"[{one}]"] * 3)


CHILDREN = """
import subprocess, sys
from pathlib import Path
from atom import numa
tell = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)), flush=True)"]
for _ in range(2):  # an engine that ends, and another one
    with numa.unbound():
        subprocess.run(tell, check=True)
    numa.bind_to_gpu(0, sys.argv[2], Path(sys.argv[1]))
subprocess.run(tell, check=True)
"""


def test_ranks_of_a_later_engine_are_not_bound(tmp_path: Path) -> None:
    """Their GPUs may be on other nodes; what else is started stays beside this process's."""
    own = os.sched_getaffinity(0)
    if len(own) < 2:
        pytest.skip("needs two processors")
    one = max(own)
    command = [sys.executable, "-c", CHILDREN, str(machine(tmp_path, "1", str(one))), ADDRESS]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == [str(sorted(own)), str(sorted(own)), str([one])]
