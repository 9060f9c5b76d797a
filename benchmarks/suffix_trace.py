"""Tokens per forward of the suffix lookup on an agent's requests, without a model.

python benchmarks/suffix_trace.py
python benchmarks/suffix_trace.py --suffix-cache-tokens 0 --num-requests 200
python benchmarks/suffix_trace.py --num-requests 40 --write-prompts trace.jsonl

The target is simulated: it says what the trace says, so that a draft is accepted when it is the
trace's next token. That is what a real target does with its own text; the trace is made up. A
forward yields the accepted drafts and one token more, and every forward counts, those without
drafts included. The n-gram scan is what the suffix lookup replaced: what followed the latest of the
longest matches. Memory is that of all indexes, token ids included, when they hold the most tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from _agent_trace import Step, agent_trace
from tqdm import tqdm

from atom.batch import NewSequence
from atom.bench.report import environment, markdown_table, write_json, write_text
from atom.config import ModelOptions
from atom.model_loader.source import resolve_model
from atom.model_loader.tokenizers.tokenizer import load_tokenizer
from atom.sampling_params import SamplingParams
from atom.spec_decode.suffix_lookup import RecentOutputs, SuffixLookup

# Requests that run at the same time: an output is a recent one only for later ones.
_AT_ONCE = 8
# Memory is measured again once there are so many times as many tokens: it takes a second.
_GROWTH = 1.01


class NgramScan:
    """What followed the latest of the longest matches of at most `longest` tokens.

    Args:
        most, least: drafts.
    """

    def __init__(self, most: int, least: int, longest: int, shortest: int) -> None:
        self._most, self._least, self._longest, self._shortest = most, least, longest, shortest
        self._ends: dict[int, dict[tuple[int, ...], int]] = {}
        self._seen: dict[int, int] = {}

    def start(self, row: int) -> None:
        self._ends[row] = {}
        self._seen[row] = 1

    def find(self, row: int, prompt: list[int], output: list[int]) -> list[int]:
        ends, tokens = self._ends[row], prompt + output
        for end in range(self._seen[row], len(tokens) - self._least + 1):
            for size in range(self._shortest, min(self._longest, end) + 1):
                ends[tuple(tokens[end - size : end])] = end
        self._seen[row] = max(len(tokens) - self._least + 1, self._seen[row])
        for size in range(self._longest, self._shortest - 1, -1):
            if (run := tuple(tokens[-size:])) in ends:
                return tokens[ends[run] : ends[run] + self._most]
        return []

    def end(self, row: int) -> None:
        del self._ends[row], self._seen[row]

    @property
    def num_tokens(self) -> int:
        return sum(self._seen.values())


class Suffixes:
    """The engine's lookup."""

    def __init__(self, most: int, cache_tokens: int) -> None:
        recent = RecentOutputs(cache_tokens) if cache_tokens else None
        self.lookup = SuffixLookup("suffix", most, recent)

    def start(self, row: int) -> None:
        self.lookup.start([NewSequence(str(row), row, [], [], SamplingParams(), 0)])

    def find(self, row: int, prompt: list[int], output: list[int]) -> list[int]:
        return self.lookup.find(row, prompt, output).token_ids

    def end(self, row: int) -> None:
        self.lookup.forget([row])

    @property
    def num_tokens(self) -> int:
        return self.lookup.num_tokens


Drafts = NgramScan | Suffixes


@dataclass
class Result:
    """Attributes:
    seconds: processor time of the lookup, with prompts and new tokens to index.
    peak_tokens, peak_bytes: in the indexes, when they held the most.
    """

    name: str
    num_tokens: int = 0
    num_forwards: int = 0
    num_drafts: int = 0
    seconds: float = 0.0
    peak_tokens: int = 0
    peak_bytes: int = 0

    @property
    def tokens_per_forward(self) -> float:
        return self.num_tokens / self.num_forwards


def replay(name: str, drafts: Drafts, trace: Sequence[tuple[list[int], list[int]]]) -> Result:
    """Run all requests; the first token of each comes from its prompt's forward."""
    result = Result(name)
    for first in tqdm(range(0, len(trace), _AT_ONCE), desc=name, disable=not sys.stderr.isatty()):
        batch = trace[first : first + _AT_ONCE]
        for row, (prompt, output) in enumerate(batch):
            drafts.start(row)
            done = 1
            while done < len(output):
                started = time.thread_time()
                found = drafts.find(row, prompt, output[:done])
                result.seconds += time.thread_time() - started
                accepted = 0
                for draft, token in zip(found, output[done:-1], strict=False):
                    if draft != token:
                        break
                    accepted += 1
                done += accepted + 1
                result.num_tokens += accepted + 1
                result.num_forwards += 1
                result.num_drafts += len(found)
        if drafts.num_tokens > _GROWTH * result.peak_tokens:
            result.peak_tokens, result.peak_bytes = drafts.num_tokens, held_bytes(drafts)
        for row in range(len(batch)):
            drafts.end(row)
    return result


def held_bytes(root: object) -> int:
    """Memory of an object and of all that it holds, each once."""
    seen: set[int] = set()
    total, waiting = 0, [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        if isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, deque)):
            waiting += each
        elif hasattr(each, "__dict__"):
            waiting.append(vars(each))
    return total


def arms(cache_tokens: int) -> dict[str, Callable[[], Drafts]]:
    found: dict[str, Callable[[], Drafts]] = {
        "n-gram scan, 3 drafts": lambda: NgramScan(3, 3, 4, 2),
        "n-gram scan, up to 15 drafts": lambda: NgramScan(15, 1, 4, 1),
        "suffix lookup, own text": lambda: Suffixes(15, 0),
    }
    if cache_tokens:
        found["suffix lookup, recent outputs"] = lambda: Suffixes(15, cache_tokens)
    return found


def tokenize(steps: Sequence[Step]) -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs as the embedded model's tokens."""
    options = ModelOptions()
    tokenizer = load_tokenizer(resolve_model(options), options)
    encode = tokenizer.encode
    return [(encode(step.prompt), encode(step.output)) for step in steps]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--num-requests", type=int, default=1000, help="(default: 1000)")
    add("--seed", type=int, default=0, help="of the trace (default: 0)")
    add("--suffix-cache-tokens", type=int, default=100_000, help="(default: 100000)")
    add("--write-prompts", type=Path, help="write the prompts as JSONL and end")
    add("--output-json", type=Path, help="report file")
    args = parser.parse_args(argv)
    steps = agent_trace(args.num_requests, args.seed)
    if args.write_prompts is not None:
        lines = (json.dumps({"prompt": step.prompt}) for step in steps)
        write_text(args.write_prompts, "\n".join(lines) + "\n")
        return 0
    trace = tokenize(steps)
    results = [
        replay(name, create(), trace) for name, create in arms(args.suffix_cache_tokens).items()
    ]
    base = results[0].tokens_per_forward
    print(
        markdown_table(
            (
                *("drafts", "tokens per forward", "ratio", "drafts per forward", "us per forward"),
                *("MB at the peak", "bytes per token"),
            ),
            [
                (
                    r.name,
                    f"{r.tokens_per_forward:.2f}",
                    f"{r.tokens_per_forward / base:.2f}",
                    f"{r.num_drafts / r.num_forwards:.1f}",
                    f"{1e6 * r.seconds / r.num_forwards:.0f}",
                    f"{r.peak_bytes / 1e6:.1f}",
                    f"{r.peak_bytes / r.peak_tokens:.0f}",
                )
                for r in results
            ],
        )
    )
    report = [{**vars(r), "tokens_per_forward": r.tokens_per_forward} for r in results]
    write_json(args.output_json, {"environment": environment(), "results": report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
