"""The engine in process: what it says of a step that is under way."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom.batch import LaunchedStep, ScheduledBatch
from atom.messages import EngineRequest
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.engine_core import EngineCore
from atom.sampling_params import SamplingParams


def test_the_tokens_of_a_step_are_known_while_it_runs(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(model=str(tiny_llama_dir), num_threads=1, kv_cache_memory="4MiB")
    core = EngineCore(config)
    known: list[int] = []
    launch = core.executor.launch

    def watched(batch: ScheduledBatch) -> LaunchedStep:
        known.append(core.num_step_tokens)
        return launch(batch)

    monkeypatch.setattr(core.executor, "launch", watched)
    for name, size in (("a", 5), ("b", 7)):
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        core.add_request(EngineRequest(id=name, prompt_token_ids=[1] * size, params=params, seed=1))
    while core.has_work:
        core.step()
    assert known == [12, 2]
    core.shutdown()
