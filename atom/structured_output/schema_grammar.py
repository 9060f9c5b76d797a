"""Turns JSON schemas into grammars by xgrammar, and rewrites what it gets wrong or slow.

- Patterns are rules of our own, since xgrammar matches them as whole strings that are not escaped.
- Counted strings hold no raw control characters, and short ones are chains of rules: xgrammar
  checks most of the vocabulary again at every token of a counted repetition, which takes
  milliseconds, while the masks of rules are computed when the grammar is compiled.
- Names of further properties have no escapes where they could spell a declared name.
- White space is laid out as people do it (`_LAYOUT`), unless the format counts it: a weak model
  that may write blank lines goes on with them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from atom.quoting import excerpt
from atom.structured_output.schema.json_schema import lower_schema
from atom.structured_output.schema.patterns import json_rule
from atom.structured_output.tags import ANY_OBJECT
from atom.structured_output.xgrammar_import import import_xgrammar

logger = logging.getLogger(__name__)

# Maximum rules of a chain; longer strings are left unchanged, since each rule takes time to
# compile.
MAX_CHAIN = 128

_CHARACTER = r"[^\0-\x1f\"\\\r\n]"
_ANY_CHARACTER = r"[^\"\\\r\n]"
_BOUNDED = re.compile(r'^(\w+) ::= \(\("\\"" (\w+)\{(\d+), (\d+)\} "\\""\)\)$', re.MULTILINE)
_PATTERN = re.compile(r'Regex\("pattern(\d+)"(?:, json_string=true)?\)')
_NAMES = re.compile(r"^\w+_addl_key(_\w+)? ::= .*$", re.MULTILINE)
# Of a character below 256, as xgrammar prints it: it would read digits behind it as more of them.
_HEX = re.compile(r"(?<!\\)((?:\\\\)*)\\x([0-9a-f]{2})")
_ESCAPED = re.compile(r' \| \("\\\\" (?:basic_escape basic_string_sub|\w+_addl_key_exclude_\d+)\)')
_REWRITTEN = ('"pattern', '"minLength"', '"maxLength"', '"additionalProperties"')

# Of xgrammar's white space; the number only marks it.
_ANY_SPACE = 64
_SPACE_RULE = re.compile(r"^whitespace(_\d+)? ::= .*\n", re.MULTILINE)
_SPACE = re.compile(
    rf"""
    (?P<other>"(?:\\.|[^"\\])*" | \[(?:\\.|[^\]\\])*\])
    | (?P<after_colon>(?<=":"[ ]))? whitespace(?:_\d+)?\{{0,[ ]{_ANY_SPACE}\}}
      (?P<before_mark>[ ](?="[:,]"))?
    """,
    re.VERBOSE,
)
# After a colon, and where a line may end: indented by ten levels of four.
_LAYOUT = 'json_space ::= "" | " "\njson_break ::= "" | " " | "\\n" [ \\t]{0,40}\n'


def schema_format(format: dict[str, Any]) -> dict[str, Any]:
    """A format of the type `json_schema` as one that enforces the schema.

    With `max_whitespace_cnt` that much white space of any kind may stand between tokens.
    With `lenient`, the name of a tool, a schema that xgrammar refuses is any object.

    Raises:
        ValueError: for a schema that cannot be enforced.
        RuntimeError: of xgrammar.
    """
    lenient = format.get("lenient")
    format = {name: value for name, value in format.items() if name != "lenient"}
    try:
        return _schema_format(json.dumps(format))
    except (RuntimeError, ValueError) as error:
        if not lenient:
            raise
        logger.info("a schema of %s is not enforced: %s", lenient, excerpt(str(error)))
    return _schema_format(json.dumps({**format, "json_schema": ANY_OBJECT}))


@lru_cache(maxsize=1024)
def _schema_format(text: str) -> dict[str, Any]:
    format = json.loads(text)
    rules: list[str] = []
    is_raw = format.get("style", "json") != "json"
    is_counted = "max_whitespace_cnt" in format or not format.get("any_whitespace", True)
    schema = _marked(lower_schema(format["json_schema"]), rules, is_raw)
    format = {**format, "json_schema": schema}
    written = json.dumps(schema)
    if is_counted and not any(keyword in written for keyword in _REWRITTEN):
        return format
    if not is_counted:
        format["max_whitespace_cnt"] = _ANY_SPACE
    tag = json.dumps({"type": "structural_tag", "format": format})
    grammar = str(import_xgrammar().Grammar.from_structural_tag(tag))
    grammar = _HEX.sub(r"\1\\u00\2", grammar)
    grammar = _PATTERN.sub(lambda match: f"({rules[int(match[1])]})", grammar)
    grammar = _NAMES.sub(lambda match: _ESCAPED.sub("", match[0]), grammar)
    grammar = chain_bounded_strings(grammar)
    return {"type": "grammar", "grammar": grammar if is_counted else _laid_out(grammar)}


def _laid_out(grammar: str) -> str:
    def lay_out(match: re.Match[str]) -> str:
        if match["other"] is not None:
            return match[0]
        if match["before_mark"] is not None:
            return ""
        return "json_space" if match["after_colon"] is not None else "json_break"

    return _SPACE.sub(lay_out, _SPACE_RULE.sub("", grammar)) + _LAYOUT


def _marked(part: Any, rules: list[str], is_raw: bool) -> Any:
    """A lowered schema with numbers for patterns, whose rules are added to `rules`."""
    if not isinstance(part, dict):
        return part

    def mark(child: Any) -> Any:
        return _marked(child, rules, is_raw)

    marked = {
        name: _CHILDREN[name](value, mark) if name in _CHILDREN else value
        for name, value in part.items()
    }
    if "pattern" in part:
        bounds = marked.pop("minLength", 0), marked.pop("maxLength", None)
        rules.append(json_rule(part["pattern"], bounds[0], bounds[1], is_raw=is_raw))
        marked["pattern"] = f"pattern{len(rules) - 1}"
    if "patternProperties" in part:
        values = marked["patternProperties"]
        marked["patternProperties"] = {}
        for pattern, value in values.items():
            rules.append(json_rule(pattern, is_raw=is_raw))
            marked["patternProperties"][f"pattern{len(rules) - 1}"] = value
    return marked


def _in_map(value: Any, mark: Callable[[Any], Any]) -> Any:
    return {name: mark(child) for name, child in value.items()}


def _in_list(value: Any, mark: Callable[[Any], Any]) -> Any:
    return [mark(child) for child in value]


def _in_schema(value: Any, mark: Callable[[Any], Any]) -> Any:
    return mark(value)


_CHILDREN: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs"), _in_map),
    **dict.fromkeys(("anyOf", "prefixItems"), _in_list),
    **dict.fromkeys(("items", "additionalProperties", "propertyNames"), _in_schema),
}


def chain_bounded_strings(grammar: str) -> str:
    """Rewrite the counted strings of a JSON schema's grammar.

    Args:
        grammar: as printed by xgrammar.
    """
    longest = -1

    def chain(match: re.Match[str]) -> str:
        nonlocal longest
        name, character, low, high = match[1], match[2], int(match[3]), int(match[4])
        if f"\n{character} ::= (({_ANY_CHARACTER}))\n" not in grammar or high > MAX_CHAIN:
            return match[0]
        longest = max(longest, high - low)
        start = " ".join(['"\\""', *[_CHARACTER] * low, _rest(high - low)])
        return f"{name} ::= (({start}))"

    chained = _BOUNDED.sub(chain, grammar).replace(_ANY_CHARACTER, _CHARACTER)
    if longest < 0:
        return chained
    rules = [f'{_rest(0)} ::= (("\\""))']
    for count in range(1, longest + 1):
        rules.append(f'{_rest(count)} ::= (("\\"") | ({_CHARACTER} {_rest(count - 1)}))')
    return "\n".join([chained.rstrip("\n"), *rules, ""])


def _rest(count: int) -> str:
    """The rule for at most `count` more characters and the closing quote."""
    return f"bounded_string_rest_{count}"
