"""Engines that share experts, on threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ranks import Ranks, ThreadDriver, run_threads

from atom import SamplingParams
from atom.config import EngineConfig
from atom.messages import EngineRequest
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.executor import RanksExecutor

SETTINGS = {
    "dtype": "float32",
    "block_size": 4,
    "max_num_seqs": 16,
    "max_model_len": 128,
    "kv_cache_memory": "16MB",
    "num_threads": 1,
}


def coupled_config(folder: Path, engines: int, **options: Any) -> EngineConfig:
    parallel = {"data_parallel_size": engines, "enable_expert_parallel": True}
    return engine_config(model=str(folder), **{**SETTINGS, **parallel, **options})


def on_coupled(
    config: EngineConfig, use: Callable[[int, EngineCore], Any], ranks: Ranks | None = None
) -> list[Any]:
    """What `use` returns for each engine's index and core, in a thread each."""
    meeting = ranks or Ranks()

    def run(index: int) -> Any:
        core = EngineCore(config, RanksExecutor(config, ThreadDriver(config, meeting, index)))
        try:
            return use(index, core)
        finally:
            core.shutdown()

    return run_threads(config.parallel.data_parallel_size, run)


def add(core: EngineCore, prompts: Sequence[list[int]], sampling: SamplingParams) -> None:
    seed = sampling.seed or 0
    for i, prompt in enumerate(prompts):
        core.add_request(
            EngineRequest(id=str(i), prompt_token_ids=prompt, params=sampling, seed=seed)
        )


def serve(core: EngineCore) -> list[list[int]]:
    """Step until no engine has work -> the tokens of this one's requests."""
    tokens: dict[str, list[int]] = {}
    is_over = False
    while not is_over:
        for output in core.step().outputs:
            tokens.setdefault(output.id, []).extend(output.token_ids)
        is_over = core.max_idle_ms != 0
    core.block_pool.check_integrity()
    assert core.block_pool.num_used == 0
    return [tokens[name] for name in sorted(tokens, key=int)]
