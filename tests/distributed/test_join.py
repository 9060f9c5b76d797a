"""Rank 0 and another rank join as threads, with everything but processes of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_SECONDS, wait_until
from ports import free_port
from ranks import run_threads

from atom.config import ConfigError, EngineConfig
from atom.distributed import connection
from atom.distributed.connection import ProcessGroups, RankDriver, RankFollower, RankLostError
from atom.distributed.rank_environment import RankEnvironment
from atom.distributed.store import Store, host_store, listen
from atom.entrypoints import llm, openai_server
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.processes import join, launched
from atom.model_engine.processes.join import join_as_driver, join_as_follower
from atom.model_engine.processes.launched import (
    by_hand,
    coupled_engines,
    coupled_others,
    local_ranks,
    run_as_follower_if_launched,
)


def config(folder: Path, **options: object) -> EngineConfig:
    return engine_config(
        **{"model": str(folder), "device": "cpu", "tensor_parallel_size": 2, **options}
    )


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> RankEnvironment:
    """What a launcher would say to rank 0 of two."""
    mine = RankEnvironment(0, 2, 0, master_port=free_port())
    monkeypatch.setattr(
        launched, "rank_variables", lambda: {k: v for k, v in mine.variables().items() if v}
    )
    monkeypatch.setattr(join, "_has_driven", False)
    return mine


@pytest.fixture
def pair(
    tiny_llama_dir: Path, environment: RankEnvironment
) -> Iterator[tuple[RankDriver, RankFollower]]:
    own = config(tiny_llama_dir)

    def enter(rank: int) -> RankDriver | RankFollower:
        if rank == 0:
            return join_as_driver(own)
        return join_as_follower(own, replace(environment, rank=1, local_rank=1))

    driver, follower = run_threads(2, enter)
    yield driver, follower
    driver.close()
    follower.close()


def test_the_first_rank_tells_and_all_compute(pair: tuple[RankDriver, RankFollower]) -> None:
    driver, follower = pair
    assert [each.groups.tp.rank for each in pair] == [0, 1]
    assert [each.groups.local_rank for each in pair] == [0, 1]
    assert [each.groups.num_local for each in pair] == [2, 2]
    driver.publish(b"do this")
    assert follower.receive() == b"do this"
    sums = run_threads(2, lambda rank: pair[rank].groups.tp.all_reduce(torch.ones(2) + rank))
    assert [each.tolist() for each in sums] == [[3.0, 3.0]] * 2
    assert (
        run_threads(2, lambda rank: pair[rank].groups.tp_cpu.exchange([rank])) == [[[0], [1]]] * 2
    )
    assert driver.failure() is None
    driver.close()
    assert follower.receive() is None


def test_a_failed_rank_is_named_with_its_cause(pair: tuple[RankDriver, RankFollower]) -> None:
    driver, follower = pair
    follower.failed("raised ValueError: no such thing")
    failure = driver.failure()
    assert failure is not None
    assert failure.startswith("rank 1 (pid ")
    assert failure.endswith("raised ValueError: no such thing")


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses that the process would have ended with, soon after another rank is gone."""
    statuses: list[int] = []
    monkeypatch.setattr(connection, "_exit", statuses.append)
    monkeypatch.setattr(connection, "_LAST_SECONDS", 0.5)
    return statuses


@pytest.fixture
def in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank is too late for the end."""
    monkeypatch.setattr(connection, "_LAST_SECONDS", PATIENCE_SECONDS)


def test_a_rank_ends_that_does_not_come_to_the_end(
    exits: list[int], pair: tuple[RankDriver, RankFollower]
) -> None:
    """It may wait for its device, in a step that rank 0 has left."""
    pair[0].close()
    wait_until(lambda: exits[:1] == [0])


@pytest.mark.usefixtures("in_time")
def test_a_rank_that_comes_to_the_end_is_not_ended(
    exits: list[int], pair: tuple[RankDriver, RankFollower]
) -> None:
    driver, follower = pair
    driver.close()
    assert follower.receive() is None
    wait_until(lambda: follower._exiting is not None)
    follower.close()
    assert follower._exiting is not None
    follower._exiting.join(PATIENCE_SECONDS / 2)
    assert not follower._exiting.is_alive()
    assert exits == []


def test_the_others_learn_why_rank_0_fails(
    exits: list[int], pair: tuple[RankDriver, RankFollower]
) -> None:
    driver, follower = pair
    driver.close("rank 0 raised ValueError: no such thing")
    with pytest.raises(RankLostError, match=r"rank 0 .* ValueError: no such thing"):
        follower.receive()
    wait_until(lambda: exits == [1])


@pytest.mark.parametrize("is_awaited", [True, False])
def test_rank_0_ends_if_it_still_waits_for_a_lost_rank(
    exits: list[int],
    pair: tuple[RankDriver, RankFollower],
    is_awaited: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver, follower = pair
    driver.is_awaited = is_awaited
    follower.failed("ValueError: no such thing")
    wait_until(lambda: driver._exiting is not None)
    assert driver._exiting is not None
    driver._exiting.join(PATIENCE_SECONDS)
    assert driver.lost is not None
    assert exits == ([1] if is_awaited else [])
    assert ("no such thing, and this rank still waits for it" in caplog.text) == is_awaited


class Stuck:
    """A process group whose collectives are held by graphs."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def abort(self) -> None:
        self.may_end.wait()


@pytest.mark.usefixtures("in_time")
def test_nothing_waits_for_communicators(
    exits: list[int], pair: tuple[RankDriver, RankFollower], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_ABORT_SECONDS", 0.1)
    stuck = Stuck()
    for each in pair:
        each._process_groups._handles.insert(0, stuck)
    pair[0].close()
    assert pair[1].receive() is None
    pair[1].close()
    assert exits == []
    stuck.may_end.set()


def test_steps_are_counted(pair: tuple[RankDriver, RankFollower]) -> None:
    driver, follower = pair
    for _ in range(3):
        driver.publish(b"step")
        follower.receive()
    wait_until(lambda: driver._watch.steps == {1: 3})
    wait_until(lambda: follower._reporter._rank0_step == 3)


def test_a_rank_that_is_late_in_the_start_is_awaited(pair: tuple[RankDriver, RankFollower]) -> None:
    driver, follower = pair
    for each in pair:
        each.stages.begin("loading the weights")
    driver.stages.begin("waiting for the other ranks")
    wait_until(lambda: driver.awaited == ["rank 1 is loading the weights"])
    follower.stages.begin("waiting for the other ranks")
    wait_until(lambda: driver.awaited == [])


def test_nccl_uses_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    connection._set_up_nccl("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] in ("=lo", "=lo0")
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"


def test_communicators_wait_for_ranks_that_load(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        class Options:
            pass

        def __init__(self, store: Store, *_: object) -> None:
            self.store = store

    monkeypatch.setattr(connection.dist, "ProcessGroupNCCL", Group, raising=False)
    root = host_store(listen(RankEnvironment(0, 2, 0)))
    made = ProcessGroups(root, "127.0.0.1")
    made.of_device_tensors("tensor", 0, 2, torch.device("cuda"))
    assert made._handles[0].store.timeout.total_seconds() == 1800
    assert root.timeout.total_seconds() == 60


def test_the_checkpoints_of_the_ranks_are_compared(
    tiny_llama_dir: Path, environment: RankEnvironment
) -> None:
    def enter(rank: int) -> str:
        own = config(tiny_llama_dir, dtype="float32" if rank else "float16")
        there = replace(environment, rank=1, local_rank=1)
        with pytest.raises(ConfigError) as error:
            join_as_follower(own, there) if rank else join_as_driver(own)
        return str(error.value)

    first, second = run_threads(2, enter)
    assert first == second
    assert "--dtype is float16 on rank 0" in first


def test_a_rank_without_the_model_ends_all(
    tiny_llama_dir: Path, environment: RankEnvironment
) -> None:
    def enter(rank: int) -> str:
        own = config(Path("/no/such/model") if rank else tiny_llama_dir)
        there = replace(environment, rank=1, local_rank=1)
        with pytest.raises(ConfigError) as error:
            join_as_follower(own, there) if rank else join_as_driver(own)
        return str(error.value)

    first, second = run_threads(2, enter)
    assert first == f"rank 1: {second}"
    assert "no folder or .gguf file /no/such/model" in first


@pytest.mark.usefixtures("environment")
def test_a_launched_process_drives_one_engine(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "_has_driven", True)
    with pytest.raises(ConfigError, match="for one engine, which this process has had"):
        join_as_driver(config(tiny_llama_dir))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 4}, "WORLD_SIZE=2 .* make 4 ranks"),
        ({"tensor_parallel_size": 1}, "an engine of its own in every process, unset RANK"),
        ({"tensor_parallel_size": 1, "data_parallel_size": 2}, "2 replicas .* share no ranks"),
        ({"nnodes": 2, "master_addr": "node1"}, "leave out one or the other"),
        (
            {"tensor_parallel_size": 1, "data_parallel_size": 2, "enable_expert_parallel": True},
            "the server starts them all",
        ),
        ({"distributed_executor_backend": "ray"}, "leave out one or the other"),
    ],
)
@pytest.mark.usefixtures("environment")
def test_what_a_launcher_says_and_the_options_do_not(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_as_follower_if_launched(config(Path("any"), **options))


@pytest.mark.usefixtures("environment")
def test_rank_0_builds_the_engine() -> None:
    assert run_as_follower_if_launched(config(Path("any"))) is None


def test_nobody_launched_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "rank_variables", dict)
    assert run_as_follower_if_launched(config(Path("any"))) is None


def test_engines_that_share_experts(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of one rank each: the first ranks know each other, and all share the experts."""
    options = {"tensor_parallel_size": 1, "data_parallel_size": 2, "enable_expert_parallel": True}
    own = config(tiny_llama_dir, **options)
    environments = coupled_engines(own.parallel)
    mine = threading.local()
    monkeypatch.setattr(launched, "rank_variables", lambda: mine.variables)

    def enter(engine: int) -> RankDriver:
        given = environments[engine].variables()
        mine.variables = {name: value for name, value in given.items() if value}
        return join_as_driver(own)

    drivers = run_threads(2, enter)
    every = [driver.groups for driver in drivers]
    assert [(groups.ep.rank, groups.ep.size) for groups in every] == [(0, 2), (1, 2)]
    assert [(groups.tp.rank, groups.tp.size) for groups in every] == [(0, 1), (0, 1)]
    assert run_threads(2, lambda e: every[e].dp_cpu.exchange([e])) == [[[0], [1]]] * 2
    for driver in drivers:
        driver.publish(b"nobody follows")
        driver.close()


def test_engines_that_share_experts_start_their_own_ranks() -> None:
    options = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}
    parallel = config(Path("any"), master_port=1234, **options).parallel
    first, second = coupled_engines(parallel)
    assert (first.rank, second.rank, second.local_rank, second.world_size) == (0, 2, 2, 4)
    [other] = coupled_others(parallel, second)
    assert (other.rank, other.local_rank, other.address) == (3, 3, "127.0.0.1:1234")


def test_machines_share_the_ranks_in_order() -> None:
    options = {"tensor_parallel_size": 4, "nnodes": 2, "master_addr": "node1"}
    for node, ranks in ((0, [1]), (1, [2, 3])):
        parallel = config(Path("any"), node_rank=node, **options).parallel
        started = local_ranks(parallel, by_hand(parallel))
        assert [each.rank for each in started] == ranks
        assert [each.local_rank for each in started] == [rank % 2 for rank in ranks]
        assert {each.address for each in started} == {"node1:29500"}


def test_too_few_devices(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "rank_variables", dict)
    gpu = join.select_platform("cpu").__class__("cuda", "sm90", True)
    monkeypatch.setattr(join, "select_platform", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"2 ranks of this machine need a GPU each.* sees 1"):
        join_as_driver(config(tiny_llama_dir))


def test_another_rank_opens_no_server_and_returns_from_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (openai_server, llm):
        monkeypatch.setattr(module, "run_as_follower_if_launched", lambda _: 7)
    assert openai_server.main(["--model", "any"]) == 7
    with pytest.raises(SystemExit) as ended:
        llm.LLM("any")
    assert ended.value.code == 7
