"""--show-ops: the table of ops of a real model, and nothing is served."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import engines_of_threads

from atom.entrypoints import openai_server
from atom.examples import simple_inference


@pytest.mark.parametrize("main", [openai_server.main, simple_inference.main])
@pytest.mark.parametrize("flag", ["--show-ops", "--show_ops"])
def test_the_table_is_printed(
    main: Callable[[list[str]], int],
    flag: str,
    tiny_llama_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--model", str(tiny_llama_dir), "--num-threads", "1", "--kv-cache-memory", "1MB"]
    assert main([*given, "--dtype", "float32", "--kv-cache-dtype", "bf16", flag]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["op", "runs"]
    runs = {line.split()[0]: line.split()[1] for line in lines if not line.startswith(" ")}
    assert {"linear", "rms_norm", "rope", "kv_cache_write", "prefill_attention"} <= set(runs)
    assert runs["paged_attention"] == "torch"
    assert any("the cache holds torch.bfloat16" in line for line in lines)
    assert lines[-1] == "model: LlamaForCausalLM of atom, which is native"


def test_the_table_is_the_first_ranks(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(tiny_llama_dir), "--kv-cache-memory", "1MB", "--show-ops"]
    tables = []
    for size in ("1", "2"):
        with engines_of_threads():
            assert openai_server.main([*given, "--num-threads", "1", "-tp", size]) == 0
        tables.append({line.split()[0] for line in capsys.readouterr().out.splitlines()})
    alone, first = tables
    assert first - alone == {
        *("all_reduce", "all_reduce_add_rms_norm", "share_embedding"),
        *("largest_pair", "largest_of_pairs"),
    }


def test_one_replica_stands_for_all(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(tiny_llama_dir), "--num-threads", "1", "--kv-cache-memory", "1MB"]
    with engines_of_threads():
        assert openai_server.main([*given, "-tp", "2", "-dp", "2", "--show-ops"]) == 0
    assert "all_reduce_add_rms_norm" in capsys.readouterr().out


def test_engines_that_share_experts_are_refused(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(tiny_llama_dir), "-dp", "2", "--enable-expert-parallel"]
    assert openai_server.main([*given, "--show-ops"]) == 1
    assert "which logs the table of ops" in capsys.readouterr().err


def test_failures_are_told(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATOM_OP_ROPE", "aiter")
    assert openai_server.main(["--model", str(tiny_llama_dir), "--show-ops"]) == 1
    assert "ATOM_OP_ROPE=aiter" in capsys.readouterr().err


def test_a_missing_compiler_is_warned_of_once(tiny_llama_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "atom.entrypoints.openai_server", str(tiny_llama_dir)]
    command += ["--num-threads", "1", "--kv-cache-memory", "1MB", "--show-ops"]
    environment = {
        "PATH": str(tmp_path),
        "ATOM_CACHE": str(tmp_path),
        "HOME": str(tmp_path),
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    [warning] = [line for line in done.stderr.splitlines() if " WARNING " in line]
    assert "slower than the C++ kernels, which could not be built" in warning
    assert "looked for c++, g++, clang++; install g++ or clang++, or set CXX" in warning
