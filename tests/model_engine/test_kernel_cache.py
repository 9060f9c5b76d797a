"""Kernels that are compiled while an engine starts are found again after a restart."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache_dir

from atom.distributed.parallel_state import ALONE
from atom.model_engine import rank
from atom.model_engine.arg_utils import engine_config
from atom.platform import cpu_platform

NAMES = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ATOM_CACHE", str(tmp_path))
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    return tmp_path


def take(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = replace(cpu_platform(), kind=kind)
    monkeypatch.setattr(rank, "select_platform", lambda _: platform)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    rank.take_device(engine_config(model="m"), ALONE)


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_they_are_kept_beside_ours(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(kind, monkeypatch)
    assert [os.environ[name] for name in NAMES] == [
        str(folder / "triton"),
        str(folder / "inductor"),
    ]
    assert inductor_cache_dir() == str(folder / "inductor")


def test_triton_reads_it_when_it_compiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton.knobs")
    take("cuda", monkeypatch)
    assert knobs.cache.dir == str(folder / "triton")


def test_what_the_user_says_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "/mine")
    take("cuda", monkeypatch)
    assert {os.environ[name] for name in NAMES} == {"/mine"}


def test_a_cpu_compiles_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    take("cpu", monkeypatch)
    assert not set(NAMES) & set(os.environ)
