"""Memory of packed weights begins at huge pages, and Linux is asked for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.native.huge_pages import empty_stream
from atom.model_ops.kernels.native.quant import pack
from atom.model_ops.quant.weights import QuantWeights, WeightFormat

REASON = native_build().reason
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")
PAGE = 2 << 20


def flags_at(address: int) -> list[str]:
    """What Linux knows of the mapping there."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_a_large_tensor_begins_at_a_page_and_a_small_one_anywhere() -> None:
    large = empty_stream((3, 5, 1 << 17), torch.float16)
    assert large.data_ptr() % PAGE == 0
    for tensor in (large, empty_stream((3, 5), torch.float16)):
        assert tensor.dtype is torch.float16
        assert tensor.is_contiguous()
        assert torch.equal(tensor.fill_(2), torch.full(tensor.shape, 2.0, dtype=torch.float16))
    assert large.shape == (3, 5, 1 << 17)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages"
)
def test_huge_pages_are_asked_for_where_they_are_filled() -> None:
    of = WeightFormat("int8", 1, 32)
    weights = QuantWeights(of, torch.zeros(2064, 2048, dtype=torch.int8))
    weights.scale = torch.ones(2064, 64, dtype=torch.float16)
    packed = pack.prepare(weights, torch.bfloat16)
    assert packed.codes.nbytes > 2 * PAGE
    assert "hg" in flags_at(packed.codes.data_ptr())
    assert "hg" in flags_at(packed.codes.data_ptr() + 2 * PAGE - 1)
    assert "hg" not in flags_at(packed.codes.data_ptr() + packed.codes.nbytes - 1)
