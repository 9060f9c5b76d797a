"""A start says what it waits for, every few seconds."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from patience import wait_until
from ranks import engines_of_threads
from spec_decode.engines import create_engine, write_target
from transformers import PreTrainedTokenizerFast

from atom.distributed.stages import Stages
from atom.model_engine.start_up import start_log
from atom.model_engine.start_up.start_log import said_what_is_awaited


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(start_log, "WAIT_SECONDS", 0.01)
    caplog.set_level("INFO", "atom")


def test_what_is_awaited_is_said_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    stages, causes = Stages(), ["rank 3 is loading the weights", "aiter builds module_moe for 7 s"]
    stages.begin("waiting for the other ranks")
    with said_what_is_awaited(stages, lambda: causes):
        wait_until(lambda: len(caplog.messages) > 2)
        stages.begin("capturing graphs")
        wait_until(lambda: "capturing graphs" in caplog.text)
    said = "; ".join(["waiting for the other ranks for 0 s", *causes])
    assert caplog.messages[:3] == [said] * 3
    assert not any(thread.name == "start-log" for thread in threading.enumerate())


def test_a_long_stage_is_said_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages, asked = Stages(), list[None]()
    with said_what_is_awaited(stages, lambda: asked.append(None) or []):
        wait_until(lambda: len(asked) > 3)
        assert caplog.messages == []
        monkeypatch.setattr(start_log, "STAGE_SECONDS", 0.05)
        wait_until(lambda: caplog.messages)
    assert caplog.messages[0] == "joining the others for 0 s"


def test_an_engine_passes_the_same_stages_on_every_rank(
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: dict[int, list[str]] = {}
    begin = Stages.begin

    def note(stages: Stages, what: str) -> None:
        begun.setdefault(id(stages), []).append(what)
        begin(stages, what)

    monkeypatch.setattr(Stages, "begin", note)
    folder = write_target("llama", tmp_path, byte_level_tokenizer)
    with engines_of_threads(), create_engine(folder, tensor_parallel_size=2):
        expected = ["preparing the device", "loading the kernels, or compiling them"]
        expected += ["finding the model", "reading the checkpoint"]
        expected += ["waiting for the other ranks", "loading the weights"]
        expected += ["waiting for the other ranks", "creating the runner"]
        expected += ["measuring memory for the KV cache", "ready"]
        wait_until(lambda: list(begun.values()) == [expected] * 2)
