"""Everything that only a GPU can show, in one report: tests on the device, and two benchmarks.

./scripts/gpu-check                      # finds or makes the environment, then runs this
python benchmarks/gpu_check.py --output benchmarks/results/my-machine.md

Writes a Markdown report and a JSON one beside it, within --minutes. Each part has its share of
the time; what does not fit is listed as not run. Exit status: 0, 1 when a part failed or did not
end in time, 2 without a GPU, when nothing is checked. Missing a goal for speed is no failure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import decode_roofline
import kernels
from _device import NO_GPU
from _gpu_tests import ROOT, kernel_files, marked_files, run, run_tests
from _kernel_loads import HeadSizes, LatentSizes

from atom.bench.report import environment, environment_markdown, markdown_table, write_json

# Seconds of each part; what one leaves over is the next one's.
_SECONDS = {"graphs": 100.0, "kernel tests": 130.0, "kernels": 80.0, "decode steps": 210.0}
_FILES_AT_ONCE = 6
_GIB = 2**30

Part = dict[str, Any]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks" / "results" / f"gpu-check-{today}.md",
        help="the Markdown report (default: benchmarks/results/gpu-check-DATE.md)",
    )
    parser.add_argument("--minutes", type=float, default=8.8, help="(default: %(default)s)")
    parser.add_argument(
        "--parts", nargs="+", choices=_SECONDS, default=list(_SECONDS), help="(default: all)"
    )
    parser.add_argument(
        "--shapes", nargs="+", help="of decode_roofline.py; 8b and kimi where they fit, else 1b"
    )
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


def run_benchmark(program: str, seconds: float, folder: Path, *flags: str) -> Part:
    """What a program reports; as far as it came, when it had to be stopped."""
    path = folder / f"{program}.json"
    # It stops beginning new work in time to write its report.
    own = max(seconds - 15, 5)
    command = [sys.executable, str(ROOT / "benchmarks" / f"{program}.py"), *flags]
    command += ["--seconds", f"{own:.0f}", "--output-json", str(path)]
    started = time.perf_counter()
    status, printed = run(command, seconds)
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    took = time.perf_counter() - started
    return {
        "passed": status == 0,
        "status": status,
        "seconds": took,
        "output": printed,
        "report": report,
    }


def run_parts(names: Sequence[str], minutes: float, shapes: Sequence[str]) -> dict[str, Part]:
    """The parts in turn, none beyond the time that those after it need."""
    end = time.perf_counter() + 60 * minutes
    # Shares of the time that is allowed.
    scale = 60 * minutes / sum(_SECONDS[name] for name in names)
    found: dict[str, Part] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs: dict[str, Callable[[float], Part]] = {
            "graphs": lambda s: run_tests(marked_files(), s, folder, marked=True, processes=2),
            "kernel tests": lambda s: run_tests(
                kernel_files(), s, folder, marked=False, processes=_FILES_AT_ONCE
            ),
            "kernels": lambda s: run_benchmark("kernels", s, folder),
            "decode steps": lambda s: run_benchmark(
                "decode_roofline", s, folder, "--shapes", *shapes
            ),
        }
        for i, part in enumerate(names):
            reserved = sum(_SECONDS[later] for later in names[i + 1 :]) * scale
            # And a moment to write it all down.
            left = end - time.perf_counter() - reserved - 3
            print(f"{part}: up to {left:.0f} s", file=sys.stderr, flush=True)
            found[part] = programs[part](left)
    return found


def goals(parts: dict[str, Part]) -> list[dict[str, Any]]:
    """What speed is wanted, and what was reached; None when it was not measured."""
    wanted = []
    ops = (("paged_attention", str(HeadSizes()), 0.75), ("mla_decode", str(LatentSizes()), 0.70))
    for op, sizes, share in ops:
        rows = _rows(parts, "kernels", op=op, batch=64, context=8192, cache="bfloat16")
        rows = [r for r in rows if r["implementation"] != "torch" and r["sizes"] == sizes]
        best = max((row["of_copy"] for row in rows), default=None)
        name = f"{op}, bfloat16, batch 64, context 8192"
        wanted.append({"goal": name, "at least": share, "reached": best})
    steps = _rows(parts, "decode steps", shape="8b", by="atom", batch=1, k=0, mode="graph")
    step = steps[0] if steps else {"of_copy": None, "host_seconds": None}
    name = "decode step of the 8B shape, batch 1"
    wanted.append({"goal": name, "at least": 0.80, "reached": step["of_copy"]})
    host = {"goal": f"host time, {name}", "at most": 250e-6, "reached": step["host_seconds"]}
    return [*wanted, host]


def _rows(parts: dict[str, Part], part: str, **fields: Any) -> list[dict[str, Any]]:
    report = parts.get(part, {}).get("report")
    rows = report["results"] if report else []
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def markdown(report: dict[str, Any]) -> str:
    parts: dict[str, Part] = report["parts"]
    text = [
        "# GPU check",
        environment_markdown(report["environment"] | report["gpu"]),
        markdown_table(
            ["part", "outcome", "time"],
            [(name, _verdict(part), f"{part['seconds']:.0f} s") for name, part in parts.items()],
        ),
    ]
    if report["not run"]:
        text.append(f"Not run, by --parts: {', '.join(report['not run'])}.")
    text += ["## Goals", markdown_table(["goal", "wanted", "reached"], _goal_rows(report["goals"]))]
    titles = {
        "graphs": "Graphs of target and draft, speculation on equals off",
        "kernel tests": "Kernels against float64",
        "kernels": "Kernels against a copy",
        "decode steps": "Decode steps against a copy",
    }
    shown = {"kernels": kernels.to_markdown, "decode steps": decode_roofline.to_markdown}
    for name, part in parts.items():
        text.append(f"## {titles[name]}: {_verdict(part)}")
        if "tests" in part:
            text += _tests_markdown(part, every=name == "graphs")
        elif part["report"] is not None:
            text.append(shown[name](part["report"]))
        if not part["passed"]:
            text.append(f"```\n{part['output'].strip()}\n```")
    return "\n\n".join(text) + "\n"


def _tests_markdown(part: Part, every: bool) -> list[str]:
    counts = Counter(test["outcome"] for test in part["tests"])
    text = [", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) + "."]
    if part["left_out"]:
        text.append(f"Not run to the end, out of time: {', '.join(part['left_out'])}.")
    chosen = [t for t in part["tests"] if every or t["outcome"] != "passed"]
    rows = [
        (t["name"], t["outcome"], f"{t['seconds']:.1f} s", t["message"].partition("\n")[0][:120])
        for t in chosen
    ]
    return [*text, markdown_table(["test", "outcome", "time", ""], rows)] if rows else text


def _goal_rows(found: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    rows = []
    for goal in found:
        is_share = "at least" in goal
        limit = goal["at least"] if is_share else goal["at most"]

        def shown(value: float, is_share: bool = is_share) -> str:
            return f"{100 * value:.0f} % of copy" if is_share else f"{1e6 * value:.0f} us"

        reached = goal["reached"]
        outcome = "not measured"
        if reached is not None:
            is_met = reached >= limit if is_share else reached <= limit
            outcome = f"{shown(reached)}{'' if is_met else ', MISSED'}"
        wanted = f"{'at least' if is_share else 'at most'} {shown(limit)}"
        rows.append((goal["goal"], wanted, outcome))
    return rows


def _verdict(part: Part) -> str:
    if part["passed"]:
        return "passed"
    return "out of time" if part["status"] is None else f"failed (exit status {part['status']})"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA or ROCm device: there is nothing to check")
        return NO_GPU
    memory = torch.cuda.get_device_properties(0).total_memory
    shapes = args.shapes or (["8b", "kimi"] if memory > 64 * _GIB else ["1b"])
    report: dict[str, Any] = {"environment": environment(), "gpu": gpu_facts()}
    report["not run"] = [name for name in _SECONDS if name not in args.parts]
    report["parts"] = run_parts(args.parts, args.minutes, shapes)
    report["goals"] = goals(report["parts"])
    text = markdown(report)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text, encoding="utf-8")
    write_json(args.output.with_suffix(".json"), report)
    print(text)
    print(f"wrote {args.output}", file=sys.stderr)
    return 0 if all(part["passed"] for part in report["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
