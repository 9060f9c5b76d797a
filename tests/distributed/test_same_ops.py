"""Ranks that would run different kernels are refused by name, before their devices wait."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ranks as rank_threads
import torch
from patience import wait_until
from ranks import Ranks, engines_of_threads, groups_of, run_threads
from spec_decode.engines import create_engine, write_target
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.config import ConfigError
from atom.distributed import launch
from atom.distributed.parallel_state import SINGLE, ParallelGroup, ParallelGroups
from atom.environment import environment_with
from atom.model_engine.start_up.same_ops import check_same_ops
from atom.model_ops import registry
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import Implementation, OpTable, always
from atom.platform import Platform

MI300X = Platform("rocm", "gfx942", True)
AITER, TORCH = Implementation("aiter", always, object), Implementation("torch", always, object)
BROKEN = Implementation("aiter", lambda _: "import aiter: OSError: file too short", object)


def table(*better: Implementation, sizes: Sequence[int] = (64,)) -> OpTable:
    made = OpTable(MI300X, {"rms_norm": (*better, TORCH), "add": (TORCH,)})
    made.resolve("add", torch.bfloat16)
    for size in sizes:
        made.resolve("rms_norm", torch.bfloat16, size=size)
    return made


def refusals(tables: Sequence[OpTable]) -> list[str | None]:
    """What each rank raises."""
    ranks = Ranks()

    def check(rank: int) -> str | None:
        group = ranks.group("control", rank, len(tables))
        try:
            check_same_ops(
                ParallelGroups(tp=replace(group, collectives=None), tp_cpu=group), tables[rank]
            )
        except ConfigError as error:
            return str(error)
        return None

    return run_threads(len(tables), check)


def test_the_rank_the_op_and_both_choices_are_named_on_all_of_eight_ranks() -> None:
    tables = [table(BROKEN if rank == 5 else AITER) for rank in range(8)]
    expected = (
        "the ranks cannot work together, since they would run different kernels: rms_norm "
        "(dtype=bfloat16, size=64) is aiter on ranks 0, 1, 2, 3, 4, 6, 7 but torch on rank 5 "
        "(not aiter: import aiter: OSError: file too short)"
    )
    assert refusals(tables) == [expected] * 8


def test_many_differences_are_counted() -> None:
    sizes = range(1, 10)
    [message, _] = refusals([table(AITER, sizes=sizes), table(sizes=sizes)])
    assert message is not None
    assert "size=3) is aiter on rank 0 but torch on rank 1; and 6 more differ" in message


def test_ranks_may_have_ops_that_others_lack() -> None:
    assert refusals([table(AITER, sizes=(64, 8)), table(AITER, sizes=(64, 7))]) == [None, None]


def test_engines_that_share_experts_are_compared() -> None:
    """Their first ranks, each with another rank behind it."""
    ranks = Ranks()

    def check(rank: int) -> str | None:
        engine, number = divmod(rank, 2)
        control = ranks.group(f"control {engine}", number, 2)
        engines = ranks.group("engines", engine, 2) if number == 0 else SINGLE
        groups = ParallelGroups(tp=ParallelGroup(number, 2), tp_cpu=control, dp_cpu=engines)
        try:
            check_same_ops(groups, table(*([AITER] if engine else [])))
        except ConfigError as error:
            return str(error)
        return None

    first, *others = run_threads(4, check)
    assert first is not None
    assert "is torch on rank 0 but aiter on rank 2" in first
    assert others == [None, first, None]


def test_ranks_of_a_later_engine_have_their_own_numbers() -> None:
    """Two engines of two ranks, of which the second's differ."""
    ranks = Ranks()

    def check(rank: int) -> str | None:
        engine, number = divmod(rank, 2)
        groups = ParallelGroups(
            tp=ParallelGroup(number, 2),
            tp_cpu=ranks.group(f"control {engine}", number, 2),
            ep=ParallelGroup(rank, 4),
        )
        try:
            check_same_ops(groups, table(*([] if rank == 3 else [AITER])))
        except ConfigError as error:
            return str(error)
        return None

    *first, one, other = run_threads(4, check)
    assert first == [None, None]
    assert one == other
    assert one is not None
    assert "is aiter on rank 2 but torch on rank 3" in one


def test_texts_of_any_length_are_exchanged() -> None:
    said = [b"", b"\0\xff" * 70_000, b"short"]
    ranks = Ranks()
    got = run_threads(3, lambda rank: ranks.group("all", rank, 3).exchange_bytes(said[rank]))
    assert got == [said] * 3
    assert SINGLE.exchange_bytes(b"alone") == [b"alone"]


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    return write_target("llama", tmp_path_factory.mktemp("llama"), byte_level_tokenizer)


class Silent:
    """Collectives of which none may be called."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} precedes the comparison")


@pytest.mark.parametrize("op", ["add_rms_norm", "all_reduce", "paged_attention"])
def test_no_collective_of_a_device_precedes(
    folder: Path, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ops of layers, and those that are chosen when the KV cache is bound."""
    main = threading.current_thread()

    def override(asked: str) -> str | None:
        return "torch" if asked == op and threading.current_thread() is not main else None

    def silent_groups(*args: Any) -> ParallelGroups:
        made = groups_of(*args)
        return replace(made, tp=replace(made.tp, collectives=Silent()))

    monkeypatch.setattr(registry, "op_override", override)
    monkeypatch.setattr(rank_threads, "groups_of", silent_groups)
    others = [each for each in OPS[op] if each.name != "native"]
    monkeypatch.setitem(OPS, op, (Implementation("native", always, object), *others))
    with engines_of_threads(), pytest.raises(ConfigError) as error:
        create_engine(folder, tensor_parallel_size=2)
    assert f"{op} (dtype=float32" in str(error.value)
    assert f"is native on rank 0 but torch on rank 1 (not native: ATOM_OP_{op.upper()}=torch" in (
        str(error.value)
    )


def test_a_variable_of_one_rank_is_refused_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is left: no process, no socket, no file of shared memory."""

    def environment_of_rank(variables: Mapping[str, str]) -> dict[str, str]:
        return environment_with({**variables, "ATOM_OP_RMS_NORM": "torch"})

    monkeypatch.setattr(launch, "environment_with", environment_of_rank)
    before = what_is_open()
    message = ""
    try:
        LLM(str(folder), tensor_parallel_size=2, dtype="float32", num_threads=1)
    except ConfigError as error:
        message = str(error)
    assert re.search(r"ATOM_OP_RMS_NORM is absent on rank 0 \(\S+\) but torch on rank 1", message)
    gc.collect()  # the error's frames hold the store
    wait_until(lambda: not what_is_open() - before, 5)


def what_is_open() -> set[str]:
    """Processes, sockets and shared memory of this process."""
    me = psutil.Process()
    shared = Path("/dev/shm")
    names = [path.name for path in shared.iterdir()] if shared.exists() else []
    return {
        *(f"process {child.pid}" for child in me.children(recursive=True)),
        *(f"socket {each.laddr}" for each in me.net_connections("all") if each.laddr),
        *(f"memory {name}" for name in names if "atom" in name and str(me.pid) in name),
    }
