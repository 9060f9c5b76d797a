"""What replicas get of a machine."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from patience import until

from atom import LLM
from atom.config import ConfigError
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.processes import shares
from atom.model_engine.processes.engine_client import EngineClient
from atom.model_engine.processes.placement import Placement, place_engines
from atom.model_engine.processes.spawn import EngineProcess, spawned_engines


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Six processors, no GPU."""
    for name, value in (("num_gpus", 0), ("cpus_by_core", [0, 3, 1, 4, 2, 5])):
        monkeypatch.setattr(shares, name, lambda value=value: value)
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.usefixtures("machine")
def test_a_single_engine_has_all() -> None:
    config = engine_config()
    (placement,) = place_engines(config)
    assert placement.config == config
    assert (placement.cpus, placement.environment) == ((), None)


@pytest.mark.usefixtures("machine")
def test_engines_that_share_experts_divide_the_machine_themselves() -> None:
    options = {"data_parallel_size": 2, "tensor_parallel_size": 3, "enable_expert_parallel": True}
    config = engine_config(master_port=1234, **options)
    placements = place_engines(config)
    assert [placement.config for placement in placements] == [config] * 2
    assert [placement.cpus for placement in placements] == [()] * 2
    variables = [dict(placement.environment or {}) for placement in placements]
    assert [each["RANK"] for each in variables] == ["0", "3"]
    assert {(each["WORLD_SIZE"], each["MASTER_PORT"]) for each in variables} == {("6", "1234")}


@pytest.mark.usefixtures("machine")
def test_processors_and_memory_are_divided() -> None:
    placements = place_engines(engine_config(data_parallel_size=2))
    assert [placement.cpus for placement in placements] == [(0, 3, 1), (4, 2, 5)]
    for placement in placements:
        assert placement.config.cache.gpu_memory_utilization == pytest.approx(0.15)
        assert placement.config.parallel.num_replicas == 1
    (given, _) = place_engines(engine_config(data_parallel_size=2, num_threads=4))
    assert (given.cpus, given.config.parallel.num_threads) == ((), 4)
    (share, *_) = place_engines(engine_config(data_parallel_size=3, gpu_memory_utilization=0.6))
    assert share.config.cache.gpu_memory_utilization == pytest.approx(0.2)


def test_a_quota_is_divided_into_threads(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(shares, "cpus_by_core", list)
    machine.setattr(shares, "default_num_threads", lambda: 5)
    for placement in place_engines(engine_config(data_parallel_size=2)):
        assert (placement.cpus, placement.config.parallel.num_threads) == ((), 2)
    for config in (
        engine_config(data_parallel_size=7),
        engine_config(data_parallel_size=2, tensor_parallel_size=2),
    ):
        assert place_engines(config)[-1].config.parallel.num_threads == 1


@pytest.mark.parametrize(
    ("is_rocm", "given", "name", "expected"),
    [
        (False, {}, "CUDA_VISIBLE_DEVICES", ["0,1", "2,3"]),
        (
            False,
            {"CUDA_VISIBLE_DEVICES": "7, 5,GPU-a,1"},
            "CUDA_VISIBLE_DEVICES",
            ["7,5", "GPU-a,1"],
        ),
        (True, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "HIP_VISIBLE_DEVICES", ["4,5", "6,7"]),
        (
            True,
            {"HIP_VISIBLE_DEVICES": "3,2,1,0", "CUDA_VISIBLE_DEVICES": "9"},
            "HIP_VISIBLE_DEVICES",
            ["3,2", "1,0"],
        ),
    ],
)
def test_each_replica_sees_its_gpus(
    machine: pytest.MonkeyPatch,
    is_rocm: bool,
    given: dict[str, str],
    name: str,
    expected: list[str],
) -> None:
    machine.setattr(shares, "num_gpus", lambda: 4)
    machine.setattr("torch.version.hip", "7.0" if is_rocm else None)
    for variable, value in given.items():
        machine.setenv(variable, value)
    config = engine_config(data_parallel_size=2, tensor_parallel_size=2)
    placements = place_engines(config)
    assert [(each.environment or {})[name] for each in placements] == expected
    for placement in placements:
        assert (placement.environment or {})["PATH"] == os.environ["PATH"]
        assert placement.config.cache == config.cache
        assert placement.cpus == ()


def test_what_cannot_be_placed(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(shares, "num_gpus", lambda: 3)
    with pytest.raises(ConfigError, match="need 4, and 3 are visible"):
        place_engines(engine_config(data_parallel_size=2, tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="on one machine, and nnodes is 2"):
        place_engines(engine_config(data_parallel_size=2, nnodes=2, master_addr="h"))
    with pytest.raises(ConfigError, match="master_port of its own"):
        place_engines(engine_config(data_parallel_size=2, master_port=1234))


async def test_the_process_keeps_to_its_place() -> None:
    cpu = max(os.sched_getaffinity(0))
    environment = {**os.environ, "HIP_VISIBLE_DEVICES": "3"}
    config = engine_config()
    client = EngineClient(EngineProcess(Placement(config, (cpu,), environment)), config)
    try:
        process = psutil.Process(client.pid)
        # A program that has just begun has no variables yet, holds Ctrl-C back, and may be on this
        # processor before it is placed.
        await until(lambda: process.environ() and not signals_of(client.pid, "SigBlk"))
        await until(lambda: process.cpu_affinity() == [cpu])
        assert process.environ()["HIP_VISIBLE_DEVICES"] == "3"
        assert signals_of(client.pid, "SigIgn") >> (signal.SIGINT - 1) & 1
    finally:
        await client.kill()


def signals_of(pid: int, key: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(dict(line.split(":\t", 1) for line in status)[key], 16)


def test_ctrl_c_does_not_reach_a_process_that_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal sends it to all processes of a program, and Python raises until it is told."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nkill -INT $$\nexit 7\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with spawned_engines(engine_config(device="cpu")) as engines:
        assert engines._processes[0].wait() == 7
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_file_may_have_the_name_of_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-model.gguf").touch()
    with spawned_engines(engine_config(model="./-model.gguf", device="cpu")) as engines:
        (process,) = engines._processes
        assert isinstance(process.args, list)
        assert process.args[-2:] == ["--ahead", str(tmp_path / "-model.gguf")]


def test_processes_that_nobody_takes_are_ended() -> None:
    with spawned_engines(engine_config(device="cpu", data_parallel_size=2)) as engines:
        first, second = list(engines._processes)
        assert first.poll() is None
        assert first.socket_dir.is_dir()
    for process in (first, second):
        assert process.poll() is not None
        assert not process.socket_dir.exists()


def test_the_offline_api_has_one_engine() -> None:
    with pytest.raises(ConfigError, match="2 replicas need processes of their own"):
        LLM(data_parallel_size=2)
