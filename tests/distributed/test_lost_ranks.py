"""A rank that dies or stops ends the server's answers with its name, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import openai
import psutil
import pytest
from entrypoints.server_process import ServerProcess
from patience import PATIENCE_SECONDS
from spec_decode.engines import write_target
from transformers import PreTrainedTokenizerFast

RANKS = 4
SHARED = Path("/dev/shm")


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    return write_target("llama", tmp_path_factory.mktemp("lost-ranks"), byte_level_tokenizer)


def ask(server: ServerProcess, answered: threading.Event, errors: list[str]) -> None:
    """Ask again and again, until an answer fails."""
    try:
        while True:
            for _ in server.client().completions.create(
                model="m", prompt="x", max_tokens=64, stream=True, extra_body={"ignore_eos": True}
            ):
                answered.set()
    except openai.APIError as error:
        errors.append(str(error))


def ranks_of(server: ServerProcess) -> list[psutil.Process]:
    """The processes of rank 0, 1, ..."""
    others = [p for p in server.engine.children() if "rank_process" in " ".join(p.cmdline())]
    return [server.engine, *sorted(others, key=lambda p: int(p.environ()["RANK"]))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "number", "words"),
    [
        (0, signal.SIGKILL, "the engine process was killed by signal 9"),
        (1, signal.SIGKILL, "rank 1 .* was killed by signal 9"),
        (3, signal.SIGKILL, "rank 3 .* was killed by signal 9"),
        (2, signal.SIGSTOP, "rank 2 .* is silent .* since its process is stopped"),
    ],
)
def test_a_lost_rank(folder: Path, rank: int, number: signal.Signals, words: str) -> None:
    flags = ("--tensor-parallel-size", str(RANKS), "--served-model-name", "m")
    server = ServerProcess(folder, *flags, "--dtype", "float32").wait_ready()
    try:
        processes = ranks_of(server)
        assert len(processes) == RANKS
        every = [*processes, *(c for p in processes for c in p.children(recursive=True))]
        errors: list[str] = []
        answered = [threading.Event() for _ in range(3)]
        threads = [threading.Thread(target=ask, args=(server, each, errors)) for each in answered]
        for thread in threads:
            thread.start()
        assert all(each.wait(PATIENCE_SECONDS) for each in answered), errors
        os.kill(processes[rank].pid, number)
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        server.wait_exit(PATIENCE_SECONDS)
        _, alive = psutil.wait_procs(every, PATIENCE_SECONDS)
        assert alive == []
    finally:
        server.stop()
    assert len(errors) == 3
    assert all(re.search(words, error) for error in errors), errors
    # Of these processes: other tests run beside this one.
    names = [path.name for path in SHARED.iterdir()] if SHARED.exists() else []
    pids = [str(process.pid) for process in every]
    assert [n for n in names if "atom" in n or any(pid in n for pid in pids)] == []
