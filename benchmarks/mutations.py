"""Whether the tests notice wrong code: changes the core in one place at a time and runs them.

    python benchmarks/mutations.py --out mutations --mutants 240 --minutes 120
    python benchmarks/mutations.py --out mutations --again        # survivors, with the tests of now
    python benchmarks/mutations.py --out mutations --report-only

Works in a copy of the tree, never in the checkout. First it records which lines of the core each
test of the areas (`_mutant_areas.py`) runs, and how long it takes; the map is kept in --out, and
only what has changed since is recorded again. The mutants are chosen by --seed, of all areas of the
core in turn, so a run that was cut short is balanced, and the next one with the same --out goes on
where it ended. Against each mutant run the tests that run its line, the fastest first, up to
--test-seconds of them, until one fails. At the end the tests that failed run once more, without a
mutant: they have to pass. Survivors that change nothing that could be seen have their reasons in
`_mutant_reasons.py`; they are told apart.

Writes map.json, results.jsonl, and the report as report.md and report.json.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from _mutant_areas import AREAS, Area
from _mutant_map import Chosen, LineMap, choose_tests, in_parts
from _mutant_reasons import reason_of
from _mutant_runs import Runner
from _mutants import Mutant, compiles, mutants_of

ROOT = Path(__file__).resolve().parent.parent
# A time that says "hangs" on a busy machine, too.
_PATIENCE, _SECONDS_MORE, _MOST_SECONDS_MORE = 3, 10.0, 120.0
KILLED, TIMED_OUT, SURVIVED, UNTESTED = "killed", "timed out", "survived", "not run"
# Of a survivor: nothing that could be seen depends on it.
EQUIVALENT = "equivalent"


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


def mutants_of_area(tree: Path, area: Area) -> list[Mutant]:
    """All changes of an area."""
    files = {name: (tree / name).read_bytes() for name in area.files(tree)}
    return [m for f, text in files.items() for m in mutants_of(f, text) if area.has(m.function)]


def choose(tree: Path, areas: Sequence[Area], count: int, seed: int) -> list[tuple[Area, Mutant]]:
    """Mutants of all areas in turn; within one every place is as likely, and no line comes twice
    while there are others. Those of what has not changed stay in their order.
    """

    def at_random(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.id}".encode()).digest()

    orders = []
    for area in areas:
        found = sorted(mutants_of_area(tree, area), key=at_random)
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
    tree: Path, area: str, mutant: Mutant, runner: Runner, line_map: LineMap, seconds: float
) -> dict[str, Any]:
    """Run the tests that run a mutant's line with it in the copy of the tree."""
    running = line_map.tests_of(mutant)
    tests, usual = choose_tests(running, seconds)
    result = {
        "area": area,
        **asdict(mutant),
        "outcome": UNTESTED,
        "by": "",
        "seconds": 0.0,
        "tests": len(tests),
        "left_out": len(running) - len(tests),
    }
    if not tests:
        return result
    path = tree / mutant.path
    source, stat = path.read_bytes(), path.stat()
    limit = _PATIENCE * usual + _MOST_SECONDS_MORE
    taken, outcome, by = 0.0, SURVIVED, ""
    try:
        path.write_bytes(mutant.apply(source))
        # Its bytecode is known by its time and size.
        os.utime(path, (0, 0))
        for part in in_parts(tests):
            slowest = {test.id: line_map.slowest(test.file) for test in part}
            chosen = Chosen({id: _PATIENCE * most + _SECONDS_MORE for id, most in slowest.items()})
            files = list(dict.fromkeys(test.file for test in part))
            ran = runner.run(files, limit, chosen, chosen.pace)
            taken += ran.seconds
            if ran.failed:
                outcome = TIMED_OUT if ran.timed_out else KILLED
                by = chosen.newest if ran.timed_out else ran.failed[0]
                break
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return {**result, "outcome": outcome, "by": by, "seconds": round(taken, 1)}


def without_mutants(runner: Runner, results: Sequence[dict[str, Any]], seconds: float) -> list[str]:
    """Of the tests that failed with a mutant, those that fail without one, too."""
    ids = sorted({r["by"] for r in results if "::" in r["by"]})
    files = list(dict.fromkeys(name.partition("::")[0] for name in ids))
    limit = _PATIENCE * seconds * max(len(files), 1) + _MOST_SECONDS_MORE
    chosen = Chosen(dict.fromkeys(ids, limit))
    ran = runner.run(files, limit, chosen, keep_going=True) if ids else None
    return ran.failed if ran is not None else []


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The last result of each mutant."""
    if not path.exists():
        return {}
    return {r["id"]: r for r in map(json.loads, path.read_text().splitlines())}


def report(results: Sequence[dict[str, Any]], seed: int) -> str:
    """The counts of each area, and all that was not noticed, as Markdown."""
    results = [_judged(result) for result in results]
    columns = (KILLED, TIMED_OUT, SURVIVED, UNTESTED, EQUIVALENT)
    lines = [
        f"{len(results)} mutants, seed {seed}. Noticed: of those that are not equivalent.",
        "",
        "| area | mutants | " + " | ".join(columns) + " | noticed |",
        "|---|" + "---:|" * (len(columns) + 2),
    ]
    names = list(dict.fromkeys(r["area"] for r in results))
    for name in [*names, "all"]:
        of_area = [r for r in results if name in (r["area"], "all")]
        counts = Counter(r["outcome"] for r in of_area)
        real = len(of_area) - counts[EQUIVALENT]
        noticed = (counts[KILLED] + counts[TIMED_OUT]) / real if real else 0
        row = [name, len(of_area), *(counts[c] for c in columns), f"{noticed:.1%}"]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    for outcome in (SURVIVED, UNTESTED, EQUIVALENT):
        found = [r for r in results if r["outcome"] == outcome]
        lines += ["", f"{outcome.capitalize()}: {len(found)}", "", *map(_shown, found)]
    return "\n".join(lines) + "\n"


def _judged(result: dict[str, Any]) -> dict[str, Any]:
    """With the reason why a survivor is no matter."""
    if result["outcome"] not in (SURVIVED, UNTESTED):
        return result
    reason = reason_of(*(result[key] for key in ("path", "function", "before", "after")))
    return result if reason is None else {**result, "outcome": EQUIVALENT, "reason": reason}


def _shown(result: dict[str, Any]) -> str:
    before, after = (" ".join(result[key].split())[:160] for key in ("before", "after"))
    where = f"{result['path']}:{result['line']} {result['function']}"
    tests = f"{result['tests']} tests" + (f" of {n}" if (n := _running(result)) else "")
    end = result.get("reason", tests)
    return f"- `{result['id']}` {where} ({result['operator']}): `{before}` → `{after}`; {end}"


def _running(result: dict[str, Any]) -> int:
    """All tests that run the line, where not all were tried."""
    return int(result["tests"] + result["left_out"]) if result["left_out"] else 0


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
        "--map-seconds", type=float, default=120.0, help="of a test file whose lines are recorded"
    )
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
    """Try the mutants that have no result yet, or with --again those that were not noticed."""
    end = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    copy_tree(ROOT, tree)
    compileall.compile_dir(tree / "atom", quiet=1)
    runner = Runner(tree)
    sources = {file for area in AREAS for file in area.files(tree)}
    tests = list(dict.fromkeys(test for area in areas for test in area.test_files(tree)))
    line_map = LineMap(out / "map.json", tree, sources, runner, args.map_seconds)
    line_map.record(tests)
    results = read_results(out / "results.jsonl")
    if args.again:
        missed = {
            r["id"] for r in results.values() if _judged(r)["outcome"] in (SURVIVED, UNTESTED)
        }
        chosen = [(a, m) for a in areas for m in mutants_of_area(tree, a) if m.id in missed]
    else:
        chosen = choose(tree, areas, args.mutants, args.seed)
        chosen = [(area, mutant) for area, mutant in chosen if mutant.id not in results]
    new = []
    for number, (area, mutant) in enumerate(chosen, start=1):
        if end is not None and time.monotonic() > end:
            print(f"out of time before mutant {number} of {len(chosen)}")
            break
        result = try_mutant(tree, area.name, mutant, runner, line_map, args.test_seconds)
        new.append(result)
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        where = f"{mutant.path}:{mutant.line} {mutant.operator}"
        print(f"{number}/{len(chosen)} {result['outcome']}: {where} ({result['seconds']} s)")
        sys.stdout.flush()
    for test in without_mutants(runner, new, args.test_seconds):
        print(f"fails without a mutant, too, so what it noticed is not proved: {test}")


if __name__ == "__main__":
    main()
