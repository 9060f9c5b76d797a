"""What Triton compiles while an engine starts, and what while it serves; run as a program.

    python launch_worker.py ARCH OPTIONS

OPTIONS: JSON with `target` and `draft`, fields of `config.json` (`draft` may be left out), and
`engine`, the engine's options. An engine starts on a GPU of ARCH that is pretended
(`pretend_gpu.py`), warms up, and serves requests. Writes how many kernels were compiled
by then, and the keys of those that requests added, as JSON.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pretend_gpu import CaptureCounter, pretend_gpu, start_engine, write_models

_STEPS = 300
_MOST_SEQUENCES = 64


def skip_products() -> None:
    """Products of matrices are zeros, as all that kernels write: many a CPU takes seconds for
    those of 16 bits.
    """

    def linear(x: torch.Tensor, weight: torch.Tensor, _: object = None) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], weight.shape[0])

    def product(
        a: torch.Tensor,
        b: torch.Tensor,
        out_dtype: torch.dtype | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is not None:
            return out.zero_()
        return a.new_zeros(*a.shape[:-1], b.shape[-1], dtype=out_dtype or a.dtype)

    F.linear = linear
    torch.mm = torch.bmm = torch.matmul = product


def draw_params(rng: random.Random, vocab: int, room: int) -> Any:
    """Any way to choose tokens."""
    from atom.sampling_params import SamplingParams

    options: dict[str, Any] = {}
    if rng.random() < 0.6:
        kinds: dict[str, Callable[[], Any]] = {
            "top_k": lambda: rng.choice([1, 5, 50]),
            "top_p": lambda: rng.uniform(0.1, 0.99),
            "min_p": lambda: rng.uniform(0.01, 0.5),
        }
        options["temperature"] = rng.uniform(0.2, 2)
        options |= {name: draw() for name, draw in kinds.items() if rng.random() < 0.4}
    else:
        options["temperature"] = 0.0
    edits: dict[str, Callable[[], Any]] = {
        "presence_penalty": lambda: rng.uniform(-1, 1),
        "repetition_penalty": lambda: rng.uniform(0.5, 2),
        "logit_bias": lambda: {rng.randrange(vocab): 3.0},
        "allowed_token_ids": lambda: [0, *rng.sample(range(1, vocab), 3)],
        "bad_word_ids": lambda: [[3, 4]],
        "logprobs": lambda: rng.randrange(4),
        "prompt_logprobs": lambda: 2,
        "num_speculative_tokens": lambda: rng.randrange(1, 4),
        "speculation": lambda: False,
    }
    options |= {name: draw() for name, draw in edits.items() if rng.random() < 0.06}
    return SamplingParams(max_tokens=room, ignore_eos=True, **options)


def serve(core: Any, rng: random.Random) -> None:
    """Requests that come and go: alone, many at once, short and as long as any."""
    from atom.messages import EngineRequest

    limits, count = core.limits, 0
    for _ in range(_STEPS):
        some = rng.choice([0, 0, 0, 0, 1, 1, 1, 2, 5, 20, _MOST_SEQUENCES])
        for _ in range(some if rng.random() < 0.7 or not core.has_work else 0):
            room = rng.randint(1, 12)
            most = rng.choice([1, 16, 17, 40, 130, 700, limits.max_model_len - room])
            length = rng.randint(1, most)
            prompt = [rng.randrange(limits.vocab_size) for _ in range(length)]
            params = draw_params(rng, limits.vocab_size, room)
            count += 1
            request = EngineRequest(id=f"{count}", prompt_token_ids=prompt, params=params, seed=1)
            core.add_request(request)
        core.step().check()
        if rng.random() < 0.1:
            core.abort([f"{i}" for i in range(count + 1) if rng.random() < 0.5])
    core.abort([f"{i}" for i in range(count + 1)])
    core.step()


def main(arch: str, text: str) -> None:
    torch.set_num_threads(1)
    launches = pretend_gpu(arch, CaptureCounter())
    skip_products()
    options = json.loads(text)
    models = {name: options[name] for name in ("target", "draft") if name in options}
    from atom.model_engine.engine_core import EngineCore
    from atom.model_engine.start_up.warm_up import warm_up

    with tempfile.TemporaryDirectory() as folder:
        worker, rank = start_engine(
            write_models(Path(folder), models), kv_cache_memory="64MB", **options["engine"]
        )
        warm_up(rank, worker.parts, worker._runner, worker.limits.num_blocks)
        known = list(launches.compiled)
        serve(EngineCore(rank.config, worker), random.Random(1))
    print(json.dumps({"known": known, "anew": launches.compiled[len(known) :]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
