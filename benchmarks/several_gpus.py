"""Several GPUs of one machine: sums over the ranks, and layers that are split over them.

python benchmarks/several_gpus.py                          # all GPUs, at most 8; needs two
python benchmarks/several_gpus.py --ranks 4 --rows 1 64
python benchmarks/several_gpus.py --device cpu --tiny      # a rehearsal with two ranks, over gloo

Every implementation of the sums that runs here takes its turn: NCCL's or RCCL's own, and kernels
that read the other ranks' memory in one go. Each is checked first. Then layers of Kimi-K2.5 with
experts, whole ones split over the ranks, decode with each of them. Times are the first rank's.
Exit status: 0, 1 when a sum is wrong or something fails, 2 without two GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from _device import NO_GPU, Clock, add_device_option, chosen_platform
from _kernel_loads import implementations
from _rank_loads import SUMS, Layers, RankSetup, Sum
from _rank_report import line_of, to_markdown
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from atom.bench.report import environment, environment_markdown, write_json
from atom.distributed.connection import ProcessGroups
from atom.distributed.parallel_state import ParallelGroup
from atom.model_ops.registry import OpUnavailableError
from atom.platform import num_gpus, select_platform

_HOST = "127.0.0.1"
_MOST_RANKS = 8
_MEETING = timedelta(seconds=120)


@dataclasses.dataclass
class Report:
    """Rows that were measured, rows that were not and why, and what is wrong."""

    ranks: int
    results: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    left_out: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_device_option(parser)
    parser.add_argument("--tiny", action="store_true", help="small layers, few rows")
    parser.add_argument("--ranks", type=int, help="2, 4 or 8 (default: as many as there are GPUs)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", help="(default: 1 16 64 256)")
    parser.add_argument("--context", type=int, help="of sequences that decode (default: 1024)")
    parser.add_argument("--seconds", type=float, help="what does not fit is listed as not run")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args(argv)
    args.rows = args.rows or ([1, 3] if args.tiny else [1, 16, 64, 256])
    args.context = args.context or (40 if args.tiny else 1024)
    return args


def most_ranks(gpus: int) -> int:
    """The largest of 1, 2, 4 and 8 that is not above the number of GPUs."""
    return min(_MOST_RANKS, 1 << (max(gpus, 1).bit_length() - 1))


class Session:
    """What one rank measures; all of them do the same at the same time.

    Args:
        control: the ranks, for integers on the host.
    """

    def __init__(self, args: argparse.Namespace, setup: RankSetup, control: ParallelGroup) -> None:
        self._args, self._setup, self._control = args, setup, control
        self._clock = Clock(args.seconds)
        self._facts = environment()
        self.report = Report(setup.group.size)

    def run(self) -> None:
        for op in SUMS:
            for name in implementations(op, self._setup.platform):
                self._sum(op, name)
        for name in implementations(SUMS[0], self._setup.platform):
            self._layers(name)

    def so_far(self) -> dict[str, Any]:
        options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(self._args).items()}
        return {"environment": self._facts, "options": options, **dataclasses.asdict(self.report)}

    def _sum(self, op: str, name: str) -> None:
        about = {"op": op, "implementation": name, "size": self._setup.hidden_size}
        try:
            sums = Sum(self._setup, op, name)
        except OpUnavailableError as error:
            self._leave_out(about, error, name)
            return
        for rows in self._args.rows:
            row = {**about, "rows": rows}
            if not self._allows(row):
                continue
            rights = self._control.exchange([int(sums.is_right(rows))])
            for rank in (rank for rank, (right,) in enumerate(rights) if not right):
                self.report.faults.append(f"{op} by {name}, {rows} rows: rank {rank} is wrong")
            self._add({**row, "seconds": sums.seconds(rows)})

    def _layers(self, name: str) -> None:
        about = {"op": "layer", "implementation": name, "size": self._setup.hidden_size}
        if not self._allows(about):
            return
        try:
            layers = Layers(self._setup, name, max(self._args.rows))
        except OpUnavailableError as error:
            self._leave_out(about, error, name)
            return
        for rows in self._args.rows:
            row = {**about, "rows": rows}
            if self._allows(row):
                self._add({**row, "seconds": layers.seconds(rows)})

    def _allows(self, about: dict[str, Any]) -> bool:
        """Whether the first rank has time left: all go on, or none."""
        ((first,), *_) = self._control.exchange([int(self._clock.allows())])
        if not first:
            self.report.left_out.append({**about, "why": "out of time"})
        return bool(first)

    def _leave_out(self, about: dict[str, Any], error: OpUnavailableError, name: str) -> None:
        reason = str(error).rpartition(f": {name}: ")[2]
        self.report.left_out.append({**about, "why": f"cannot run here: {reason}"})

    def _add(self, row: dict[str, Any]) -> None:
        self.report.results.append(row)
        if self._setup.group.rank == 0:
            print(line_of(row), file=sys.stderr, flush=True)
            write_json(self._args.output_json, self.so_far())  # for whoever has to stop this


@torch.inference_mode()
def run_rank(rank: int, args: argparse.Namespace, ranks: int, port: int) -> None:
    """What each process does."""
    platform = select_platform(args.device)
    if platform.is_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = TCPStore(_HOST, port, is_master=False, timeout=_MEETING)
    groups = ProcessGroups(store, _HOST)
    group = groups.of_device_tensors("tensors", rank, ranks, platform.device)
    control = groups.of_host_tensors("control", rank, ranks)
    group = dataclasses.replace(group, peer_access=platform.is_gpu)
    shape = "tiny-kimi-whole" if args.tiny else "kimi-whole"
    dtype = getattr(torch, args.dtype)
    session = Session(args, RankSetup(platform, group, dtype, shape, args.context), control)
    session.run()
    if rank == 0:
        facts, found = session.so_far()["environment"], session.so_far()
        write_json(args.output_json, found)
        print(environment_markdown(facts), to_markdown(found), sep="\n\n", flush=True)
    control.exchange([0])
    # Graphs that have captured collectives would keep NCCL from ending.
    sys.stdout.flush()
    os._exit(1 if session.report.faults else 0)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    platform = chosen_platform(args.device, "several_gpus.py")
    if platform is None:
        return NO_GPU
    there = num_gpus() if platform.is_gpu else 2
    ranks = args.ranks or most_ranks(there)
    if ranks < 2 or (platform.is_gpu and ranks > there):
        wanted = f"{args.ranks} ranks" if args.ranks else "ranks"
        print(f"{wanted} need a GPU each, two or more; there is {there}", file=sys.stderr)
        return NO_GPU
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=_MEETING)
    try:
        start_processes(  # type: ignore[no-untyped-call]
            run_rank, (args, ranks, store.port), ranks, start_method="spawn"
        )
    except (ProcessExitedException, ProcessRaisedException) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
