"""How long a GPU's start takes the host: Python's time for each launch, and all graphs' together.

python benchmarks/launch_overhead.py
python benchmarks/launch_overhead.py --arch gfx942 --layers 27

Needs Triton and no GPU: an engine with as many layers as Kimi-K2.5, each of its kind but tiny, and
an Eagle3 draft captures all graphs that the default options want, with launches that do all but
run. What a driver takes for a launch, and for a node of a graph, is not in it. Arms: no
speculation, three drafts, three drafts in adaptive numbers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _decode_shapes import SHAPES
from _pretend_gpu import ARCHS, CaptureCounter, pretend_gpu, start_engine, write_models
from torch.utils._python_dispatch import TorchDispatchMode

from atom.bench.report import environment, environment_markdown, markdown_table, write_json

_DRAFTS = {"method": "eagle3", "num_speculative_tokens": 3}
ARMS: dict[str, dict[str, Any]] = {
    "no drafts": {},
    "3 drafts": _DRAFTS,
    "3 drafts, adaptive": {**_DRAFTS, "speculative_adaptive": True},
}


class TorchLaunches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations that would launch a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # What is empty here is filled with zeros, to stand for what a kernel will write.
        is_free = func.is_view or any(word in name for word in ("empty", "zero_", "detach"))
        self.count += not is_free
        return func(*args, **(kwargs or {}))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = " (default: %(default)s)"
    parser.add_argument("--arch", choices=ARCHS, default="sm90", help=default.strip())
    parser.add_argument("--layers", type=int, default=61, help=default.strip())
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--max-num-seqs", type=int, default=256, help=default.strip())
    parser.add_argument("--max-model-len", type=int, default=16384, help=default.strip())
    parser.add_argument("--output-json", type=Path)
    return parser.parse_args(argv)


def measure(args: argparse.Namespace, arm: str) -> dict[str, Any]:
    """One start, twice: launches are counted, then timed."""
    counter, torchs = CaptureCounter(), TorchLaunches()
    launches = pretend_gpu(args.arch, counter)

    def begin() -> None:
        counter.count = launches.count = torchs.count = 0

    with torchs:
        capture(args, arm, begin)
    found = {"captures": counter.count, "triton": launches.count, "torch": torchs.count}
    seconds = capture(args, arm, begin)
    per_launch = seconds / (found["triton"] + found["torch"])
    return {"arm": arm, **found, "seconds": seconds, "per_launch": per_launch}


def capture(args: argparse.Namespace, arm: str, begin: Callable[[], None]) -> float:
    """The seconds that an engine's graphs take.

    Args:
        begin: is called before the first.
    """
    from atom.model_engine.step_graphs import StepGraphs

    shape, options = SHAPES["tiny-kimi"], ARMS[arm]
    models = {"target": {**shape.target, "num_hidden_layers": args.layers}}
    if options:
        models["draft"] = dict(shape.draft)
    for fields in models.values():
        fields["max_position_embeddings"] = args.max_model_len
    spent: list[float] = []
    inner = StepGraphs.capture

    def timed(graphs: StepGraphs) -> None:
        begin()
        started = time.perf_counter()
        inner(graphs)
        spent.append(time.perf_counter() - started)

    StepGraphs.capture = timed  # type: ignore[method-assign,assignment]
    try:
        with tempfile.TemporaryDirectory() as folder:
            start_engine(
                write_models(Path(folder), models),
                dtype="bfloat16",
                block_size=64,
                max_num_seqs=args.max_num_seqs,
                max_num_batched_tokens=8192,
                max_model_len=args.max_model_len,
                kv_cache_memory=1 << 28,
                **options,
            )
    finally:
        StepGraphs.capture = inner  # type: ignore[method-assign]
    return spent[0]


def to_markdown(rows: Sequence[dict[str, Any]]) -> str:
    header = ["arm", "graphs", "launches", "of Triton", "us a launch", "all graphs, s"]
    cells = [
        (
            row["arm"],
            row["captures"],
            row["triton"] + row["torch"],
            row["triton"],
            f"{1e6 * row['per_launch']:.1f}",
            f"{row['seconds']:.1f}",
        )
        for row in rows
    ]
    return markdown_table(header, cells)


def in_processes(args: argparse.Namespace) -> int:
    """Each arm in a process of its own, since it changes modules."""
    given = ["--arch", args.arch, "--layers", str(args.layers)]
    given += ["--max-num-seqs", str(args.max_num_seqs)]
    given += ["--max-model-len", str(args.max_model_len)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for arm in args.arms:
            path = Path(folder) / "report.json"
            command = [sys.executable, __file__, *given, "--arms", arm, "--output-json", str(path)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            rows += json.loads(path.read_text(encoding="utf-8"))["results"]
    return report(args, rows)


def report(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> int:
    facts = environment()
    write_json(args.output_json, {"environment": facts, "results": list(rows)})
    print(environment_markdown(facts), to_markdown(rows), sep="\n\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_num_threads(1)
    if len(args.arms) > 1:
        return in_processes(args)
    return report(args, [measure(args, args.arms[0])])


if __name__ == "__main__":
    sys.exit(main())
