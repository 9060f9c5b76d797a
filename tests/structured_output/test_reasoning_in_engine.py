"""Reasoning, then a document, with drafts: in every format, with every method.

Each request is made to think, or not, as models of its format do: a logits processor says the
thoughts and their markers, and the model draws what follows.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from spec_decode import engines
from spec_decode.engines import create_engine
from transformers import PreTrainedTokenizerFast

from atom import LLM, RequestOutput, SamplingParams, StructuredOutput
from atom.entrypoints.parsing.reasoning import REASONING_PARSERS
from atom.entrypoints.parsing.reasoning.formats import Channels, ReasoningFormat, ThinkTags
from atom.model_engine import compiled_grammars
from atom.structured_output.trials.messages import TrialLimits

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "color": {"enum": ["red", "green", "日本"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["ok", "color", "n"],
    "additionalProperties": False,
}
DOCUMENT = StructuredOutput.json_schema(SCHEMA)
# What looks like a marker, an end or the document, and parts of characters.
THOUGHTS = 'x </thin <</ {"ok": 日本\n\n} 😀<'
MAX_TOKENS = 130
CONTEXT = 256
LONG = {"max_position_embeddings": CONTEXT}
KS = (1, 3, 7)
DRAFTS = ("mha", "mla", "peagle", *engines.BLOCK_DRAFTS, "suffix", "model", "mtp")
TARGETS = {"mtp": "deepseek_v3"}
MARKERS = ("tokens", "texts")


@dataclass(frozen=True)
class Case:
    """`said` is what the answer is made to begin with."""

    name: str
    wanted: StructuredOutput
    said: str = ""


def _cases(name: str, format: ReasoningFormat) -> Iterator[Case]:
    """An answer without thoughts, one that thinks of its own accord, and one that must."""
    wanted = format.in_channel(DOCUMENT)
    opens = format.own_tags_after("hi")
    if isinstance(format, Channels):
        yield Case(f"{name}: no thoughts", wanted)
        thought = f"<|channel|>analysis<|message|>{THOUGHTS}<|end|><|start|>assistant"
        yield Case(f"{name}: thoughts", wanted, thought)
    elif opens is None:
        yield Case(f"{name}: no thoughts", wanted)
    else:
        begin, end = opens
        own = msgspec.structs.replace(wanted, starts_after=end, opens_with=begin)
        yield Case(f"{name}: no thoughts", own)
        yield Case(f"{name}: thoughts", own, f"{begin}{THOUGHTS}{end}")
        yield Case(f"{name}: empty thoughts", own, f"{begin}{end}\n\n")
    if isinstance(format, ThinkTags):
        end = format.end_after(f"hi{format.open}") or ""
        begun = msgspec.structs.replace(wanted, starts_after=end)
        yield Case(f"{name}: in thoughts", begun, f"{THOUGHTS}{end}")


FORMATS = {format: name for name, format in reversed(REASONING_PARSERS.items())}
CASES = [case for format, name in FORMATS.items() for case in _cases(name, format)]


class Untried:
    """Says of every grammar that it compiles in no time."""

    limits = TrialLimits()

    def start(self) -> None: ...

    def submit(self, *_: Any) -> Future[float]:
        future: Future[float] = Future()
        future.set_result(0.0)
        return future

    def shutdown(self) -> None: ...


class Speaker:
    """Says the given tokens first."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids

    def __call__(self, outputs: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(outputs) < len(self._token_ids):
            logits[self._token_ids[len(outputs)]] += 1000
        return logits


class Bench:
    """Checkpoints whose markers are single tokens, or texts of several, and what they say."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        marked = copy.deepcopy(tokenizer)
        markers = [m for f in REASONING_PARSERS.values() for m in (*f.markers, *f.special_tokens)]
        marked.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(markers))})
        self._tokenizers = {"tokens": marked, "texts": tokenizer}
        drafts = (*engines.EAGLE_DRAFTS, *engines.BLOCK_DRAFTS)
        fields = dict.fromkeys(("llama", "deepseek_v3", "model"), LONG)
        self._folders = {}
        for markers, own in self._tokenizers.items():
            sizes = {**LONG, "draft_vocab_size": len(own) - 8}
            self._folders[markers] = engines.Folders(
                folder / markers, own, {**fields, **dict.fromkeys(drafts, sizes)}
            )
        self.expected = cache(self._expected)

    def engine(self, markers: str, target: str, draft: str | None = None, k: int = 0) -> LLM:
        folders = self._folders[markers]
        options = {} if draft is None else folders.speculation(draft, k)
        return create_engine(folders(target), max_model_len=CONTEXT, **options)

    def answers(self, engine: LLM, markers: str) -> list[RequestOutput]:
        encode = self._tokenizers[markers].encode
        sampled = [
            SamplingParams(
                seed=i,
                max_tokens=MAX_TOKENS,
                structured_output=case.wanted,
                skip_special_tokens=False,
                logits_processors=[Speaker(encode(case.said, add_special_tokens=False))],
            )
            for i, case in enumerate(CASES)
        ]
        prompts = [engines.PROMPTS[i % 8] for i in range(len(CASES))]
        return engine.generate(prompts, sampled, use_tqdm=False)

    def _expected(self, markers: str, target: str) -> list[list[int]]:
        engine = self.engine(markers, target)
        outputs = self.answers(engine, markers)
        grammars = engine.engine.core.executor.grammars
        ended = 0
        for case, output in zip(CASES, outputs, strict=True):
            answer = output.outputs[0]
            assert answer.text.startswith(case.said), (case.name, answer.text)
            matcher = grammars.get(case.wanted).create_matcher()
            assert all(matcher.accept(t) for t in answer.token_ids), (case.name, answer.text)
            if answer.finish_reason == "stop":
                ended += 1
                check_document(case, answer.text)
        assert ended > len(CASES) / 2
        return [output.outputs[0].token_ids for output in outputs]


def check_document(case: Case, text: str) -> None:
    """What stands behind the thoughts is a document of the schema, and nothing but markers else."""
    rest = text.removeprefix(case.said)
    if not case.said and case.wanted.opens_with and text.startswith(case.wanted.opens_with):
        rest = text.partition(case.wanted.starts_after or "")[2]
    document = json.loads(rest[rest.index("{") : rest.rindex("}") + 1])
    assert list(document) == ["ok", "color", "n"], case.name
    assert document["color"] in ("red", "green", "日本")
    assert 0 <= document["n"] <= 99


@pytest.fixture(scope="module")
def bench(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_grammars, "TrialProcess", Untried)
        yield Bench(tmp_path_factory.mktemp("reasoning"), byte_level_tokenizer)


GRID = list(itertools.product(MARKERS, DRAFTS, KS))
# Each draft but a second DFlash. Long are those of blocks and lookups, which cost least.
LENGTHS = {"mha": 3, "mla": 1, "peagle": 7, "dflash": 7, "dspark": 3, "suffix": 7, "model": 1}
EACH_COMMIT = {("texts", draft, k) for draft, k in {**LENGTHS, "mtp": 3}.items()}
EACH_COMMIT.add(("tokens", "mha", 1))


@pytest.mark.parametrize(
    ("markers", "draft", "k"),
    [pytest.param(*each, marks=[] if each in EACH_COMMIT else [pytest.mark.slow]) for each in GRID],
)
def test_thoughts_before_a_document(bench: Bench, markers: str, draft: str, k: int) -> None:
    target = TARGETS.get(draft, "llama")
    engine = bench.engine(markers, target, draft, k)
    outputs = bench.answers(engine, markers)
    assert [o.outputs[0].token_ids for o in outputs] == bench.expected(markers, target)
    stats = engine.engine.core.stats.spec_decode
    assert stats is not None
    assert stats.by_source["grammar"].num_accepted_tokens > 100
