"""Grammar libraries side by side: what they enforce of JSON schemas, and what that takes.

python benchmarks/grammar_libraries.py
python benchmarks/grammar_libraries.py --arms atom llguidance xgrammar

`atom` is what the engine uses, with all that stands around its library; the others are libraries
without it, each with its defaults, if they are installed. All run in one process, on one thread:

- the JSON-Schema-Test-Suite, schema by schema: enforced rightly (all documents), narrower (some
  valid ones cannot be written), wrongly (an invalid one can), or refused, with a message that names
  what it is about or without;
- compiling those of its schemas that are taken, and twenty of applications;
- masks along documents of the twenty, and four rows each of eight texts, as a step with three
  drafts needs them, with the embedded model's tokens and with 163,840, most of which are made up;
- which tokens of the documents are told as the only ones that may follow;
- one of a hundred tools, forced: 300 KB, each with sixteen parameters of its own names.

Three numbers are the median, the 99th percentile and the largest.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from _grammar_arms import INSTALL_HINTS, Arm, Steps, create_arm
from _json_schemas import REQUESTS
from transformers import PreTrainedTokenizerBase

from atom.bench.report import environment, environment_markdown, markdown_table, write_json
from atom.config import ModelOptions
from atom.model_loader.source import resolve_model
from atom.model_loader.tokenizers.tokenizer import load_tokenizer
from atom.structured_output.base import TokenMask
from atom.structured_output.vocabulary import Vocabulary, read_vocabulary

SUITE = Path(__file__).parents[1] / "tests/structured_output/suite/draft2020_12.json"
LARGE_VOCABULARY = 163_840
BATCH, DRAFTS = 8, 3
_DOCUMENTS = 5  # of each schema
_WORDS = "the quick brown fox jumps over 13 lazy dogs in Málaga while engineers design a record"

Table = dict[str, dict[str, str]]


def outcome(arm: Arm, encode: Callable[[str], list[int]], case: Any, mask: TokenMask) -> str:
    """What becomes of one schema of the suite."""
    _, schema, documents = case
    try:
        begin = arm.compile(schema)
    except ValueError as error:
        words = set(re.findall(r"[$\w]+", str(error)))
        return "refused by name" if words & set(_keywords(schema)) else "refused"
    is_narrow = False
    for document, is_valid in documents:
        try:
            token_ids = encode(json.dumps(document, ensure_ascii=False))
        except UnicodeEncodeError:
            continue
        taken = _takes(begin(), token_ids, mask)
        if taken and not is_valid:
            return "wrong"
        is_narrow |= is_valid and not taken
    return "narrower" if is_narrow else "right"


def _keywords(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from part
        part = list(part.values())
    for child in part if isinstance(part, list) else ():
        yield from _keywords(child)


def _takes(steps: Steps, token_ids: list[int], mask: TokenMask) -> bool:
    if not all(steps.accept(token_id) for token_id in token_ids):
        return False
    steps.fill(mask, 0)
    return bool(mask[0, 0] & 1)  # the embedded model's first end token is number 0


def example(schema: dict[str, Any], rng: random.Random) -> Any:
    """A document under one of the twenty schemas."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return example(rng.choice(schema["anyOf"]), rng)
    match schema["type"]:
        case "string":
            words = " ".join(rng.choices(_WORDS.split(), k=rng.randint(1, 12)))
            return words[: schema.get("maxLength", 200)]
        case "integer":
            return rng.randint(schema["minimum"], schema["maximum"])
        case "number":
            return round(rng.random() * 100, 2)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case "array":
            count = rng.randint(1, schema["maxItems"])
            return [example(schema["items"], rng) for _ in range(count)]
    return {name: example(part, rng) for name, part in schema["properties"].items()}


def grown(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """With made-up words, of the sizes that large vocabularies have."""
    rng, tokens = random.Random(1), list(vocabulary.tokens)
    words = [token for token in tokens if token.decode(errors="replace").strip().isalpha()]
    ends = [word for word in words if not word.startswith(b" ")]
    known = set(tokens)
    while len(tokens) < size:
        word = rng.choice(words) + rng.choice(ends)
        if word not in known:
            known.add(word)
            tokens.append(word)
    return msgspec.structs.replace(vocabulary, tokens=tokens)


def times(values: Sequence[float], scale: float) -> str:
    found = (np.median(values), np.percentile(values, 99), max(values))
    return " / ".join(f"{value * scale:.3g}" for value in found)


def measure_compiling(arm: Arm, schemas: Sequence[Any]) -> list[float]:
    """Seconds until the first mask could be asked for, of the schemas that are taken."""
    seconds = []
    for schema in schemas:
        start = time.perf_counter()
        try:
            arm.compile(schema)()
        except ValueError:
            continue
        seconds.append(time.perf_counter() - start)
    return seconds


def measure_masks(arm: Arm, texts: Sequence[tuple[Any, list[list[int]]]], mask: TokenMask) -> Any:
    """Seconds of each mask, and of each step of a batch: its rows, and accepting its tokens."""
    masks: list[float] = []
    steps: list[float] = []
    for schema, documents in texts:
        begin = arm.compile(schema)
        for document in documents:
            position = begin()
            for token_id in document:
                start = time.perf_counter()
                position.fill(mask, 0)
                masks.append(time.perf_counter() - start)
                if not position.accept(token_id):
                    raise SystemExit(f"error: a document of {schema} cannot be written")
        steps += _batch_steps(begin, documents, mask)
    return masks, steps


def _batch_steps(begin: Any, documents: list[list[int]], mask: TokenMask) -> Iterator[float]:
    rows = [(begin(), documents[i % len(documents)]) for i in range(BATCH)]
    shortest = min(len(document) for document in documents)
    for at in range(0, shortest - DRAFTS, DRAFTS + 1):
        start = time.perf_counter()
        for position, document in rows:
            for token_id in document[at : at + DRAFTS]:
                position.fill(mask, 0)
                position.accept(token_id)
            position.fill(mask, 0)
            position.rollback(DRAFTS)
            for token_id in document[at : at + DRAFTS + 1]:
                position.accept(token_id)
        yield time.perf_counter() - start


def share_forced(arm: Arm, texts: Sequence[tuple[Any, list[list[int]]]], tokens: Any) -> float:
    """The share of tokens that lie in the text of which the library says that it must follow."""
    forced = total = 0
    for schema, documents in texts:
        begin = arm.compile(schema)
        for document in documents:
            position, text = begin(), b""
            for token_id in document:
                text = text or position.forced_text()
                forced += bool(tokens[token_id]) and text.startswith(tokens[token_id])
                text = text[len(tokens[token_id]) :] if text.startswith(tokens[token_id]) else b""
                position.accept(token_id)
            total += len(document)
    return forced / total


def many_tools() -> list[dict[str, Any]]:
    """A hundred, of 300 KB as JSON."""
    described = {"type": "string", "description": "what this field of the call is for " * 4}
    tools = []
    for i in range(100):
        fields = {f"field_{i}_{j}": described for j in range(16)}
        parameters = {"type": "object", "properties": fields, "required": [f"field_{i}_0"]}
        function = {"name": f"tool_{i}", "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=["atom", *INSTALL_HINTS], default=["atom"])
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args(argv)
    options = ModelOptions()
    source = resolve_model(options)
    tokenizer = load_tokenizer(source, options)
    size = source.hf_config.get_text_config().vocab_size
    vocabulary = read_vocabulary(tokenizer, size, source.eos_token_ids)
    table: Table = {name: {} for name in args.arms}
    for tokens in (vocabulary, grown(vocabulary, LARGE_VOCABULARY)):
        for name in args.arms:
            arm = create_arm(name, tokens, tokenizer)
            table[name] |= _measure(arm, tokenizer, tokens, tokens is vocabulary)
    rows = list(dict.fromkeys(row for arm in table.values() for row in arm))
    body = [[row, *(table[name].get(row, "") for name in args.arms)] for row in rows]
    facts = environment()
    print(environment_markdown(facts), end="\n\n")
    print(markdown_table(["", *args.arms], body))
    write_json(args.output_json, {"environment": facts, "table": table})
    return 0


def _measure(
    arm: Arm, tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary, is_first: bool
) -> dict[str, str]:
    def encode(text: str) -> list[int]:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    mask = np.zeros((1, -(-len(vocabulary.tokens) // 32)), dtype=np.int32)
    rng = random.Random(1)
    texts = [
        (
            schema,
            [
                encode(json.dumps(example(schema, rng), ensure_ascii=False))
                for _ in range(_DOCUMENTS)
            ],
        )
        for _, schema in REQUESTS
    ]
    suffix = f", {len(vocabulary.tokens):,} tokens"
    found: dict[str, str] = {}
    apps = measure_compiling(arm, [schema for schema, _ in texts])
    found[f"compile, 20 of applications{suffix}"] = times(apps, 1e3) + " ms"
    if is_first:
        cases = [case for cases in json.loads(SUITE.read_text()).values() for case in cases]
        seconds = measure_compiling(arm, [schema for _, schema, _ in cases])
        found[f"compile, suite{suffix}"] = times(seconds, 1e3) + " ms"
        counts = Counter(outcome(arm, encode, case, mask) for case in cases)
        for kind in ("right", "narrower", "wrong", "refused by name", "refused"):
            found[f"suite: {kind}"] = f"{counts[kind]} of {len(cases)}"
    masks, steps = measure_masks(arm, texts, mask)
    found[f"mask{suffix}"] = times(masks, 1e6) + " us"
    found[f"mean mask{suffix}"] = f"{np.mean(masks) * 1e6:.3g} us"
    found[f"step of {BATCH} texts with {DRAFTS} drafts{suffix}"] = times(steps, 1e6) + " us"
    found[f"the same, mean{suffix}"] = f"{np.mean(steps) * 1e6:.3g} us"
    if is_first:
        found["tokens told as forced"] = f"{share_forced(arm, texts, vocabulary.tokens):.1%}"
    start = time.perf_counter()
    arm.compile_tools(many_tools())()
    found[f"compile, 100 tools{suffix}"] = f"{(time.perf_counter() - start) * 1e3:.3g} ms"
    return found


if __name__ == "__main__":
    raise SystemExit(main())
