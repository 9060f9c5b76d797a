"""Whatever a request meets, its answer is the same to the bit.

A quiet engine without speculation and without a prefix cache answers each request alone. Then the
same requests run in engines with random chunk sizes, batches, pools so small that sequences are
preempted, drafts, prefix hits, steps that overlap, delays at every step, and neighbours that are
aborted. Tokens and logprobs have to be equal, bit for bit, in float32 and in bfloat16.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from models.checkpoints import prompt
from spec_decode import engines
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.kv_cache.base import KVCachePlan
from atom.model_engine.start_up import kv_memory
from atom.outputs import CompletionOutput, RequestOutput

NUM_ASKS = 14
# Seeds of plans; the first is run with every commit.
QUICK, LONG = 1, 12
PREFIXES = [prompt(n, seed=n) for n in (9, 16, 33)]
METHODS = ("none", "suffix", "eagle3")


@dataclass(frozen=True)
class Ask:
    token_ids: list[int]
    params: SamplingParams


def make_asks(count: int) -> list[Ask]:
    return [_make_ask(random.Random(f"ask {number}"), number) for number in range(count)]


def _make_ask(rng: random.Random, number: int) -> Ask:
    # Repeated text, which a lookup finds; prompts that begin alike; tiny and long ones.
    own = prompt(rng.randint(1, 6), seed=number) * rng.choice([1, 1, 5])
    token_ids = [*rng.choice([[], *PREFIXES]), *own]
    fields: dict[str, Any] = rng.choice(
        [
            {"temperature": 0.0},
            {"temperature": 0.8},
            {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
            {"temperature": 1.2, "repetition_penalty": 1.2, "presence_penalty": 0.4},
        ]
    )
    if rng.random() < 0.2:
        fields["n"] = 2
    params = SamplingParams(
        max_tokens=rng.randint(1, 26), ignore_eos=True, seed=number, logprobs=2, **fields
    )
    return Ask(token_ids, params)


def said(output: RequestOutput) -> list[Any]:
    """Tokens and logprobs of each answer."""
    return [_choice(choice) for choice in sorted(output.outputs, key=lambda each: each.index)]


def _choice(choice: CompletionOutput) -> Any:
    assert choice.logprobs is not None
    values = [{i: each.logprob for i, each in position.items()} for position in choice.logprobs]
    return list(choice.token_ids), values


class Bench:
    """A target, a draft, and what the quiet engine says."""

    def __init__(self, dtype: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self.dtype = dtype
        self.target = engines.write_target("llama", folder / "target", tokenizer)
        self.draft = engines.write_draft("mha", folder / "draft", len(tokenizer))
        self.asks = make_asks(NUM_ASKS)
        quiet = self.engine(enable_prefix_caching=False)
        self.right = [said(_alone(quiet, ask)) for ask in self.asks]

    def engine(self, method: str = "none", **options: Any) -> LLM:
        speculation: dict[str, Any] = {}
        if method != "none":
            speculation = {"method": method, "num_speculative_tokens": 3}
        if method == "eagle3":
            speculation["draft_model"] = str(self.draft)
        common = {"dtype": self.dtype, "batch_invariant": True, "num_threads": 2}
        return engines.create_engine(self.target, **{**common, **speculation, **options})


def _alone(engine: LLM, ask: Ask) -> RequestOutput:
    (output,) = engine.generate([{"prompt_token_ids": ask.token_ids}], ask.params, use_tqdm=False)
    return output


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def bench(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> Bench:
    return Bench(request.param, tmp_path_factory.mktemp("jitter"), byte_level_tokenizer)


def _delayed(call: Callable[..., Any], rng: random.Random) -> Callable[..., Any]:
    """Before and after a call the thread may sleep, while the others of the engine go on."""

    def wait(*args: Any, **kwargs: Any) -> Any:
        time.sleep(rng.choice((0, 0, 0, 0.001)))
        result = call(*args, **kwargs)
        time.sleep(rng.choice((0, 0, 0, 0.001)))
        return result

    return wait


def _run(
    engine: LLM, bench: Bench, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> dict[int, list[Any]]:
    """Each request twice among others, some of which are aborted -> what was wrong, by number."""
    core = engine.engine
    executor = core.core.executor
    monkeypatch.setattr(executor, "launch", _delayed(executor.launch, rng))
    todo = [*range(NUM_ASKS)] * 2
    rng.shuffle(todo)
    asked: dict[str, int] = {}
    aborted: set[str] = set()
    wrong: dict[int, list[Any]] = {}
    count = 0
    while todo or core.has_unfinished:
        for _ in range(rng.choice((0, 0, 1, 3))):
            if todo:
                number, name = todo.pop(), f"r{count}"
                count += 1
                ask = bench.asks[number]
                core.add_request(name, ask.token_ids, ask.params, priority=rng.randint(0, 1))
                asked[name] = number
        if rng.random() < 0.15:
            # A neighbour that leaves at any moment of its life.
            ask = rng.choice(bench.asks)
            core.add_request(f"gone{count}", ask.token_ids, ask.params)
            aborted.add(f"gone{count}")
            count += 1
        if aborted and rng.random() < 0.3:
            core.abort(aborted.pop())
        if core.has_unfinished:
            for output in core.step().outputs:
                aborted.discard(output.request_id)
                number = asked.get(output.request_id)
                if number is not None and said(output) != bench.right[number]:
                    wrong[number] = said(output)
        core.core.block_pool.check_integrity()
    assert core.core.stats.num_used_blocks == 0
    return wrong


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "seed",
    [
        seed if seed < QUICK else pytest.param(seed, marks=pytest.mark.slow)
        for seed in range(QUICK + LONG)
    ],
)
def test_every_answer_is_that_of_a_quiet_engine(
    bench: Bench, method: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{method} {seed} {bench.dtype}")
    # Room for few sequences: the longest needs 25 blocks of 4 tokens.
    num_blocks = rng.choice((32, 40, 60)) if seed else 32
    monkeypatch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(num_blocks, 0))
    engine = bench.engine(
        method,
        max_num_batched_tokens=rng.choice((17, 24, 64)),
        max_num_seqs=rng.choice((3, 8, 16)) if seed else 8,
        enable_prefix_caching=True,
        overlap=rng.random() < 0.5 if seed else method == "suffix",
        num_threads=rng.choice((1, 2)),
    )
    wrong = _run(engine, bench, rng, monkeypatch)
    assert not wrong
    stats = engine.engine.core.stats
    assert stats.prefix_cache_hits > 0
    if not seed:
        assert stats.num_preemptions > 0
