"""What a rehearsal pretends of other libraries."""

from __future__ import annotations

import importlib
import pkgutil

from atom.model_ops.kernels import aiter, probe
from atom.model_ops.kernels.probe import EntryPoint
from atom.model_ops.op_table.op_report import OpLine
from atom.plan.gpus import find_gpu
from atom.plan.rehearsal.libraries import pretended_library
from atom.plan.rehearsal.meter import Meter
from atom.plan.rehearsal.rehearse import lost


def entry_points() -> list[EntryPoint]:
    """All that the adapters of aiter use."""
    names = [f"{aiter.__name__}.{info.name}" for info in pkgutil.iter_modules(aiter.__path__)]
    modules = [vars(importlib.import_module(name)) for name in names]
    found = {id(v): v for own in modules for v in own.values() if isinstance(v, EntryPoint)}
    return list(found.values())


def test_every_function_of_aiter_that_is_used_is_pretended() -> None:
    found = entry_points()
    assert len(found) > 30
    with probe.replaced(pretended_library(find_gpu("mi355x"), frozenset({"aiter"}), Meter())):
        assert [probe.refusal(entry) for entry in found if probe.refusal(entry)] == []
    with probe.replaced(pretended_library(find_gpu("mi355x"), frozenset(), Meter())):
        assert "aiter is not among what is installed" in str(probe.refusal(found[0]))


def line(runs: str, size: int = 8, why: str = "") -> OpLine:
    return OpLine(f"rms_norm (size={size})", runs, why)


def table(*lines: OpLine) -> dict[str, OpLine]:
    return {each.asked: each for each in lines}


def test_what_a_library_changes_is_said_once() -> None:
    whole = table(line("aiter"), line("aiter", 16))
    without = table(line("triton", why="not aiter: gone"), line("triton", 16, "not aiter: gone"))
    assert lost(whole, without) == ["rms_norm runs by triton, not aiter (not aiter: gone)"]
    assert not lost(whole, table(line("aiter", why="not gluon: x")))
