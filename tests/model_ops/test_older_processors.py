"""All tests of C++ kernels, with kernels compiled for processors older than this one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from atom.model_ops.kernels.native.build import native_build

TESTS = Path(__file__).parents[1]
MODEL_OPS = TESTS / "model_ops"
# The team's threads are the same on every processor.
FILES = sorted({*MODEL_OPS.rglob("test_native_*.py")} - {MODEL_OPS / "test_native_team.py"})
FILES += [MODEL_OPS / "test_step_ops.py", MODEL_OPS / "test_draft_choice.py"]
FILES += [TESTS / "models/test_native_deepseek.py", TESTS / "graphs/test_programs.py"]
# The compiler's name, a feature that its code needs, numbers in a vector.
ARCHES = [
    ("haswell", "avx2", 8),
    ("skylake-avx512", "avx512bw", 16),
    ("cascadelake", "avx512_vnni", 16),
    ("cooperlake", "avx512_bf16", 16),
]
# None of these processors has matrix tiles.
MAY_BE_SKIPPED = {"the processor has no AMX-BF16"}

pytestmark = pytest.mark.skipif(
    native_build().reason is not None, reason=str(native_build().reason)
)


def environment(arch: str) -> dict[str, str]:
    """Without what a test runner told its workers."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return {**kept, "ATOM_CPU_ARCH": arch}


def lanes_of(arch: str) -> int:
    """Numbers in a vector of the kernels that are compiled and loaded."""
    program = (
        "from atom.model_ops.kernels.native.bindings import constant; print(constant('lanes'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(arch), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def read_results(report: Path) -> tuple[set[str], list[tuple[str, str]]]:
    """The modules of tests that passed; the names of those that were skipped, with the reasons."""
    ran, skipped = set(), []
    for case in ET.parse(report).getroot().iter("testcase"):
        reason = case.find("skipped")
        if reason is None:
            ran.add(case.attrib["classname"].rpartition(".")[2])
        else:
            skipped.append((case.attrib["name"], reason.attrib["message"]))
    return ran, skipped


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("arch", "feature", "lanes"), ARCHES)
def test_kernels_compiled_for_an_older_processor(
    arch: str, feature: str, lanes: int, tmp_path: Path
) -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or feature not in cpuinfo.read_text().split():
        pytest.skip(f"this processor cannot run code for {arch}")
    assert lanes_of(arch) == lanes
    report = tmp_path / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", f"--junitxml={report}"]
    done = subprocess.run(
        [*command, *map(str, FILES)], env=environment(arch), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    ran, skipped = read_results(report)
    assert [one for one in skipped if one[1] not in MAY_BE_SKIPPED] == []
    assert ran == {file.stem for file in FILES}


def test_a_build_that_fails_is_no_success(tmp_path: Path) -> None:
    """As a processor of that name, which no compiler knows."""
    with pytest.raises(AssertionError, match="native kernels are not available"):
        lanes_of("no-such-processor")
    report = tmp_path / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", str(FILES[0])]
    subprocess.run(command, env=environment("no-such-processor"), capture_output=True, check=True)
    ran, skipped = read_results(report)
    assert not ran
    assert any(reason not in MAY_BE_SKIPPED for _, reason in skipped)
