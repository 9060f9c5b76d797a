"""The start of Kimi-K2.5 on eight GPUs is rehearsed, as it is published and with its drafts.

Rehearsals run in processes of their own, in which Triton is not interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plan.rehearsal.published import DRAFTS, TARGETS, write

from atom.graphs.capture import default_batch_sizes, default_context_bounds

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
GB = 10**9


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def plan(*flags: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "atom.plan", "--rehearse", *flags)


def implementation(table: str, op: str) -> set[str]:
    return {line.split()[1] for line in table.splitlines() if line.split()[0] == op}


# Weights of a GPU of eight, and of the checkpoint's text model: GB.
WEIGHTS = {"mxfp4": (73, 559), "int4": (77, 595), "fp8": (131, 1030)}


@pytest.mark.parametrize(
    "target", ["mxfp4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8", "int4"))]
)
def test_published_checkpoints_are_ready(target: str) -> None:
    worker = str(Path(__file__).with_name("rehearse_worker.py"))
    # Each rank of all takes a second or two.
    ranks = 8 if target == "mxfp4" else 2
    done = run(worker, target, "mi355x", str(ranks))
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == list(DRAFTS)
    assert found["mha"]["num_ranks"] == ranks
    of_gpu, stored = WEIGHTS[target]
    for own in found.values():
        memory, table = own["memory"], own["ops"]
        assert own["is_ready"]
        assert (round(memory["weights"] / GB), round(own["stored"] / GB)) == (of_gpu, stored)
        # A step of four rows visits 31 of 384 experts by chance, on a GPU an eighth of each.
        assert memory["weights"] / 12 < own["bytes_read"] < memory["weights"] / 7
        parts = ("weights", "draft", "buffers", "steps", "graphs", "runtime", "kv_cache")
        used = sum(memory[part] for part in parts)
        assert memory["room"] - 2 * memory["block"] < used <= memory["room"]
        # Hidden states of the largest step are 117 MB; logits of 1024 rows in float32 are 671 MB.
        assert 2 * GB < memory["steps"] < 20 * GB
        # Of each number of sequences and each bound of the context: with drafts and without.
        sizes = len(default_batch_sizes(256))
        bounds = len(default_context_bounds(262144, 3))
        assert own["graphs"]["layers"] == 2 * sizes * bounds
        assert own["graphs"]["drafts"] == 2 * own["graphs"]["layers"]
        # 61 layers of 12 launches at least, and at most of what a layer alone is tested for.
        assert 61 * 12 < sum(own["launches"].values()) < 61 * 23 + 250
        assert own["kernels"] > 10
        assert implementation(table, "mla_decode") == {"aiter"}
        assert implementation(table, "rms_norm_pair") == {"triton"}
        assert implementation(table, "quant_experts") == {"aiter"}
    assert "paged_attention" not in found["mla"]["ops"]
    assert "paged_attention" in found["mha"]["ops"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("published")
    return {name: str(write(folder / name, TARGETS[name])) for name in ("mxfp4", "fp8")}


def test_what_is_missing_ends_with_a_status(folders: dict[str, str]) -> None:
    """aiter's kernels for experts in MXFP4 are FlyDSL's; a model without a draft compiles none."""
    done = plan(folders["mxfp4"], "--gpu", "mi355x", "-tp", "4", "--installed", "aiter")
    assert done.returncode == 1, done.stderr
    assert (
        "without flydsl: quant_experts runs by triton, not aiter (not aiter: its kernels"
        in done.stdout
    )
    assert "flydsl is not installed" in done.stdout
    assert "without hipcc" not in done.stdout
    assert done.stdout.splitlines()[-1] == "NOT READY: libraries are missing"


def test_what_does_not_fit_ends_with_a_status(folders: dict[str, str]) -> None:
    """A terabyte of weights on two GPUs of 80 GB, which need no library."""
    model = f"{folders['fp8']}/config.json"
    done = plan("--model", model, "--gpu", "h100", "--tensor-parallel-size", "2")
    assert done.returncode == 1, done.stderr
    assert "DOES NOT FIT: a KV cache budget of -" in done.stdout
    assert "KV cache         0.0 GB" in done.stdout
    assert done.stdout.splitlines()[-1] == "NOT READY: it does not fit"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "name a model"),
        (["x", "--gpu", "mi9"], "unknown GPU 'mi9'"),
        (["x", "--device", "cpu"], "--device has no effect on a rehearsal"),
        (["x", "--load-format", "dummy"], "--load-format has no effect on a rehearsal"),
        (["x", "--installed", "apex"], "--installed apex: what kernels for mi355x ask for is"),
        (["x", "--disk-gb-s", "0"], "--disk-gb-s must be above 0"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from atom.plan.cli import main

    assert main(["--rehearse", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_repeated_layers_count_as_if_all_of_them_ran() -> None:
    """All figures: memory, launches and kernels."""
    worker = str(Path(__file__).with_name("rehearse_worker.py"))
    counted, ran = (run(worker, "mxfp4", "mi355x", "1", *flag) for flag in ([], ["every-layer"]))
    assert not counted.returncode + ran.returncode, counted.stderr + ran.stderr
    assert counted.stdout == ran.stdout
