"""Everything that only a GPU can show, part by part, in one report.

./scripts/gpu-check                       # finds or makes the environment, then runs this
./scripts/gpu-check                       # once more: goes on with the parts that did not fit
python benchmarks/gpu_check.py --parts kernels steps

Parts run in order within --minutes; those that do not fit are left for the next run, which adds to
the same Markdown and JSON report if machine and code are the same. Each part ends with a line on
standard error. Compiled kernels are kept in build/gpu-check. Exit status: 0, 1 when a part failed
or did not end in time, 2 without a GPU, when nothing is checked. A missed goal for speed is no
failure: the report says where the time goes instead.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _gpu_needs import NEEDS, NO_TORCH, OLD_TORCH, describe, missing_of
from _gpu_parts import PARTS, Turn
from _gpu_report import (
    OtherReportError,
    code_digest,
    default_name,
    is_unfinished,
    load_parts,
    summary_line,
    write,
)
from _gpu_run import ROOT

from atom.bench.report import environment

NO_GPU = 2
_GIB = 2**30
_KEPT = ROOT / "build" / "gpu-check"
# A moment to write the report.
_SECONDS_TO_WRITE = 4


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="the Markdown report (default: benchmarks/results/gpu-check-DEVICE-CODE.md)",
    )
    parser.add_argument("--minutes", type=float, default=8.8, help="(default: %(default)s)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, help="run these, even again (default: what remains)"
    )
    parser.add_argument("--new", action="store_true", help="begin the report again")
    parser.add_argument(
        "--shapes", nargs="+", help="of decode_roofline.py, for the part steps: 8b, or 1b on a "
        "device with less than 40 GiB",
    )  # fmt: skip
    return parser.parse_args(argv)


def gpu_facts() -> dict[str, Any]:
    """The device and the build of torch that drives it."""
    import torch

    from atom.platform import current_platform

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "architecture": current_platform().arch,
        "memory": f"{properties.total_memory / _GIB:.0f} GiB",
        "devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        **{name: _version(name) for name in ("triton", "aiter", "amd-aiter")},
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def has_aiter(facts: dict[str, Any]) -> bool:
    return facts["hip"] is not None and facts["architecture"] in ("gfx942", "gfx950")


def keep_compiled_kernels() -> None:
    """In a folder that the next run finds, unless the environment names another."""
    names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    for variable, folder in names.items():
        os.environ.setdefault(variable, str(_KEPT / folder))


class Check:
    """One run: the parts that are asked for, into one report.

    Args:
        report: with the parts of earlier runs.
        memory: of the device, GiB.
    """

    def __init__(
        self, args: argparse.Namespace, path: Path, report: dict[str, Any], memory: float
    ) -> None:
        self._args = args
        self._path = path
        self._report = report
        self._memory = memory
        self._end = time.perf_counter() + 60 * args.minutes
        self.text = ""

    def run(self) -> list[str]:
        """Run what fits -> the parts that remain."""
        found: dict[str, Any] = self._report["parts"]
        unfinished = [n for n in PARTS if n not in found or is_unfinished(found[n])]
        wanted = self._args.parts or unfinished
        remaining = []
        for name in (name for name in PARTS if name in wanted):
            left = self._end - time.perf_counter() - _SECONDS_TO_WRITE
            why = self._why_not(name)
            if why is None and left < PARTS[name].least:
                remaining.append(name)
                continue
            found[name] = _left_out(why) if why else self._run_part(name, left)
            print(summary_line(name, found[name], wanted), file=sys.stderr, flush=True)
            self.text = write(self._path, self._report)
            if is_unfinished(found[name]):
                remaining.append(name)
        self.text = self.text or write(self._path, self._report)
        return remaining

    def _why_not(self, name: str) -> str | None:
        if missing := missing_of(name):
            return f"it needs {', '.join(missing)}"
        devices = self._report["gpu"].get("devices", 1)
        if devices < PARTS[name].devices:
            return f"it needs {PARTS[name].devices} GPUs, there is {devices}"
        if self._memory < PARTS[name].memory:
            return f"the device has {self._memory:.0f} GiB, it needs {PARTS[name].memory:.0f}"
        return None

    def _run_part(self, name: str, left: float) -> dict[str, Any]:
        seconds = min(left, PARTS[name].most)
        print(f"{name}: up to {seconds:.0f} s", file=sys.stderr, flush=True)
        folder = self._path.parent / f"{self._path.stem}.parts"
        folder.mkdir(parents=True, exist_ok=True)
        shapes = self._args.shapes or (["8b"] if self._memory >= 40 else ["1b"])
        aiter = has_aiter(self._report["gpu"])
        there = self._report["parts"].get(name)
        earlier = there if there is not None and is_unfinished(there) else None
        about = name, seconds, folder, tuple(shapes), aiter
        before = earlier["seconds"] if earlier is not None else 0.0
        started = time.perf_counter()

        def kept(found: dict[str, Any]) -> dict[str, Any]:
            spent = before + time.perf_counter() - started
            return {**{k: v for k, v in found.items() if k != "log"}, "seconds": spent}

        def keep(found: dict[str, Any]) -> None:
            self._report["parts"][name] = kept(found)
            write(self._path, self._report)

        return kept(PARTS[name].run(Turn(*about, earlier, keep)))


def _left_out(why: str) -> dict[str, Any]:
    return {"passed": True, "status": 0, "seconds": 0.0, "output": "", "why": why}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    lines, status = describe(args.parts or list(NEEDS))
    print(*lines, sep="\n" if lines else "", file=sys.stderr, flush=True)
    if status in (NO_TORCH, OLD_TORCH):
        print("there is no torch to check anything with" if status == NO_TORCH else lines[0])
        return NO_GPU
    import torch

    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA or ROCm device: there is nothing to check")
        return NO_GPU
    keep_compiled_kernels()
    facts = gpu_facts()
    code = code_digest()
    key = {**facts, "torch": torch.__version__, "code": code}
    path = args.output or ROOT / "benchmarks" / "results" / default_name(facts["device"], code)
    report: dict[str, Any] = {"key": key, "environment": environment(), "gpu": facts}
    try:
        report["parts"] = {} if args.new else load_parts(path, key)
    except OtherReportError as error:
        print(error, file=sys.stderr)
        return 1
    memory = torch.cuda.get_device_properties(0).total_memory / _GIB
    check = Check(args, path, report, memory)
    remaining = check.run()
    print(check.text)
    print(f"wrote {path} and .json", file=sys.stderr)
    if remaining:
        print(f"no time for {', '.join(remaining)}: run this again", file=sys.stderr)
    return 0 if all(part["passed"] for part in report["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
