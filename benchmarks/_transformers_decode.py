"""Decode steps of transformers on the same shape: a static cache, compiled where there is a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

WARMUP_STEPS = 5
_ROUNDS = 3


class TransformersDecode:
    """A model with random weights, which transformers initialises on the device."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._config = AutoConfig.from_pretrained(folder)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(self._config, dtype=dtype)
        self._model = model.eval()
        self._device = device
        self.how = "static cache, compiled" if device.type == "cuda" else "static cache"

    @torch.no_grad()
    def measure(self, batch_size: int, prompt_len: int, steps: int) -> dict[str, Any]:
        """Seconds of a step, the median over rounds; tokens stay on the device within a round.

        The engine hands over every token as it comes, so this comparison favours transformers.
        """
        room = prompt_len + WARMUP_STEPS + _ROUNDS * steps + 2
        cache = StaticCache(config=self._config, max_cache_len=room)
        tokens = self._prefill(cache, batch_size, prompt_len)
        step = self._step(cache)
        started = time.perf_counter()
        for _ in range(WARMUP_STEPS):
            tokens = step(tokens)
        self._wait()
        compiled = time.perf_counter() - started
        rounds = []
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            for _ in range(steps):
                tokens = step(tokens)
            self._wait()
            rounds.append((time.perf_counter() - started) / steps)
        return {"seconds": statistics.median(rounds), "warmup_seconds": compiled}

    def _prefill(self, cache: StaticCache, batch_size: int, prompt_len: int) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(batch_size)
        shape = (batch_size, prompt_len)
        vocab = self._config.vocab_size
        prompt = torch.randint(vocab, shape, generator=generator, device=self._device)
        out = self._model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = out.logits
        return logits[:, -1:].argmax(dim=-1)

    def _step(self, cache: StaticCache) -> Callable[[torch.Tensor], torch.Tensor]:
        """tokens [B, 1] -> the next ones."""
        forward = self._model.forward
        if self._device.type == "cuda":
            # Every batch size is a new shape, to be compiled for itself.
            torch._dynamo.reset()
            forward = torch.compile(forward, mode="reduce-overhead", dynamic=False)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            logits: torch.Tensor = forward(tokens, past_key_values=cache, use_cache=True).logits
            return logits[:, -1:].argmax(dim=-1)

        return step

    def close(self) -> None:
        """Let go of what compiling keeps: the graphs' memory, and the model itself."""
        torch._dynamo.reset()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
