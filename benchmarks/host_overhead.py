"""Host time of a step: scheduling, input, sampling metadata and results, around a null model.

    python benchmarks/host_overhead.py --sequences 1 64 256 --drafts 0 3 --context 8192

The model, the choice of tokens and the draft cost nothing here: what is left is what the host
does before and after the device works. Each figure is the median of decode steps in which every
sequence takes part; with one penalised request the work on that request's logits is included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from atom.batch import LaunchedStep, Lookahead, ScheduledBatch
from atom.bench.report import environment, write_json
from atom.kv_cache.block_tables import BlockTables
from atom.messages import EngineLimits, EngineRequest
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.model_runner import ModelRunner
from atom.model_engine.step.carried import CarriedRows
from atom.model_engine.step.input_builder import InputBuilder
from atom.model_engine.step.step_runner import StepRunner
from atom.model_ops.attention.metadata import ModelInput, ModelOutput, SamplingMetadata
from atom.sampling.ops import SamplingOps
from atom.sampling.rows import SamplingRows
from atom.sampling.sampler import Sampler
from atom.sampling_params import SamplingParams
from atom.spec_decode.drafter import Drafter
from atom.spec_decode.proposers.base import NullProposer, Proposal, VerifiedStep
from atom.spec_decode.suffix_lookup import SuffixLookup
from atom.structured_output.cache import GrammarCache

VOCAB_SIZE = 129_280
BLOCK_SIZE = 16
CPU = torch.device("cpu")
# Output tokens that every sequence has room for.
ROOM = 4096
TOKEN = 7
WARMUP_STEPS = 4

WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "sampled, one penalised": {"temperature": 0.8},
}


class NullModel:
    """Hidden states and logits of zeros, made once."""

    def __init__(self, num_rows: int, num_tokens: int, vocab_size: int) -> None:
        self._hidden = torch.zeros(num_tokens, 8)
        self._logits = torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16)

    def forward(self, model_input: ModelInput) -> ModelOutput:
        return ModelOutput(self._hidden[: model_input.input_ids.shape[0]])

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._logits[: hidden_states.shape[0]]


class RightProposer(NullProposer):
    """Reads every step as a draft does, and always drafts what will be sampled."""

    reads_steps = True

    def propose(self, step: VerifiedStep, num_drafts: int) -> Proposal:
        shape = len(step.last_rows), num_drafts
        return Proposal(step.next_token_ids.new_full(shape, TOKEN))


class NoGrammars:
    """Nobody asks for one."""

    def submit(self, wanted: object) -> NoReturn:
        raise RuntimeError("there are no grammars here")

    def shutdown(self) -> None:
        pass


class NullExecutor:
    """The engine's own runner around a null model.

    Args:
        depth: with 2, steps overlap.
        vocab_size: tokens that the null model tells apart.
        proposer: in place of one that is always right.
        lookup: in place of a proposer.
        choose: the op `choose_tokens`.
    """

    can_be_interrupted = True
    max_idle_ms: int | None = None

    def __init__(
        self,
        num_seqs: int,
        num_drafts: int,
        context: int,
        depth: int = 1,
        vocab_size: int = VOCAB_SIZE,
        *,
        proposer: NullProposer | None = None,
        lookup: SuffixLookup | None = None,
        choose: Callable[[torch.Tensor, SamplingMetadata], torch.Tensor] | None = None,
    ) -> None:
        self.depth = depth
        longest = context + ROOM
        self.limits = EngineLimits(
            max_model_len=longest,
            num_blocks=num_seqs * (longest // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            vocab_size=vocab_size,
            max_logprobs=20,
        )
        self.eos_token_ids = frozenset([2])
        self.lookahead = Lookahead(num_drafts)
        self.grammars = GrammarCache(NoGrammars())
        model = NullModel(num_seqs * (num_drafts + 1), num_seqs * context, vocab_size)
        if proposer is None:
            right = num_drafts and lookup is None
            proposer = (RightProposer if right else NullProposer)(self.lookahead)
        rows = SamplingRows(num_seqs, vocab_size, self.eos_token_ids, CPU, self.grammars)
        sampler = Sampler(
            model.compute_logits, rows, vocab_size, CPU, SamplingOps(choose or _choose)
        )
        carried = CarriedRows(num_seqs, num_drafts, CPU) if depth > 1 else None
        inputs = InputBuilder(
            sampler,
            BlockTables(num_seqs, -(-longest // BLOCK_SIZE), CPU),
            max_num_tokens=num_seqs * context,
            block_size=BLOCK_SIZE,
            drafts=proposer.reads_steps,
            carried=carried,
        )
        is_ahead = depth > 1
        drafter = Drafter(
            proposer, "null", lookup, None, sync_is_free=not is_ahead, is_ahead=is_ahead
        )
        steps = StepRunner(model.forward, sampler, proposer)
        self._runner = ModelRunner(inputs, steps, sampler, drafter)

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        return self._runner.launch(batch)

    def shutdown(self) -> None:
        self.grammars.shutdown()


def _choose(scores: torch.Tensor, _: SamplingMetadata) -> torch.Tensor:
    return torch.full((scores.shape[0],), TOKEN)


def milliseconds(num_seqs: int, num_drafts: int, context: int, wish: str, steps: int) -> float:
    """Median of a decode step of all sequences."""
    config = engine_config(
        enable_prefix_caching=False,
        max_num_batched_tokens=num_seqs * context,
        max_num_seqs=num_seqs,
    )
    core = EngineCore(config, NullExecutor(num_seqs, num_drafts, context))
    for i in range(num_seqs):
        penalty = 1.1 if "penalised" in wish and i == 0 else 1.0
        params = SamplingParams(
            max_tokens=ROOM - 8, ignore_eos=True, repetition_penalty=penalty, **WISHES[wish]
        )
        prompt = [5] * (context - 1)
        core.add_request(EngineRequest(id=str(i), prompt_token_ids=prompt, params=params, seed=i))
    for _ in range(WARMUP_STEPS):
        core.step()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        report = core.step()
        seconds.append(time.perf_counter() - started)
        if sum(len(o.token_ids) for o in report.outputs) != num_seqs * (num_drafts + 1):
            raise RuntimeError("not every sequence took part in the step")
    core.shutdown()
    return statistics.median(seconds) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--context", type=int, default=8192, help="tokens of each sequence")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, help="write the figures as JSON here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for num_seqs in args.sequences:
        for num_drafts in args.drafts:
            row: dict[str, Any] = {"sequences": num_seqs, "drafts": num_drafts}
            for wish in WISHES:
                row[wish] = milliseconds(num_seqs, num_drafts, args.context, wish, args.steps)
            rows.append(row)
            times = ", ".join(f"{wish} {row[wish]:.2f} ms" for wish in WISHES)
            print(f"{num_seqs} sequences, {num_drafts} drafts: {times}", flush=True)
    write_json(args.output, {**environment(), "context": args.context, "milliseconds": rows})


if __name__ == "__main__":
    main()
