"""How many tool calls are valid: by format, and by what is enforced.

python benchmarks/tool_validity.py
python benchmarks/tool_validity.py --requests 40 --formats hermes kimi_k2

Requests with tools are made from seeds (`_tool_requests.py`). A call is valid if it names one of
the request's tools, its arguments are an object that obeys that tool's schema by the `jsonschema`
package, and the parser reads it as complete. Two write the answers:

- the embedded model, in its format, where nothing is enforced (`off`), names (`names`), schemas
  (`schemas`) or a call with its schema (`forced`, tool_choice `required`);
- chance, in every format: tokens are drawn from what the grammar allows, and nothing else decides.
  It begins where a call has opened, since free text is the model's own, and prefers what ends
  strings and objects. So its column says what a grammar guarantees, whatever the model is.

Calls in which the text ended, after `--max-tokens`, are counted apart.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _tool_requests import ToolRequest, tool_request
from jsonschema import Draft202012Validator
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.bench.report import environment, environment_markdown, markdown_table, write_json
from atom.entrypoints.parsing.output_parser import ChatOutputParser
from atom.entrypoints.parsing.tool_grammar import tool_call_grammar
from atom.entrypoints.parsing.tool_parsers import TOOL_PARSERS
from atom.structured_output.base import Matcher
from atom.structured_output.params import StructuredOutput
from atom.structured_output.vocabulary import read_vocabulary
from atom.structured_output.xgrammar_backend import XGrammarBackend

STRICTNESS = ("off", "names", "schemas", "forced")
_FORMAT = "hermes"
_END = "<|end|>"
# What chance prefers, with this probability: it ends strings, lists, objects and numbers.
_ENDS, _PREFERENCE = ('"', "}", "]", ","), 0.5
# Of the tags of formats in which parameters stand in them, which are no markers.
_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

_K3_OPENING = "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
_K3_OPENING += '<|open|>call tool="'

Counts = Counter[str]


def grammar_of(format_name: str, request: ToolRequest, strictness: str) -> StructuredOutput | None:
    """What is enforced of an answer; None if nothing is."""
    choice = "required" if strictness == "forced" else "auto"
    level = "off" if strictness == "forced" else strictness
    return tool_call_grammar(format_name, request.tools, choice, strictness=level)


def judge(format_name: str, request: ToolRequest, text: str, reason: str) -> Counts:
    """The calls of an answer by their kinds: `valid`, `cut`, or what is wrong with them."""
    parser = ChatOutputParser(format_name, None, request.tools, False)
    message = parser.parse_complete(text, reason)
    parser.feed(text)
    parser.finish(reason)
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters") for tool in request.tools
    }
    counts: Counts = Counter(calls=len(message.tool_calls))
    for index, call in enumerate(message.tool_calls):
        if index == parser.incomplete_call:
            counts["cut"] += 1
        else:
            counts[_kind(schemas, call.function.name, call.function.arguments)] += 1
    return counts


def _kind(schemas: dict[str, Any], name: str, arguments: str) -> str:
    if name not in schemas:
        return "name"
    try:
        document = json.loads(arguments)
    except ValueError:
        return "json"
    schema = schemas[name]
    if not isinstance(document, dict):
        return "schema"
    return (
        "valid" if schema is None or Draft202012Validator(schema).is_valid(document) else "schema"
    )


class Chance:
    """Draws tokens from what grammars allow, with a vocabulary of bytes and markers."""

    def __init__(self, max_tokens: int) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        inner = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=_END)
        formats = TOOL_PARSERS.values()
        markers = {m for f in formats for m in f.special_tokens or f.markers} | {*_TAGS}
        self._tokenizer.add_tokens([AddedToken(m, special=True) for m in sorted(markers)])
        self._end = self._tokenizer.eos_token_id
        size = len(self._tokenizer)
        self._backend = XGrammarBackend(read_vocabulary(self._tokenizer, size, [self._end]))
        self._mask = np.full((1, -(-size // 32)), -1, dtype=np.int32)
        self._size, self._max_tokens = size, max_tokens
        self._openings: dict[str, list[int]] = {}
        self._ends = {self._tokenizer.convert_tokens_to_ids(end) for end in _ENDS}

    def write(
        self, format_name: str, request: ToolRequest, strictness: str, rng: random.Random
    ) -> tuple[str, str]:
        """An answer and why it ended."""
        wanted = grammar_of(format_name, request, strictness)
        assert wanted is not None
        token_ids = self._opening(format_name)
        matcher = self._backend.compile(wanted).create_matcher()
        for token_id in token_ids:
            assert matcher.accept(token_id), "a forced call's beginning begins one here, too"
        reason = "length"
        while len(token_ids) < self._max_tokens:
            allowed = self._allowed(matcher)
            if self._end in allowed and (len(allowed) == 1 or rng.random() < _PREFERENCE):
                reason = "stop"
                break
            ends = [token_id for token_id in allowed if token_id in self._ends]
            preferred = ends if ends and rng.random() < _PREFERENCE else allowed
            token_ids.append(rng.choice([i for i in preferred if i != self._end]))
            assert matcher.accept(token_ids[-1])
        return self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False), reason

    def _opening(self, format_name: str) -> list[int]:
        """The tokens with which every call begins, up to the name."""
        if format_name == "kimi_k3":  # an answer may begin otherwise, too
            return list(self._tokenizer.encode(_K3_OPENING, add_special_tokens=False))
        if format_name not in self._openings:
            tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
            wanted = grammar_of(format_name, ToolRequest(tools, "", 1), "forced")
            assert wanted is not None
            matcher = self._backend.compile(wanted).create_matcher()
            token_ids: list[int] = []
            while len(allowed := self._allowed(matcher)) == 1:
                token_ids += allowed
                matcher.accept(allowed[0])
            self._openings[format_name] = token_ids
        return [*self._openings[format_name]]

    def _allowed(self, matcher: Matcher) -> list[int]:
        matcher.fill(self._mask, 0)
        bits = np.unpackbits(self._mask[0].view(np.uint8), bitorder="little")[: self._size]
        return [int(i) for i in np.flatnonzero(bits)]


def by_chance(formats: Sequence[str], num_requests: int, max_tokens: int) -> list[dict[str, Any]]:
    """A row for each format and what is enforced."""
    chance, rows = Chance(max_tokens), []
    for format_name in formats:
        for strictness in STRICTNESS[1:]:
            counts: Counts = Counter()
            for number in range(num_requests):
                request = tool_request(number)
                rng = random.Random(f"{format_name} {strictness} {number}")
                counts += judge(
                    format_name, request, *chance.write(format_name, request, strictness, rng)
                )
            rows.append(
                {"writer": "chance", "format": format_name, "strictness": strictness, **counts}
            )
    return rows


def by_model(num_requests: int, max_tokens: int) -> list[dict[str, Any]]:
    """Likewise of the embedded model, in its format."""
    requests, rows = [tool_request(number) for number in range(num_requests)], []
    with LLM(max_model_len=4096, max_num_seqs=16) as llm:
        prompts = [
            llm.render_chat([{"role": "user", "content": request.ask}], tools=request.tools)
            for request in requests
        ]
        for strictness in STRICTNESS:
            params = [
                SamplingParams(
                    temperature=0.0,
                    max_tokens=max_tokens,
                    structured_output=grammar_of(_FORMAT, request, strictness),
                )
                for request in requests
            ]
            counts: Counts = Counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for request, output in zip(requests, outputs, strict=True):
                answer = output.outputs[0]
                found = judge(_FORMAT, request, answer.text, answer.finish_reason or "stop")
                counts += found + Counter(answered=bool(found["calls"]))
            rows.append({"writer": "model", "format": _FORMAT, "strictness": strictness, **counts})
    return rows


def to_markdown(rows: Iterable[dict[str, Any]], num_requests: int) -> str:
    """The shares of calls, of all that did not end with the text."""
    header = ["writer", "format", "enforced", "answers with calls", "complete calls", "valid"]
    header += ["unknown name", "no JSON", "against the schema", "cut"]
    lines = []
    for row in rows:
        complete = row.get("calls", 0) - row.get("cut", 0)
        kinds = [row.get(kind, 0) for kind in ("valid", "name", "json", "schema")]
        shares = [f"{kind / complete:.1%}" if complete else "–" for kind in kinds]
        called = "all"  # chance begins within one
        if row["writer"] == "model":
            called = f"{row.get('answered', 0) / num_requests:.1%}"
        line = [row["writer"], f"`{row['format']}`", row["strictness"], called, complete]
        lines.append([*line, *shares, row.get("cut", 0)])
    return markdown_table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400, help="sets of tools")
    parser.add_argument("--formats", nargs="*", default=[*TOOL_PARSERS], choices=[*TOOL_PARSERS])
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--no-model", action="store_true", help="leave the embedded model out")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    rows = [] if args.no_model else by_model(args.requests, args.max_tokens)
    rows += by_chance(args.formats, args.requests, args.max_tokens)
    if args.output_json is not None:
        write_json(args.output_json, {"environment": environment(), "rows": rows})
    print(environment_markdown(environment()))
    print(to_markdown(rows, args.requests))


if __name__ == "__main__":
    main()
