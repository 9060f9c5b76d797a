"""What work without data allocates and launches."""

from __future__ import annotations

import torch

from atom.plan.rehearsal.meter import Meter

MIB = 1 << 20


def test_memory_is_that_of_tensors_that_live() -> None:
    meter, kept = Meter(), []

    def work() -> None:
        a = torch.empty(MIB, device="meta", dtype=torch.uint8)
        b = a + a  # beside it
        del a
        c = b.view(2, -1)  # the same memory
        kept.append(c.to(torch.int32))

    with meter:
        peak = meter.peak_of(work)
        assert meter.live == 4 * MIB
        # Of b and its copy of four bytes each, the copy stays.
        assert peak == MIB
        kept.clear()
        assert meter.live == 0


def test_launches_are_those_of_operations_with_a_kernel() -> None:
    meter = Meter()
    with meter:
        a = torch.empty(4, 4, device="meta")
        a.t()[1:].unsqueeze(0)
        assert not meter.launches.total
        a.contiguous()
        assert not meter.launches.total
        a.t().contiguous()
        torch.mm(a, a).relu_()
        assert meter.launches.by_library == {"torch": 3}
        torch.zeros(4) + 1  # the host's
        assert meter.launches.total == 3


def test_what_the_host_reads_is_zero() -> None:
    meter = Meter()
    with meter:
        a = torch.empty(3, dtype=torch.int32, device="meta")
        assert a.cpu().tolist() == [0, 0, 0]
        host = torch.ones(3, dtype=torch.int32)
        assert host.copy_(a) is host
