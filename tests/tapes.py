"""Tapes: what every step of tiny engines brings, so that a change of the step path can be proved.

python tests/tapes.py record FILE               # before a change, six minutes
python tests/tapes.py record OTHER              # after it
python tests/tapes.py compare FILE OTHER        # names the first step that differs in each cell

A cell is a target, what drafts, how tokens are chosen, whether steps overlap, how steps run (op by
op, recorded, in graphs that only pretend), and how many sequences there are. Its tape has a line
for each step, in the order in which results are read: the tokens, log-probabilities and drafts of
each sequence. The number of drafts is fixed, since one that adapts hangs on times.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from spec_decode.engines import PROMPTS, Folders, create_engine, params
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams, StructuredOutput
from atom.batch import LaunchedStep, ScheduledBatch, StepOutput
from atom.graphs.capture import ReexecuteBackend
from atom.model_engine.step import planned_graphs

NUM_DRAFTS = 3
METHODS = {
    "llama": ("none", "mha", "mla", "peagle", "dflash", "model", "suffix"),
    "deepseek_v3": ("none", "mha", "mla", "mtp", "peagle", "dflash", "model", "suffix"),
}
RUNS = ("op by op", "recorded", "graphs")
# Free letters, forced texts and an end.
_PATTERN = "[a-z]{3,30}: (first|second) [0-9]+"
SAMPLING = {
    "greedy": params("greedy"),
    "seeded": params("warm", logprobs=2),
    "grammar": SamplingParams(
        temperature=0.7,
        seed=1,
        max_tokens=24,
        structured_output=StructuredOutput.regex(_PATTERN),
    ),
    "penalties": params("penalties"),
}
BATCHES = (1, 3, 8)

Tape = list[str]
Tapes = dict[str, Tape]


def _line(output: StepOutput) -> str:
    """A digest, after the tokens, which say where in a text one is."""
    results = [
        [each.token_ids, repr(each.logprobs), each.draft_token_ids, each.draft_source]
        for each in output.sequences
    ]
    digest = hashlib.sha256(json.dumps(results).encode()).hexdigest()[:12]
    return f"{[each.token_ids for each in output.sequences]} {digest}"


def _listen(engine: LLM, tape: Tape) -> None:
    executor = engine.engine.core.executor
    launch = executor.launch

    def listened(batch: ScheduledBatch) -> LaunchedStep:
        step = launch(batch)

        def collect() -> StepOutput:
            output = step.collect()
            tape.append(_line(output))
            return output

        return LaunchedStep(collect, step.num_drafts, step.draft_source)

    executor.launch = listened  # type: ignore[method-assign]


def _create(patch: pytest.MonkeyPatch, target: Path, run: str, **options: Any) -> LLM:
    with patch.context() as context:
        if run == "graphs":
            context.setattr(planned_graphs, "capture_backend", lambda _: ReexecuteBackend())
        return create_engine(target, enforce_eager=run == "op by op", **options)


def record(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    methods: dict[str, Sequence[str]] | None = None,
    samplings: Sequence[str] = (*SAMPLING,),
    batches: Sequence[int] = BATCHES,
) -> Iterator[tuple[str, Tape]]:
    """The tapes of all cells, by their names.

    Args:
        folder: for checkpoints.
        methods: by target; all when left out.
    """
    patch, folders = pytest.MonkeyPatch(), Folders(folder, tokenizer)
    for kind, drafts in (methods or METHODS).items():
        for method, overlap, run in itertools.product(drafts, (False, True), RUNS):
            options: dict[str, Any] = {"overlap": overlap}
            if method != "none":
                options |= folders.speculation(method, NUM_DRAFTS) | {"speculative_adaptive": False}
            engine = _create(patch, folders(kind), run, **options)
            tape: Tape = []
            _listen(engine, tape)
            for sampling, batch in itertools.product(samplings, batches):
                prompts = list(PROMPTS[-batch:])
                engine.generate(prompts, SAMPLING[sampling], use_tqdm=False)
                yield f"{kind}, {method}, {sampling}, {overlap=}, {run}, {batch}", [*tape]
                tape.clear()
            engine.shutdown()


def differences(before: Tapes, after: Tapes) -> list[str]:
    """The first step that differs, of each cell that does."""
    found = [f"{name}: only on one side" for name in before.keys() ^ after.keys()]
    for name in before.keys() & after.keys():
        pairs = itertools.zip_longest(before[name], after[name])
        step = next((i for i, (old, new) in enumerate(pairs) if old != new), None)
        if step is not None:
            sides = [
                (tape[step : step + 1] or ["no step"])[0] for tape in (before[name], after[name])
            ]
            found.append(f"{name}: step {step}: {sides[0]} became {sides[1]}")
    return sorted(found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--samplings", nargs="+", choices=SAMPLING, default=[*SAMPLING])
    comparison = commands.add_parser("compare")
    comparison.add_argument("before", type=Path)
    comparison.add_argument("after", type=Path)
    args = parser.parse_args(argv)
    if args.command == "record":
        sys.path.append(str(Path(__file__).parents[1]))
        from conftest import create_byte_level_tokenizer

        tokenizer = create_byte_level_tokenizer()
        with tempfile.TemporaryDirectory() as folder:
            tapes = dict(record(Path(folder), tokenizer, samplings=args.samplings))
        args.file.write_text(json.dumps(tapes, indent=0), encoding="utf-8")
        print(f"{len(tapes)} cells, {sum(map(len, tapes.values()))} steps")
        return 0
    before, after = (
        json.loads(path.read_text(encoding="utf-8")) for path in (args.before, args.after)
    )
    found = differences(before, after)
    print("\n".join([*found[:40], f"{len(found)} of {len(before)} cells differ"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
