"""Engines that share experts, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from spec_decode.engines import PROMPTS, create_engine, generate, params, write_target
from transformers import PreTrainedTokenizerFast

from atom.distributed.seat import Seat, free_port

_ENGINE = """
import json, sys
from distributed.coupled import add, coupled_config, serve
from spec_decode.engines import params
from atom.model_engine.engine_core import EngineCore

folder, size, max_tokens, prompts = sys.argv[1:]
core = EngineCore(coupled_config(folder, 2, tensor_parallel_size=int(size)))
add(core, json.loads(prompts), params("greedy", max_tokens=int(max_tokens)))
print("started", flush=True)
tokens = serve(core)
core.shutdown()
print(json.dumps(tokens), flush=True)
"""


def start(
    folder: Path, seat: Seat, size: int, max_tokens: int, prompts: list[list[int]]
) -> subprocess.Popen[str]:
    numbers = str(size), str(max_tokens)
    return subprocess.Popen(
        [sys.executable, "-c", _ENGINE, str(folder), *numbers, json.dumps(prompts)],
        env={**os.environ, **seat.variables(), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def folder(tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast) -> Path:
    return write_target("deepseek_v3", tmp_path, byte_level_tokenizer)


@pytest.mark.slow
def test_engines_meet_and_share(folder: Path) -> None:
    port, shares = free_port(), [PROMPTS[:3], PROMPTS[3:4]]
    engines = [start(folder, Seat(i, 2, port), 2, 12, share) for i, share in enumerate(shares)]
    outputs = [engine.communicate(timeout=180) for engine in engines]
    assert [engine.returncode for engine in engines] == [0, 0], outputs
    with create_engine(folder) as alone:
        for (out, _), share in zip(outputs, shares, strict=True):
            tokens = json.loads(out.splitlines()[-1])
            assert tokens == generate(alone, params("greedy", max_tokens=12), share)


@pytest.mark.slow
def test_an_engine_that_dies_ends_the_other(folder: Path) -> None:
    port = free_port()
    engines = [start(folder, Seat(i, 2, port), 1, 110, PROMPTS[:2]) for i in range(2)]
    try:
        for engine in engines:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "started\n"
        engines[1].kill()
        _, errors = engines[0].communicate(timeout=60)
        assert engines[0].returncode == 1
        assert "EngineDeadError" in errors
    finally:
        for engine in engines:
            engine.kill()


def test_without_a_seat_they_are_refused(folder: Path) -> None:
    with pytest.raises(Exception, match="engines that share the experts are processes of a server"):
        create_engine(folder, data_parallel_size=2, enable_expert_parallel=True)
