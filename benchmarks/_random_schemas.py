"""JSON schemas at random, of all keywords: those that are enforced and those that are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = Any

NAMES = ("name", "age", "a b", "ü", 'say "hi"', "x\\y", "$ref", "items", "12", "", "tags", "n")
PATTERNS = (
    *("^[a-z]{1,5}$", "^n_", "x$", "[0-9]{2}", "a|b", "^(foo|ba[rz])+$", '^[^a]{3}"$', "^$"),
    *(
        "^\\d{3}-\\d{4}$",
        "^.{2,4}$",
        "\\\\",
        "^a\\nb",
        "(?i)x",
        "(?=a)b",
        "^[A-Z][a-z]*( [A-Z]\\.)?$",
    ),
    *("é+", "[\\s\\S]", "^\\w+@\\w+\\.com$", "\\bfoo", "^[\\]\\-a]*$"),
)
FORMATS = ("date", "email", "ipv4", "uuid", "date-time", "uri", "int32", "password", "hostname")
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -7,
    2.5,
    "a",
    "",
    'say "hi"',
    "ü\n",
    [],
    [1],
    {},
    {"a": None},
)
_DEPTH = 3


def random_schema(seed: int) -> Schema:
    """A schema whose root is mostly an object, with definitions that it may refer to."""
    rng = random.Random(seed)
    made = _Maker(rng)
    root = made.object(0) if rng.random() < 0.7 else made.schema(0)
    if not isinstance(root, dict):  # servers take objects alone
        root = {"anyOf": [root]}
    definitions: dict[str, Schema] = {}
    while missing := made.references.keys() - definitions.keys():
        definitions |= {name: made.schema(1) for name in sorted(missing)}
    return {**root, "$defs": definitions} if definitions else root


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.references: dict[str, None] = {}

    def schema(self, depth: int) -> Schema:
        kinds: list[tuple[int, Callable[[int], Schema]]] = [
            (6, self.string),
            (4, self.number),
            (3, lambda _: {"type": self._rng.choice(["boolean", "null"])}),
            (3, self.values),
            (1, lambda _: self._rng.choice([True, {}, {"type": ["string", "null"]}])),
        ]
        if depth < _DEPTH:
            kinds += [(3, self.array), (3, self.object), (2, self.combined), (1, self.reference)]
        makers = [maker for weight, maker in kinds for _ in range(weight)]
        made = self._rng.choice(makers)(depth)
        if isinstance(made, dict) and self._chance(0.1):
            made = {**made, "title": "t", "description": 'd "q"', "default": None, "examples": [1]}
        if isinstance(made, dict) and self._chance(0.03):
            made = {**made, self._rng.choice(["not", "if", "else"]): {"type": "null"}}
        return made

    def string(self, depth: int) -> Schema:
        del depth
        made: dict[str, Any] = {"type": "string"}
        if self._chance(0.5):
            made |= self._bounds("minLength", "maxLength", 12)
        if self._chance(0.25):
            made["pattern"] = self._rng.choice(PATTERNS)
        if self._chance(0.15):
            made["format"] = self._rng.choice(FORMATS)
        return made if self._chance(0.9) else {k: v for k, v in made.items() if k != "type"}

    def number(self, depth: int) -> Schema:
        del depth
        made: dict[str, Any] = {"type": self._rng.choice(["integer", "number"])}
        low = self._rng.choice([-100, -3, 0, 0.5, 1, 1000, 10**12])
        if self._chance(0.5):
            made[self._rng.choice(["minimum", "exclusiveMinimum"])] = low
        if self._chance(0.5):
            high = low + self._rng.choice([0, 1, 2.25, 10, 9999])
            made[self._rng.choice(["maximum", "exclusiveMaximum"])] = high
        if self._chance(0.15):
            made["multipleOf"] = self._rng.choice([1, 2, 7, 0.5, 0.01, 1000])
        return made

    def values(self, depth: int) -> Schema:
        del depth
        if self._chance(0.3):
            return {"const": self._rng.choice(_VALUES)}
        made: dict[str, Any] = {"enum": self._rng.sample(_VALUES, self._rng.randint(1, 4))}
        if self._chance(0.2):
            made["type"] = self._rng.choice(["string", "integer", "number", "object"])
        return made

    def array(self, depth: int) -> Schema:
        made: dict[str, Any] = {"type": "array"}
        if self._chance(0.8):
            made["items"] = self.schema(depth + 1)
        if self._chance(0.2):
            made["prefixItems"] = [self.schema(depth + 1) for _ in range(self._rng.randint(1, 2))]
        if self._chance(0.7):
            made |= self._bounds("minItems", "maxItems", 4)
        for name, value in (("uniqueItems", True), ("contains", {"type": "integer"})):
            if self._chance(0.04):
                made[name] = value
        return made

    def object(self, depth: int) -> Schema:
        names = self._rng.sample(NAMES, self._rng.randint(0, 4))
        made: dict[str, Any] = {"type": "object"}
        if names:
            made["properties"] = {name: self.schema(depth + 1) for name in names}
            made["required"] = [name for name in names if self._chance(0.6)]
        if self._chance(0.6):
            others = [False, False, True, self.schema(depth + 1)]
            made["additionalProperties"] = self._rng.choice(others)
        if self._chance(0.1):
            patterns = self._rng.sample(PATTERNS, self._rng.randint(1, 2))
            made["patternProperties"] = {p: self.schema(depth + 1) for p in patterns}
        if self._chance(0.15):
            made |= self._bounds("minProperties", "maxProperties", 4)
        for name, value in (
            ("propertyNames", {"pattern": "^[a-z]+$"}),
            ("propertyNames", {"maxLength": 3}),
            ("dependentRequired", {"name": ["age"]}),
            ("unevaluatedProperties", False),
        ):
            if self._chance(0.03):
                made[name] = value
        return made

    def combined(self, depth: int) -> Schema:
        keyword = self._rng.choice(["anyOf", "anyOf", "oneOf", "allOf"])
        count = 1 if keyword == "allOf" and self._chance(0.5) else self._rng.randint(1, 3)
        made: dict[str, Any] = {keyword: [self.schema(depth + 1) for _ in range(count)]}
        return {**made, "type": "object"} if self._chance(0.1) else made

    def reference(self, depth: int) -> Schema:
        del depth
        name = self._rng.choice(["d1", "d/2"])
        self.references[name] = None
        return {"$ref": "#/$defs/" + name.replace("/", "~1")}

    def _bounds(self, lowest: str, highest: str, most: int) -> dict[str, int]:
        low, high = sorted((self._rng.randint(0, most), self._rng.randint(0, most)))
        made = {lowest: low} if self._chance(0.5) else {}
        return {**made, highest: high} if self._chance(0.8) else made

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share


def keywords_of(part: Any) -> set[str]:
    """All keywords and names of a schema."""
    if isinstance(part, list):
        return set().union(*map(keywords_of, part))
    if not isinstance(part, dict):
        return set()
    return part.keys() | set().union(*map(keywords_of, part.values()))
