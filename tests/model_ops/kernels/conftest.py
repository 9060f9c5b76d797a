"""Kernels run interpreted on CPU tensors, or on the GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch
from aiter_cases import Aiter, aiters

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # set by conftest.py

if not _HAS_TRITON:
    collect_ignore_glob = [
        "test_aiter_capture.py",
        "test_aiter_mla*.py",
        "test_aot*.py",
        "test_gluon_*.py",
        "test_interpreter.py",
        "test_triton_*.py",
    ]
elif _INTERPRETED:
    import interpreter

    interpreter.install()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels under test run."""
    return torch.device("cpu" if _INTERPRETED else "cuda")


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def aiter(request: pytest.FixtureRequest) -> Iterator[Aiter]:
    """aiter's implementations alone."""
    yield from aiters(request.param)
