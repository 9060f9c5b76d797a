"""Engines that share experts, as processes behind one frontend."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from distributed.coupled import coupled_config
from spec_decode.engines import PROMPTS, create_engine, generate, params, write_target
from transformers import PreTrainedTokenizerFast

from atom.config import ConfigError
from atom.messages import EngineDeadError
from atom.model_engine.async_engine import AsyncEngine


@pytest.fixture
def folder(tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast) -> Path:
    return write_target("deepseek_v3", tmp_path, byte_level_tokenizer)


async def tokens(
    engine: AsyncEngine,
    name: str,
    prompt: list[int],
    count: int = 12,
    begun: asyncio.Event | None = None,
) -> list[int]:
    found: list[int] = []
    async for output in engine.generate(name, prompt, params("greedy", max_tokens=count)):
        found += output.outputs[0].token_ids
        if begun is not None:
            begun.set()
    return found


@pytest.mark.slow
async def test_they_serve_together_and_end_together(folder: Path) -> None:
    """Two engines of two ranks each; then one is killed in the middle of a request of both."""
    config = coupled_config(folder, 2, tensor_parallel_size=2)
    engine = await AsyncEngine.start(config)
    try:
        first = await asyncio.gather(
            *(tokens(engine, str(i), prompt) for i, prompt in enumerate(PROMPTS[:5]))
        )
        with create_engine(folder) as alone:
            assert first == generate(alone, params("greedy", max_tokens=12), PROMPTS[:5])
        await asyncio.sleep(0.5)  # without work
        begun = [asyncio.Event() for _ in range(2)]
        running = [
            asyncio.create_task(tokens(engine, f"long {i}", PROMPTS[i], 110, event))
            for i, event in enumerate(begun)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        assert len(engine.pids) == 2
        os.kill(engine.pids[1], signal.SIGKILL)
        await asyncio.wait_for(engine.wait_dead(), 60)
        for task in running:
            with pytest.raises(EngineDeadError):
                await task
        assert engine.pids == []
    finally:
        await engine.shutdown(0)


def test_a_program_of_its_own_has_no_others(folder: Path) -> None:
    with pytest.raises(ConfigError, match="several engines that share the experts, which only"):
        create_engine(folder, data_parallel_size=2, enable_expert_parallel=True)
