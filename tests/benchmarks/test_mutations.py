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
        (15, "return None", "return x", "return None"),
    }
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


def test_every_area_has_files_and_tests(benchmark_module: Load) -> None:
    areas = benchmark_module("_mutant_areas").AREAS
    for area in areas:
        files = area.files(ROOT)
        assert files
        for pattern in area.sources:
            assert list((ROOT / "atom").glob(pattern)), pattern
        for pattern in area.tests:
            assert list((ROOT / "tests").glob(pattern)), pattern
    pool = next(area for area in areas if area.name == "block pool")
    near = pool.tests_of(ROOT, "atom/model_engine/block_pool.py")
    assert near[0] == "tests/model_engine/test_block_pool.py"


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
from _mutant_areas import Area
from _mutants import mutants_of
mutations._PATIENCE, mutations._SECONDS_MORE = 2, 2.0
tree = Path(sys.argv[2])
runner = mutations.Runner(tree)
baseline = mutations.Baseline(tree / "baseline.json", runner, 60.0)
area = Area("small", ["small.py"], [])
source = (tree / "atom/small.py").read_bytes()
results = []
wanted = {(3, "comparison"), (4, "dropped"), (9, "return None")}
for mutant in mutants_of("atom/small.py", source):
    if (mutant.line, mutant.operator) not in wanted:
        continue
    results.append(mutations.try_mutant(tree, area, mutant, runner, baseline, 60.0))
    assert (tree / "atom/small.py").read_bytes() == source
print(json.dumps(results))
"""


def test_killed_survived_and_endless(benchmark_module: Load, tmp_path: Path) -> None:
    (tmp_path / "atom").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "conftest.py").write_text("")
    (tmp_path / "atom" / "__init__.py").write_text("")
    (tmp_path / "atom" / "small.py").write_text(
        "def count(most):\n    n = 0\n    while n < most:\n        n += 1\n    return n\n\n\n"
        "def untested(n):\n    return n\n"
    )
    (tmp_path / "tests" / "test_small.py").write_text(
        "from atom.small import count\n\n\ndef test_count():\n    assert count(3) == 3\n\n\n"
        "def test_that_fails_anyway():\n    assert count(3) == 4\n"
    )
    command = [sys.executable, "-c", _TRY, str(ROOT / "benchmarks"), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    results = json.loads(ran.stdout.splitlines()[-1])
    outcomes = {(r["line"], r["operator"], r["after"]): r["outcome"] for r in results}
    assert outcomes[3, "comparison", "(n <= most)"] == "killed"
    assert outcomes[4, "dropped", "pass"] == "timed out"
    assert outcomes[9, "return None", "return None"] == "survived"
    baseline = json.loads((tmp_path / "baseline.json").read_text())
    failing = baseline["tests/test_small.py"]["failing"]
    assert failing == ["tests/test_small.py::test_that_fails_anyway"]
    text = benchmark_module("mutations").report(results, 0)
    assert f"{len(results)} mutants, seed 0." in text
    assert "| small |" in text
