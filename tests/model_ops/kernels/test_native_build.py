"""The C++ kernels compile wherever there is a compiler: else their tests would only be skipped."""

from __future__ import annotations

import shutil

import pytest

from atom.environment import cxx_compiler
from atom.model_ops.kernels.native.build import native_build


def test_they_compile() -> None:
    if not any(map(shutil.which, filter(None, (cxx_compiler(), "g++", "clang++")))):
        pytest.skip("no C++ compiler")
    assert native_build().reason is None
