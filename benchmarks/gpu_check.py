"""Everything that only a GPU can show, in one report: the tests marked `gpu`, and a benchmark.

./scripts/gpu-check                      # finds or makes the environment, then runs this
python benchmarks/gpu_check.py --output benchmarks/results/my-machine.md

Writes a Markdown report and a JSON one beside it, within --minutes. The exit status is 1 when a
test or the benchmark failed, or did not end in time. Without a GPU it says so and does nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _report import environment, environment_markdown, markdown_table, write_json
from gpu_decode import to_markdown

ROOT = Path(__file__).resolve().parents[1]
# Of the time allowed; the rest is the benchmark's.
_TEST_SHARE = 0.6
_GIB = 2**30


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
    parser.add_argument("--minutes", type=float, default=8.0, help="(default: %(default)s)")
    parser.add_argument(
        "--shape", help="of the benchmark, as gpu_decode.py takes it; 8b where it fits, else 1b"
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
    }


def run(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """The exit status, None when it took too long, and the end of what was printed."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            timeout=max(seconds, 1),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as expired:
        printed = expired.stdout or b""
        text = printed if isinstance(printed, str) else printed.decode(errors="replace")
        return None, text[-4000:]
    return done.returncode, done.stdout[-4000:]


def run_tests(seconds: float, folder: Path) -> dict[str, Any]:
    """The tests marked `gpu`; files without one need not even be imported."""
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    xml = folder / "tests.xml"
    flags = ["-m", "gpu", "-q", "--tb=short", "--timeout=200", f"--junitxml={xml}"]
    started = time.perf_counter()
    status, printed = run([sys.executable, "-m", "pytest", *flags, *files], seconds)
    tests = [] if not xml.exists() else [_outcome(case) for case in ET.parse(xml).iter("testcase")]
    ran = any(test["outcome"] == "passed" for test in tests)
    return {
        "passed": status == 0 and ran,
        "status": status,
        "seconds": time.perf_counter() - started,
        "tests": tests,
        "output": printed,
    }


def _outcome(case: ET.Element) -> dict[str, Any]:
    outcome, message = "passed", ""
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            outcome, message = kind, found.get("message", "")
    name = f"{case.get('classname')}.{case.get('name')}"
    seconds = float(case.get("time", 0))
    return {"name": name, "outcome": outcome, "seconds": seconds, "message": message}


def run_benchmark(seconds: float, folder: Path, shape: str) -> dict[str, Any]:
    report = folder / "decode.json"
    program = str(ROOT / "benchmarks" / "gpu_decode.py")
    command = [sys.executable, program, "--shape", shape, "--output-json", str(report)]
    status, printed = run(command, seconds)
    results = json.loads(report.read_text()) if report.exists() else {}
    return {"passed": status == 0, "status": status, "output": printed, **results}


def markdown(report: dict[str, Any]) -> str:
    tests, benchmark = report["tests"], report["benchmark"]
    rows = [
        (t["name"], t["outcome"], f"{t['seconds']:.1f} s", t["message"].partition("\n")[0][:120])
        for t in tests["tests"]
    ]
    parts = [
        "# GPU check",
        environment_markdown(report["environment"] | report["gpu"]),
        f"## Tests marked `gpu`: {_verdict(tests)}, {tests['seconds']:.0f} s",
        markdown_table(["test", "outcome", "time", ""], rows),
        f"## Decode steps, shape {report['shape']}, bfloat16: {_verdict(benchmark)}",
    ]
    if benchmark.get("results"):
        parts.append(to_markdown(benchmark["results"]))
        parts.append(
            "Medians over whole engine steps, on dummy weights: the draft is hardly ever right, so "
            "`tokens/s` with speculation shows its cost, and the last column its limit."
        )
    for part in (tests, benchmark):
        if not part["passed"]:
            parts.append(f"```\n{part['output'].strip()}\n```")
    return "\n\n".join(parts) + "\n"


def _verdict(part: dict[str, Any]) -> str:
    if part["passed"]:
        return "passed"
    return "out of time" if part["status"] is None else f"failed (exit status {part['status']})"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA or ROCm device: there is nothing to check")
        return 0
    deadline = time.perf_counter() + 60 * args.minutes
    memory = torch.cuda.get_device_properties(0).total_memory
    # Two engines side by side, each with 16 GB of weights and a draft of its own.
    shape = args.shape or ("8b" if memory > 64 * _GIB else "1b")
    with tempfile.TemporaryDirectory() as folder:
        report: dict[str, Any] = {"environment": environment(), "gpu": gpu_facts(), "shape": shape}
        report["tests"] = run_tests(60 * args.minutes * _TEST_SHARE, Path(folder))
        # What is left, less the time to write it all down.
        left = deadline - time.perf_counter() - 5
        report["benchmark"] = run_benchmark(left, Path(folder), shape)
    text = markdown(report)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text, encoding="utf-8")
    write_json(args.output.with_suffix(".json"), report)
    print(text)
    print(f"wrote {args.output}", file=sys.stderr)
    return 0 if report["tests"]["passed"] and report["benchmark"]["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
