"""Whether the tests notice wrong code: changes the core in one place at a time and runs them.

    python benchmarks/mutations.py --out mutations --mutants 240 --minutes 120
    python benchmarks/mutations.py --out mutations --again        # survivors, with the tests of now
    python benchmarks/mutations.py --out mutations --report-only

Works in a copy of the tree, never in the checkout. The mutants are chosen by --seed, of all areas
of the core in turn (`_mutant_areas.py`), so a run that was cut short is balanced, and the next one
with the same --out goes on where it ended. A mutant is tried against the tests nearest to its file
only: those that mirror it, then those of its area, up to --test-seconds of what they take without
mutants. So a survivor says that these tests do not notice it, not that none does.

Writes baseline.json, results.jsonl, and the report as report.md and report.json.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from _mutant_areas import AREAS, Area
from _mutants import Mutant, compiles, mutants_of

ROOT = Path(__file__).resolve().parent.parent
# Beyond which a mutant that allocates without end is killed, before the machine is short of memory.
_MOST_BYTES = 8 << 30
# A time that says "hangs" on a busy machine, too.
_PATIENCE, _SECONDS_MORE = 4, 60.0
KILLED, TIMED_OUT, SURVIVED, UNTESTED = "killed", "timed out", "survived", "no tests"


@dataclass(frozen=True)
class TestRun:
    """How a run of tests ended.

    Attributes:
        failed: ids of failed tests, or what ended the run.
    """

    seconds: float
    failed: list[str]
    timed_out: bool = False


class Runner:
    """Runs pytest in a copy of the tree, in forks of this process that share its imports."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        os.environ["PYTHONPATH"] = str(tree)
        import torch  # noqa: F401

        for plugin in entry_points(group="pytest11"):
            plugin.load()

    def run(self, tests: Sequence[str], limit: float, deselected: Iterable[str] = ()) -> TestRun:
        """Run the tests; for `limit` seconds at most."""
        with tempfile.TemporaryFile() as output:
            start = time.monotonic()
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                self._child(output.fileno(), tests, deselected)
            status = _wait(child, limit)
            seconds = time.monotonic() - start
            output.seek(0)
            text = output.read().decode(errors="replace")
        if status is None:
            return TestRun(seconds, ["ran out of time"], timed_out=True)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        if status != 0 and not failed:
            failed = [f"exit status {status}: {text.strip()[-200:]}"]
        return TestRun(seconds, failed)

    def _child(self, output: int, tests: Sequence[str], deselected: Iterable[str]) -> None:
        code = 99
        try:
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
            # A mutated file must not leave its bytecode behind.
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            import pytest

            flags = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore"]
            flags.append("--hypothesis-seed=0")
            skipped = [f"--deselect={test}" for test in deselected]
            code = int(pytest.main([*flags, *skipped, *tests]))
            sys.stdout.flush()
        finally:
            os._exit(code)


def _wait(child: int, limit: float) -> int | None:
    """The exit status of a process; None if it had to be ended, with all that it started."""
    end = time.monotonic() + limit
    status: int | None = None
    while status is None and time.monotonic() < end:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        else:
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


class Baseline:
    """What each test file takes without mutants, and its tests that fail in the copy anyway."""

    def __init__(self, path: Path, runner: Runner, limit: float) -> None:
        self._path = path
        self._runner = runner
        self._limit = limit
        self._known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, test: str) -> Any:
        """`seconds`, or null for a file that takes longer than the limit, and `failing`."""
        if test not in self._known:
            failing: list[str] = []
            while True:
                ran = self._runner.run([test], self._limit, failing)
                if not ran.failed or ran.timed_out or not ran.failed[0].startswith(test):
                    break
                failing += ran.failed
            left_out = ran.timed_out or bool(ran.failed)
            seconds = None if left_out else ran.seconds
            self._known[test] = {"seconds": seconds, "failing": failing}
            self._path.write_text(json.dumps(self._known, indent=1))
            print(f"baseline {test}: {'left out' if left_out else f'{ran.seconds:.1f} s'}")
        return self._known[test]

    def choose(self, tests: Sequence[str], most_seconds: float) -> tuple[list[str], float]:
        """The first tests that take `most_seconds` together, and what they take."""
        chosen, seconds = [], 0.0
        for test in tests:
            if seconds >= most_seconds:
                break
            alone = self.of(test)["seconds"]
            if alone is not None and seconds + alone <= most_seconds:
                chosen.append(test)
                seconds += alone
        return chosen, seconds

    def failing(self, tests: Sequence[str]) -> list[str]:
        return [name for test in tests for name in self.of(test)["failing"]]


def copy_tree(root: Path, to: Path) -> None:
    """Copy what git has or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=root,
        check=True,
        capture_output=True,
    )
    for name in sorted(set(listed.stdout.decode().split("\0")) - {""}):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name, follow_symlinks=False)


def choose(tree: Path, areas: Sequence[Area], count: int, seed: int) -> list[tuple[Area, Mutant]]:
    """Mutants of all areas in turn; within one every place is as likely, and no line comes twice
    while there are others.
    """
    orders = []
    for area in areas:
        found = [m for f in area.files(tree) for m in mutants_of(f, (tree / f).read_bytes())]
        random.Random(f"{seed} {area.name}").shuffle(found)
        times: Counter[tuple[str, int]] = Counter()
        ranks = []
        for mutant in found:
            ranks.append(times[mutant.path, mutant.line])
            times[mutant.path, mutant.line] += 1
        ordered = [m for _, m in sorted(zip(ranks, found, strict=True), key=lambda pair: pair[0])]
        orders.append([(area, mutant) for mutant in ordered])
    turns = (pair for pairs in zip_longest(*orders) for pair in pairs if pair is not None)
    valid = ((a, m) for a, m in turns if compiles(m.apply((tree / m.path).read_bytes())))
    return list(islice(valid, count))


def try_mutant(
    tree: Path, area: Area, mutant: Mutant, runner: Runner, baseline: Baseline, seconds: float
) -> dict[str, Any]:
    """Run the nearest tests with the mutant in the copy of the tree."""
    tests, usual = baseline.choose(area.tests_of(tree, mutant.path), seconds)
    result = {"area": area.name, **asdict(mutant), "outcome": UNTESTED, "by": "", "seconds": 0.0}
    if not tests:
        return result
    path = tree / mutant.path
    source, stat = path.read_bytes(), path.stat()
    try:
        path.write_bytes(mutant.apply(source))
        # Its bytecode is known by its time and size.
        os.utime(path, (0, 0))
        ran = runner.run(tests, _PATIENCE * usual + _SECONDS_MORE, baseline.failing(tests))
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    outcome = TIMED_OUT if ran.timed_out else KILLED if ran.failed else SURVIVED
    by = ran.failed[0] if ran.failed else ""
    return {**result, "outcome": outcome, "by": by, "seconds": round(ran.seconds, 1)}


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The last result of each mutant."""
    if not path.exists():
        return {}
    return {r["id"]: r for r in map(json.loads, path.read_text().splitlines())}


def report(results: Sequence[dict[str, Any]], seed: int) -> str:
    """The counts of each area and all survivors, as Markdown."""
    columns = (KILLED, TIMED_OUT, SURVIVED, UNTESTED)
    lines = [
        f"{len(results)} mutants, seed {seed}.",
        "",
        "| area | mutants | " + " | ".join(columns) + " | noticed |",
        "|---|" + "---:|" * (len(columns) + 2),
    ]
    names = list(dict.fromkeys(r["area"] for r in results))
    for name in [*names, "all"]:
        of_area = [r for r in results if name in (r["area"], "all")]
        counts = Counter(r["outcome"] for r in of_area)
        tested = len(of_area) - counts[UNTESTED]
        noticed = (counts[KILLED] + counts[TIMED_OUT]) / tested if tested else 0
        row = [name, len(of_area), *(counts[c] for c in columns), f"{noticed:.0%}"]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += ["", "Survivors:", ""]
    for r in results:
        if r["outcome"] in (SURVIVED, UNTESTED):
            before, after = (" ".join(r[key].split())[:160] for key in ("before", "after"))
            lines.append(
                f"- `{r['id']}` {r['path']}:{r['line']} ({r['operator']}): `{before}` → `{after}`"
            )
    return "\n".join(lines) + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--mutants", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="start no mutant after these")
    parser.add_argument("--test-seconds", type=float, default=45.0, help="of tests for each mutant")
    parser.add_argument(
        "--area", action="append", choices=[a.name for a in AREAS], help="only these"
    )
    parser.add_argument("--again", action="store_true", help="try survivors once more")
    parser.add_argument("--report-only", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    areas = [area for area in AREAS if args.area is None or area.name in args.area]
    if not args.report_only:
        with tempfile.TemporaryDirectory(prefix="atom-mutants-") as folder:
            run(Path(folder), out, areas, args)
    results = list(read_results(out / "results.jsonl").values())
    text = report(results, args.seed)
    (out / "report.md").write_text(text)
    (out / "report.json").write_text(json.dumps(results, indent=1))
    print(text)


def run(tree: Path, out: Path, areas: Sequence[Area], args: argparse.Namespace) -> None:
    """Try the mutants that have no result yet, or with --again those that survived."""
    end = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    copy_tree(ROOT, tree)
    compileall.compile_dir(tree / "atom", quiet=1)
    runner = Runner(tree)
    baseline = Baseline(out / "baseline.json", runner, args.test_seconds)
    results = read_results(out / "results.jsonl")
    chosen = choose(tree, areas, args.mutants, args.seed)
    for number, (area, mutant) in enumerate(chosen, start=1):
        if end is not None and time.monotonic() > end:
            print(f"out of time before mutant {number} of {len(chosen)}")
            return
        known = results.get(mutant.id)
        if known is not None and not (args.again and known["outcome"] in (SURVIVED, UNTESTED)):
            continue
        result = try_mutant(tree, area, mutant, runner, baseline, args.test_seconds)
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        where = f"{mutant.path}:{mutant.line} {mutant.operator}"
        print(f"{number}/{len(chosen)} {result['outcome']}: {where} ({result['seconds']} s)")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
