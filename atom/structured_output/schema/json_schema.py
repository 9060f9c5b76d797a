"""JSON schemas in the terms of the grammar library: what it would ignore is rewritten or refused.

A document of the grammar is valid under the schema. The grammar may be narrower: properties come in
their declared order, others only where `additionalProperties` asks for them, and a schema without a
type is read as one of the types that its keywords are about. Found by testing xgrammar 0.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from atom.structured_output.schema.disjoint import are_disjoint
from atom.structured_output.schema.keywords import (
    Refused,
    bounds_of,
    lowered_array_bounds,
    lowered_number,
    lowered_string,
    values_of,
    without_unknown,
)
from atom.structured_output.schema.pointer import resolve_pointer

# Deeper schemas take more than a second to compile.
MAX_DEPTH = 64

_NOT_SUPPORTED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
    "extends",
)
# What may describe properties that an object's own keywords do not.
_APPLICATORS = {
    *("not", "if", "then", "else", "dependentSchemas", "dependencies", "$dynamicRef"),
    *("$recursiveRef", "extends", "$ref", "anyOf", "oneOf", "allOf"),
}
# Beside one of these, the library ignores all other keywords.
_EXCLUSIVE = ("$ref", "anyOf", "oneOf", "allOf")
KEYWORDS_OF_TYPES: dict[str, tuple[str, ...]] = {
    "null": (),
    "boolean": (),
    "integer": (),  # those of numbers
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": (
        *("items", "prefixItems", "additionalItems", "unevaluatedItems"),
        *("minItems", "maxItems", "uniqueItems"),
    ),
    "object": (
        *("properties", "required", "additionalProperties", "unevaluatedProperties"),
        *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
    ),
}


def check_schema(schema: Any) -> None:
    """Refuse an invalid schema, or one that a grammar cannot fully enforce.

    Raises:
        ValueError: with the location, the keyword and the reason.
    """
    lower_schema(schema)


def lower_schema(schema: Any) -> Any:
    """The schema with nothing that the library ignores or reads otherwise, but for patterns.

    Raises:
        ValueError: as `check_schema`.
    """
    return _Lowering(schema, None).run()


def relax_schema(schema: Any) -> tuple[Any, list[str]]:
    """As `lower_schema`, without the keywords that cannot be enforced.

    Returns:
        The rest, and what does not hold, each with its location and reason.
    """
    dropped: list[str] = []
    return _Lowering(schema, dropped).run(), dropped


class _Lowering:
    """Rewrites one schema.

    Args:
        dropped: takes what cannot be enforced; None to raise.
    """

    def __init__(self, root: Any, dropped: list[str] | None) -> None:
        self._root = root
        self._dropped = dropped
        # The targets of references by name.
        self._names: dict[str, str] = {}

    def run(self) -> Any:
        lowered = self._schema(self._root, "#", 0)
        definitions: dict[str, Any] = {}
        while len(definitions) < len(self._names):
            reference, name = list(self._names.items())[len(definitions)]
            definitions[name] = self._schema(self._resolve(reference), reference, 1)
        return {**lowered, "$defs": definitions} if definitions else lowered

    def _refuse(self, where: str, reason: str) -> None:
        if self._dropped is None:
            raise ValueError(f"json_schema: {where}: {reason}")
        self._dropped.append(f"{where}: {reason}")

    def _schema(self, part: Any, where: str, depth: int) -> Any:
        if isinstance(part, bool):
            return part
        if not isinstance(part, Mapping):
            self._refuse(where, f"a schema must be an object or a boolean, got {part!r:.100}")
            return True
        if depth > MAX_DEPTH:
            self._refuse(where, f"it is nested deeper than {MAX_DEPTH} levels")
            return True
        given = without_unknown(part)
        if depth and "$id" in part and _mentions(part, "$ref"):
            self._refuse(f"{where}/$id", "'$id' beside references, below the top, is not supported")
        is_opened = False
        for name in _NOT_SUPPORTED:
            if name in given:
                self._refuse(where, f"{name!r} is not supported")
                is_opened |= name in _APPLICATORS
                del given[name]
        exclusive = next((name for name in _EXCLUSIVE if name in given), None)
        if exclusive is not None:
            found = self._exclusive(exclusive, given, where, depth)
            if found is not None:
                return found
            is_opened = True
        try:
            lowered = self._by_values_or_type(given, where, depth, is_opened)
        except Refused as error:
            self._refuse(where, str(error))
            return True
        return lowered

    def _exclusive(self, name: str, given: dict[str, Any], where: str, depth: int) -> Any:
        """The lowered combination; None where it is dropped for the keywords beside it."""
        beside = sorted(given.keys() - {name})
        if beside:
            reason = f"{beside} beside {name!r} is not supported; write it into the branches"
            self._refuse(where, reason)
            for other in _EXCLUSIVE:
                given.pop(other, None)
            return None
        if name == "$ref":
            return self._reference(given[name], where)
        branches = given[name]
        if not isinstance(branches, list) or not branches:
            self._refuse(where, f"{name!r} must not be empty, and be a list of schemas")
            return True
        if name == "allOf" and len(branches) > 1:
            self._refuse(where, "'allOf' of several schemas is not supported; merge them")
            return True
        if name == "oneOf" and not are_disjoint(branches, self._target):
            reason = "'oneOf' of schemas that may hold together is not supported; use 'anyOf'"
            self._refuse(where, reason)
        lowered = [
            self._schema(branch, f"{where}/{name}/{i}", depth + 1)
            for i, branch in enumerate(branches)
        ]
        possible = [branch for branch in lowered if branch is not False]
        if True in possible:
            return True
        return possible[0] if len(possible) == 1 else {"anyOf": possible} if possible else False

    def _reference(self, reference: Any, where: str) -> Any:
        if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
            reason = f"'$ref' must point into the schema ('#/...'), got {reference!r:.100}"
            self._refuse(where, reason)
            return True
        if reference in self._names:
            return {"$ref": f"#/$defs/{self._names[reference]}"}
        if self._resolve(reference) is None:
            self._refuse(where, f"'$ref' points to {reference!r:.100}, which is not there")
            return True
        if self._leads_back(reference):
            self._refuse(where, f"'$ref' to {reference!r:.100} leads back to itself alone")
            return True
        if reference == "#":
            return {"$ref": "#"}
        self._names[reference] = f"d{len(self._names)}"
        return {"$ref": f"#/$defs/{self._names[reference]}"}

    def _leads_back(self, reference: str) -> bool:
        """Whether a part is described by itself, not by what it holds: then nothing is said."""
        pending, seen = [reference], set[str]()
        while pending:
            parts = [self._resolve(pending.pop())]
            while parts:
                part = parts.pop()
                if not isinstance(part, Mapping):
                    continue
                for name in ("anyOf", "oneOf", "allOf"):
                    branches = part.get(name)
                    parts += branches if isinstance(branches, list) else []
                further = part.get("$ref")
                if further == reference:
                    return True
                if isinstance(further, str) and further.startswith("#") and further not in seen:
                    seen.add(further)
                    pending.append(further)
        return False

    def _resolve(self, reference: str) -> Any:
        """The part of the schema that a reference names; None if there is none."""
        return resolve_pointer(self._root, reference)

    def _target(self, part: Any) -> Any:
        """The schema, behind a reference."""
        for _ in range(MAX_DEPTH):
            reference = part.get("$ref") if isinstance(part, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#"):
                return part
            part = self._resolve(reference)
        return part

    def _by_values_or_type(
        self, given: dict[str, Any], where: str, depth: int, is_opened: bool
    ) -> Any:
        types = _types(given)
        if "enum" in given or "const" in given:
            beside = sorted(given.keys() - {"enum", "const", "type"})
            if beside:
                reason = f"{beside[0]!r} beside 'enum' or 'const' is not supported"
                self._refuse(where, f"{reason}; list only what satisfies it")
            return {"enum": values_of(given, types)}
        if types is None:
            about = [t for t, names in KEYWORDS_OF_TYPES.items() if given.keys() & set(names)]
            if not about:
                return True
            types = about
        lowered = [self._of_type(t, given, where, depth, is_opened) for t in types]
        return lowered[0] if len(lowered) == 1 else {"anyOf": lowered}

    def _of_type(
        self, type: str, given: dict[str, Any], where: str, depth: int, is_opened: bool
    ) -> Any:
        names = KEYWORDS_OF_TYPES["number" if type == "integer" else type]
        own = {name: value for name, value in given.items() if name in names}
        if type in ("number", "integer"):
            return self._less_and_less(lambda own: lowered_number(type, own), own, where)
        if type == "string":
            return self._less_and_less(lowered_string, own, where)
        if type == "array":
            return self._array(own, where, depth)
        if type == "object":
            return self._object(own, where, depth, is_opened)
        return {"type": type}

    def _less_and_less(self, lower: Any, own: dict[str, Any], where: str) -> Any:
        """Lower, without the keyword that each refusal names."""
        while True:
            try:
                return lower(own)
            except Refused as error:
                self._refuse(where, str(error))
                own = {name: value for name, value in own.items() if name not in error.keywords}

    def _array(self, own: dict[str, Any], where: str, depth: int) -> Any:
        own = dict(own)
        if isinstance(own.get("items"), list):  # up to draft 7
            own["prefixItems"] = own.pop("items")
            own["items"] = own.pop("additionalItems", True)
        rest = own.get("items", own.get("unevaluatedItems"))
        bounds = self._less_and_less(lowered_array_bounds, own, where)
        most = bounds.get("maxItems")
        lowered: dict[str, Any] = {"type": "array"}
        first = self._first_items(own, where, depth)
        if most is not None and most <= len(first):
            first, rest = first[:most], False
        elif rest is not None:
            rest = self._schema(rest, f"{where}/items", depth + 1)
        elif not first or bounds.get("minItems", 0) > len(first):
            rest = True
        if first:
            lowered["prefixItems"] = [{} if item is True else item for item in first]
        if rest is False and bounds.get("minItems", 0) > len(first):
            self._refuse(where, f"'minItems' is more than the {len(first)} items that may be")
            bounds = {}
        if rest is False:
            bounds.pop("maxItems", None)
            return {**lowered, **bounds, "items": False} if first else {**lowered, "maxItems": 0}
        return {**lowered, **bounds} if rest is None else {**lowered, **bounds, "items": rest}

    def _first_items(self, own: dict[str, Any], where: str, depth: int) -> list[Any]:
        first = own.get("prefixItems", [])
        if not isinstance(first, list):
            self._refuse(where, "'prefixItems' must be a list of schemas")
            return []
        lowered = [
            self._schema(item, f"{where}/prefixItems/{i}", depth + 1)
            for i, item in enumerate(first)
        ]
        if False in lowered:
            self._refuse(where, "'prefixItems' that allow no value are not supported")
            return []
        return lowered

    def _object(self, own: dict[str, Any], where: str, depth: int, is_opened: bool) -> Any:
        own = dict(own)
        if "additionalProperties" not in own and "unevaluatedProperties" in own:
            own["additionalProperties"] = own["unevaluatedProperties"]
        own.pop("unevaluatedProperties", None)
        if is_opened:
            own.setdefault("additionalProperties", True)
        for reason, names in _object_problems(own):
            self._refuse(where, reason)
            for name in names:
                own.pop(name, None)
        lowered: dict[str, Any] = {"type": "object"}
        others = own.get("additionalProperties")
        if others is not None:
            others = self._schema(others, f"{where}/additionalProperties", depth + 1)
            lowered["additionalProperties"] = others
        properties = self._properties(own, where, depth, others)
        required = [name for name in dict.fromkeys(own.get("required", ())) if name in properties]
        if properties or "properties" in own:
            lowered["properties"] = properties
        if required:
            lowered["required"] = required
        if "patternProperties" in own:
            [(pattern, value)] = own["patternProperties"].items()
            value = self._schema(value, f"{where}/patternProperties/{pattern}", depth + 1)
            if value is not False:
                lowered["patternProperties"] = {pattern: value}
            else:
                self._refuse(where, "'patternProperties' that allows no value is not supported")
        if "propertyNames" in own and others is not False:
            names = self._schema(own["propertyNames"], f"{where}/propertyNames", depth + 1)
            lowered["propertyNames"] = names
        lowered |= self._number_of_properties(own, len(properties), len(required), where)
        if not lowered.keys() & {"properties", "patternProperties", "propertyNames"}:
            lowered.setdefault("additionalProperties", True)
        return lowered

    def _properties(
        self, own: dict[str, Any], where: str, depth: int, others: Any
    ) -> dict[str, Any]:
        properties: dict[str, Any] = {}
        required = own.get("required", [])
        for name, child in own.get("properties", {}).items():
            value = self._schema(child, f"{where}/properties/{name}", depth + 1)
            if value is not False:
                properties[name] = value
            elif name in required or others not in (None, False):
                self._refuse(f"{where}/properties/{name}", "false is not supported here")
        for name in required:
            if name in own.get("properties", {}):
                continue
            if others is False:
                reason = f"'required' names {name!r}, which 'additionalProperties' forbids"
                self._refuse(where, reason)
            else:
                properties[name] = True if others is None else others
        return properties

    def _number_of_properties(
        self, own: dict[str, Any], declared: int, required: int, where: str
    ) -> dict[str, Any]:
        """Counted by the grammar; a key that is repeated counts twice there."""
        try:
            low, high = bounds_of(own, "minProperties", "maxProperties")
        except Refused as error:
            self._refuse(where, str(error))
            return {}
        others = own.get("additionalProperties", None if "properties" in own else True)
        is_open = others not in (None, False) or "patternProperties" in own
        bounds: dict[str, Any] = {}
        if low > required:
            if is_open and low > 1:
                reason = "'minProperties' of an object whose names are free is not supported"
                self._refuse(where, reason)
            elif not is_open and low > declared:
                self._refuse(where, f"'minProperties' is {low}, of {declared} properties")
            else:
                bounds["minProperties"] = low
        if high is not None:
            if high < max(required, low):
                self._refuse(where, f"'maxProperties' is {high}, but {max(required, low)} must be")
            else:
                bounds["maxProperties"] = high
        return bounds


def _object_problems(own: dict[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Reasons, and the keywords to leave out for each."""
    for name in ("properties", "patternProperties"):
        if not isinstance(own.get(name, {}), Mapping):
            yield f"{name!r} must be an object, got {own[name]!r:.100}", (name,)
    required = own.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield f"'required' must be a list of names, got {required!r:.100}", ("required",)
    patterns = own.get("patternProperties")
    if isinstance(patterns, Mapping):
        if not patterns:
            del own["patternProperties"]
        elif own.get("properties") or own.get("required"):
            reason = "'patternProperties' beside 'properties' or 'required' is not supported"
            yield reason, ("patternProperties",)
        elif own.get("additionalProperties") not in (None, False):
            reason = "'patternProperties' beside 'additionalProperties' is not supported"
            yield reason, ("patternProperties",)
        elif len(patterns) > 1:
            yield "'patternProperties' of several patterns is not supported", ("patternProperties",)
        else:
            own.pop("additionalProperties", None)
            yield from _wrong_names({"pattern": next(iter(patterns))}, "patternProperties")
    if "propertyNames" in own:
        if own.keys() & {"properties", "required", "patternProperties"}:
            reason = "'propertyNames' beside 'properties' or others of its kind is not supported"
            yield reason, ("propertyNames",)
        else:
            yield from _wrong_names(own["propertyNames"], "propertyNames")


def _wrong_names(names: Any, keyword: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    given = without_unknown(names) if isinstance(names, Mapping) else {}
    if not given.keys() & {"pattern", "minLength", "maxLength"} or given.get("type") not in (
        None,
        "string",
    ):
        yield f"{keyword!r} must say a pattern or a length", (keyword,)
        return
    try:
        lowered_string({name: value for name, value in given.items() if name != "type"})
    except Refused as error:
        yield f"{keyword!r}: {error}", (keyword,)


def _types(given: dict[str, Any]) -> list[str] | None:
    """The types that are allowed; None if the schema says none."""
    types = given.get("type")
    if types is None:
        return None
    names = types if isinstance(types, list) else [types]
    if not names:
        raise Refused("'type' must not be empty")
    unknown = [t for t in names if not isinstance(t, str) or t not in KEYWORDS_OF_TYPES]
    if unknown:
        _no_type(unknown[0])
    return [t for t in dict.fromkeys(names) if not (t == "integer" and "number" in names)]


def _no_type(name: Any) -> NoReturn:
    known = ", ".join(KEYWORDS_OF_TYPES)
    raise Refused(f"'type' must be one of {known}, got {name!r:.100}")


def _mentions(part: Any, name: str) -> bool:
    pending = [part]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            if name in item:
                return True
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return False
