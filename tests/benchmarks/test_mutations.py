"""The program that changes the core and asks whether tests notice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom import __file__ as package

ROOT = Path(package).parent.parent
Load = Callable[[str], Any]

_SOURCE = b'''"""Texts: 1 < 2 and not 3."""

import logging

log = logging.getLogger(__name__)


def f(x: int = 1, *, y: "int | None" = None) -> int:
    """One of 2 or 3."""
    log.info("%d", x + 1)
    "\xc3\xa4" if x < 5 and not y else "o"
    if x in (7,):
        raise ValueError(f"{x + 9} is wrong")
    x.y = x - 2
    a, b = 1, 2
    del a, b
    return x
'''


def _made(load: Load, source: bytes = _SOURCE) -> set[tuple[int, str, str, str]]:
    mutants = load("_mutants").mutants_of("f.py", source)
    lines = source.splitlines()
    for mutant in mutants:
        changed = mutant.apply(source).splitlines()
        assert changed != lines
        assert [a for a, b in zip(changed, lines, strict=True) if a != b], mutant
        assert load("_mutants").compiles(mutant.apply(source)), mutant
    return {(m.line, m.operator, m.before, m.after) for m in mutants}


def test_what_is_changed(benchmark_module: Load) -> None:
    made = _made(benchmark_module)
    assert made >= {
        (8, "+1", "1", "(2)"),
        (8, "-1", "1", "(0)"),
        (11, "comparison", "x < 5", "(x <= 5)"),
        (11, "and/or", "x < 5 and not y", "(x < 5 or not y)"),
        (11, "condition", "x < 5 and not y", "(not y)"),
        (11, "not", "not y", "(y)"),
        (12, "comparison", "x in (7,)", "(x not in (7,))"),
        (12, "not", "x in (7,)", "(not (x in (7,)))"),
        (13, "dropped", 'raise ValueError(f"{x + 9} is wrong")', "pass"),
        (14, "dropped", "x.y = x - 2", "pass"),
        (14, "arithmetic", "x - 2", "(x + 2)"),
        (17, "return None", "return x", "return None"),
    }
    # Without these, names would not be bound at all.
    assert not [one for one in made if one[1] == "dropped" and one[0] in (15, 16)]
    # Texts, messages and annotations decide nothing.
    assert not {line for line, *_ in made} & {1, 3, 9}
    assert not [one for one in made if "9" in one[2] and one[1] != "dropped"]


def test_a_name_does_not_hang_on_other_lines(benchmark_module: Load) -> None:
    mutants_of = benchmark_module("_mutants").mutants_of
    moved = [m.id for m in mutants_of("f.py", b"# more\n" + _SOURCE)]
    assert moved == [m.id for m in mutants_of("f.py", _SOURCE)]
    assert len(set(moved)) == len(moved)


def test_a_file_that_has_changed_is_not_mutated(benchmark_module: Load) -> None:
    (mutant, *_) = benchmark_module("_mutants").mutants_of("f.py", _SOURCE)
    with pytest.raises(ValueError, match="no longer"):
        mutant.apply(b"\n" + _SOURCE)


def test_where_a_change_is(benchmark_module: Load) -> None:
    source = b"""MOST = 1


class A:
    size: int = 2

    def f(self, x=3):
        if (
            x > 4
        ):
            return x

        def inner():
            self.n += 5
            return 6
        return inner
"""
    mutants = benchmark_module("_mutants").mutants_of("f.py", source)
    places = {(m.before, m.function, m.first, m.last) for m in mutants if m.operator == "+1"}
    assert places == {
        ("1", "", 1, 1),
        ("2", "", 5, 5),
        ("3", "A.f", 7, 16),
        ("4", "A.f", 8, 10),
        ("5", "A.f.inner", 14, 14),
        ("6", "A.f.inner", 15, 15),
    }
    (early,) = (m for m in mutants if m.operator == "early return" and m.line == 14)
    assert (early.function, early.first) == ("A.f.inner", 14)


def test_every_area_has_files_and_tests(benchmark_module: Load) -> None:
    areas = benchmark_module("_mutant_areas").AREAS
    parts = [(file, area.checks) for area in areas for file in area.files(ROOT)]
    assert len(set(parts)) == len(parts)
    for area in areas:
        assert area.files(ROOT)
        assert area.test_files(ROOT)
        for pattern in area.sources:
            assert list(ROOT.glob(pattern)), pattern
        for pattern in area.tests:
            assert list((ROOT / "tests").glob(pattern)), pattern


def test_reasons_are_of_what_there_is(benchmark_module: Load) -> None:
    reasons = benchmark_module("_mutant_reasons")
    for (name, function, before, after), why in reasons._REASONS.items():
        path = f"atom/{name}"
        assert reasons.reason_of(path, function, f"  {before}\n", after) == why
        assert reasons.reason_of(path, function, before, f"{after} + 1") is None
        made = {
            (m.function, " ".join(m.before.split()), " ".join(m.after.split()))
            for m in benchmark_module("_mutants").mutants_of(path, (ROOT / path).read_bytes())
        }
        assert (function, before, after) in made, "has it changed? then its reason, too"


def test_mutants_are_of_all_areas_in_turn(benchmark_module: Load) -> None:
    mutations = benchmark_module("mutations")
    areas = benchmark_module("_mutant_areas").AREAS[:2]
    chosen = mutations.choose(ROOT, areas, 10, 0)
    assert [area.name for area, _ in chosen] == [area.name for area in areas] * 5
    assert mutations.choose(ROOT, areas, 6, 0) == chosen[:6]
    assert mutations.choose(ROOT, areas, 10, 1) != chosen


_TRY = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import mutations
from _mutant_map import LineMap
from _mutants import mutants_of
mutations._PATIENCE, mutations._SECONDS_MORE = 2, 2.0
tree = Path(sys.argv[2])
runner = mutations.Runner(tree)
path = "atom/small.py"
source = (tree / path).read_bytes()
known = tree / "map.json"
line_map = LineMap(known, tree, [path], runner, 60.0)
line_map.record(["tests/test_small.py", "tests/test_other.py"])
results = []
wanted = {(3, "comparison"), (4, "dropped"), (9, "return None"), (13, "return None")}
for mutant in mutants_of(path, source):
    if (mutant.line, mutant.operator) not in wanted:
        continue
    results.append(mutations.try_mutant(tree, "small", mutant, runner, line_map, 60.0))
    assert (tree / path).read_bytes() == source
kept = known.read_text()
(tree / "tests/test_other.py").write_text("")
again = LineMap(known, tree, [path], runner, 60.0)
again.record(["tests/test_small.py", "tests/test_other.py"])
first, second = json.loads(kept), json.loads(known.read_text())
same = [name for name in first if first[name] == second[name]]
failing = mutations.without_mutants(runner, [
    {"outcome": "killed", "by": "tests/test_small.py::" + name}
    for name in ("test_count", "test_that_fails_anyway")
], 30.0)
print(json.dumps({"results": results, "map": first, "same": same, "failing": failing}))
"""


def test_only_tests_that_run_a_line_are_tried(benchmark_module: Load, tmp_path: Path) -> None:
    (tmp_path / "atom").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "conftest.py").write_text("")
    (tmp_path / "tests" / "conftest.py").write_text("import atom.small\n")
    (tmp_path / "atom" / "__init__.py").write_text("")
    (tmp_path / "atom" / "small.py").write_text(
        "def count(most):\n    n = 0\n    while n < most:\n        n += 1\n    return n\n\n\n"
        "def seen(n):\n    return n\n\n\ndef unseen(n):\n    return n\n"
    )
    (tmp_path / "tests" / "test_small.py").write_text(
        "from atom.small import count\n\n\ndef test_count():\n    assert count(3) == 3\n\n\n"
        "def test_that_fails_anyway():\n    assert count(3) == 4\n"
    )
    (tmp_path / "tests" / "test_other.py").write_text(
        "import threading\n\nfrom atom.small import seen\n\n\ndef test_in_a_thread():\n"
        "    thread = threading.Thread(target=seen, args=(1,))\n"
        "    thread.start()\n    thread.join()\n"
    )
    command = [sys.executable, "-c", _TRY, str(ROOT / "benchmarks"), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    results = said["results"]
    outcomes = {(r["line"], r["operator"], r["after"]): r["outcome"] for r in results}
    assert outcomes == {
        (3, "comparison", "(n <= most)"): "killed",
        (4, "dropped", "pass"): "timed out",
        (9, "return None", "return None"): "survived",
        (13, "return None", "return None"): "not run",
    }
    assert [r["by"] for r in results if r["outcome"] == "killed"] == [
        "tests/test_small.py::test_count"
    ]
    lines = {
        test["id"]: test["lines"]["atom/small.py"]
        for entry in said["map"].values()
        for test in entry["tests"]
    }
    # A test that fails anyway is no proof of anything.
    assert lines == {
        "tests/test_small.py::test_count": [2, 3, 4, 5],
        "tests/test_other.py::test_in_a_thread": [9],
    }
    assert said["same"] == ["tests/test_small.py"]
    assert said["failing"] == ["tests/test_small.py::test_that_fails_anyway"]
    text = benchmark_module("mutations").report(results, 0)
    assert f"{len(results)} mutants, seed 0." in text
    assert "| small | 4 | 1 | 1 | 1 | 1 | 0 | 50.0% |" in text
