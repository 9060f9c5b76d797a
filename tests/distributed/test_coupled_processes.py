"""Engines that share experts, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from distributed.coupled import coupled_config
from entrypoints.server_process import ServerProcess
from patience import PATIENCE_SECONDS
from spec_decode.engines import PROMPTS, create_engine, generate, params, write_target
from transformers import PreTrainedTokenizerFast

from atom.config import ConfigError
from atom.distributed.rank_environment import RankEnvironment
from atom.model_engine.processes.launched import coupled_engines

_ENGINE = """
import json, sys
from distributed.coupled import add, coupled_config, serve
from spec_decode.engines import params
from atom.model_engine.engine_core import EngineCore

folder, size, max_tokens, prompts, *is_to_die = sys.argv[1:]
core = EngineCore(coupled_config(folder, 2, tensor_parallel_size=int(size)))
add(core, json.loads(prompts), params("greedy", max_tokens=int(max_tokens)))
if is_to_die:
    for _ in range(5):
        core.step()
    print("runs", flush=True)
    sys.stdin.read()
tokens = serve(core)
core.shutdown()
print(json.dumps(tokens), flush=True)
"""


def start(
    folder: Path, first: RankEnvironment, max_tokens: int, prompts: list[list[int]], *words: str
) -> subprocess.Popen[str]:
    """With a word it says when both run, and goes no further."""
    numbers = str(first.world_size // 2), str(max_tokens)
    return subprocess.Popen(
        [sys.executable, "-c", _ENGINE, str(folder), *numbers, json.dumps(prompts), *words],
        env={**os.environ, **first.variables(), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def folder(tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast) -> Path:
    return write_target("deepseek_v3", tmp_path, byte_level_tokenizer)


@pytest.mark.slow
def test_engines_meet_and_share(folder: Path) -> None:
    shares = [PROMPTS[:3], PROMPTS[3:4]]
    firsts = coupled_engines(coupled_config(folder, 2, tensor_parallel_size=2).parallel)
    engines = [start(folder, *each) for each in zip(firsts, (12, 12), shares, strict=True)]
    outputs = [engine.communicate(timeout=180) for engine in engines]
    assert [engine.returncode for engine in engines] == [0, 0], outputs
    with create_engine(folder) as alone:
        for (out, _), share in zip(outputs, shares, strict=True):
            tokens = json.loads(out.splitlines()[-1])
            assert tokens == generate(alone, params("greedy", max_tokens=12), share)


@pytest.mark.slow
def test_an_engine_that_dies_ends_the_other(folder: Path) -> None:
    firsts = coupled_engines(coupled_config(folder, 2).parallel)
    engines = [
        start(folder, first, 110, PROMPTS[:2], *words)
        for first, words in zip(firsts, ((), ("dies",)), strict=True)
    ]
    try:
        assert engines[1].stdout is not None
        assert engines[1].stdout.readline() == "runs\n"
        engines[1].kill()
        _, errors = engines[0].communicate(timeout=60)
        assert engines[0].returncode == 1
        assert "EngineDeadError" in errors
    finally:
        for engine in engines:
            engine.kill()


@pytest.mark.slow
def test_the_server_starts_them(folder: Path) -> None:
    flags = ("--data-parallel-size", "2", "--enable-expert-parallel", "--dtype", "float32")
    server = ServerProcess(folder, *flags, "--served-model-name", "m").wait_ready()
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    try:
        with ThreadPoolExecutor(4) as pool:
            requests = [{"model": "m", "prompt": prompt, **body} for prompt in PROMPTS[:4]]
            answers = list(pool.map(lambda r: server.post("/v1/completions", json=r), requests))
        assert answers[0].status_code == 200, answers[0].text
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        with create_engine(folder) as alone:
            outputs = alone.generate(PROMPTS[:4], params("greedy", max_tokens=12))
        assert texts == [output.outputs[0].text for output in outputs]
        first, second = psutil.Process(server._process.pid).children()
        second.kill()
        server.wait_exit(PATIENCE_SECONDS)
        first.wait(PATIENCE_SECONDS)
    finally:
        server.stop()


def test_alone_they_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="share the experts, which only the server starts"):
        create_engine(folder, data_parallel_size=2, enable_expert_parallel=True)
