"""The keywords of JSON schema that are about values without parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from atom.structured_output.schema.patterns import PatternError, json_rule

# What says nothing about values, as does every keyword that is not known.
_KNOWN = frozenset(
    {
        *("type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
        *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
        *("extends", "contains", "minContains", "maxContains"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format"),
        *("items", "prefixItems", "additionalItems", "unevaluatedItems"),
        *("minItems", "maxItems", "uniqueItems"),
        *("properties", "required", "additionalProperties", "unevaluatedProperties"),
        *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
    }
)
# Those that xgrammar knows; others are annotations, as the standard has them all by default.
FORMATS = (
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
# From the year 1 on, as some readers do not know the year 0.
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_DATE = f"({_YEAR}-{_DAY}|([0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
_HOUR = "([01][0-9]|2[0-3])"
_TIME = f"{_HOUR}:[0-5][0-9]:[0-5][0-9](\\.[0-9]{{1,9}})?(Z|[+-]{_HOUR}:[0-5][0-9])"
# Those of the library let days and seconds be written that there are not.
_FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
# The library's numbers are of 64 bits.
_LARGEST = (1 << 63) - 1
# Characters, items or properties that there must be: no context has room for more.
MAX_AT_LEAST = 1 << 24
_MAX_VALUES = 1024
# The grammar of the multiples of a number has as many rules.
_MAX_MULTIPLE = 256


class Refused(ValueError):
    """`keywords` cannot be enforced, for this reason."""

    def __init__(self, reason: str, *keywords: str) -> None:
        super().__init__(reason)
        self.keywords = keywords


def without_unknown(part: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that constrain values."""
    return {name: value for name, value in part.items() if name in _KNOWN}


def values_of(given: Mapping[str, Any], types: list[str] | None) -> list[Any]:
    """The values that `enum` and `const` list, of the types."""
    values = given.get("enum", [given.get("const")])
    if not isinstance(values, list):
        raise Refused(f"'enum' must be a list, got {values!r:.100}")
    if "const" in given:
        values = [value for value in values if _same(value, given["const"])]
    found = [v for v in values if types is None or any(_has_type(v, t) for t in types)]
    if not found:
        raise Refused("'enum' and 'const' leave no value of the 'type'")
    return found


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON: true is not 1."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_same(value[k], other[k]) for k in value)
    return bool(value == other)


def _has_type(value: Any, type: str) -> bool:
    match type:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            return is_whole and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
    return isinstance(value, dict)


def lowered_string(own: dict[str, Any]) -> dict[str, Any]:
    """Raises: Refused."""
    low, high = bounds_of(own, "minLength", "maxLength")
    lengths = tuple(name for name in ("minLength", "maxLength") if name in own)
    format = own.get("format") if own.get("format") in FORMATS else None
    if "pattern" in own:
        if format is not None:
            raise Refused(f"'format' ({format}) beside 'pattern' is not supported", "format")
        _check_pattern(own["pattern"], low, high, lengths)
    elif format is not None and lengths:
        raise Refused(f"'format' ({format}) beside {lengths[0]!r} is not supported", "format")
    lowered = {"type": "string", "minLength": low, "maxLength": high, "pattern": own.get("pattern")}
    if format in _FORMAT_PATTERNS:
        lowered["pattern"] = _FORMAT_PATTERNS[format]
    else:
        lowered["format"] = format
    return {name: value for name, value in lowered.items() if value not in (None, 0)} | (
        {"maxLength": 0} if high == 0 else {}
    )


def _check_pattern(pattern: Any, low: int, high: int | None, lengths: tuple[str, ...]) -> None:
    if not isinstance(pattern, str):
        raise Refused(f"'pattern' must be a string, got {pattern!r:.100}", "pattern")
    try:
        json_rule(pattern)
    except PatternError as error:
        raise Refused(f"the 'pattern' {pattern!r:.100}: {error}", "pattern") from error
    try:
        json_rule(pattern, low, high)
    except PatternError as error:
        reason = f"'pattern' ({pattern!r:.100}) beside {lengths[0]!r}: {error}"
        raise Refused(reason, *lengths) from error


def lowered_array_bounds(own: dict[str, Any]) -> dict[str, Any]:
    """Raises: Refused."""
    low, high = bounds_of(own, "minItems", "maxItems")
    if own.get("uniqueItems") and (high is None or high > 1):
        raise Refused("'uniqueItems' is not supported", "uniqueItems")
    bounds = {"minItems": low} if low else {}
    return bounds if high is None else {**bounds, "maxItems": high}


def bounds_of(own: dict[str, Any], lowest: str, highest: str) -> tuple[int, int | None]:
    """Raises: Refused."""
    low = _count(own, lowest) or 0
    if low > MAX_AT_LEAST:
        raise Refused(f"{lowest!r} is {low}, at most {MAX_AT_LEAST} is supported", lowest)
    high = _count(own, highest)
    if high is not None and high < low:
        raise Refused(f"{lowest!r} is larger than {highest!r}", lowest, highest)
    return low, high


def _count(own: dict[str, Any], name: str) -> int | None:
    value = own.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise Refused(f"{name!r} must be a number of things, got {value!r:.100}", name)
    if not 0 <= value <= _LARGEST >> 33:
        raise Refused(f"{name!r} is too large or negative: {value!r:.100}", name)
    return int(value)


def lowered_number(type: str, own: dict[str, Any]) -> dict[str, Any]:
    """Raises: Refused."""
    low, is_above = _limit(own, "minimum", "exclusiveMinimum", max)
    high, is_below = _limit(own, "maximum", "exclusiveMaximum", min)
    limits = tuple(name for name in own if name != "multipleOf")
    step = _step(own)
    if step is not None and (type == "integer" or step.denominator == 1):
        type, step = "integer", Fraction(step.numerator)
    elif step is not None:
        reason = f"'multipleOf' ({own['multipleOf']}) of a number that is no integer"
        raise Refused(f"{reason} is not supported", "multipleOf")
    if type == "number":
        return _lowered_real(low, is_above, high, is_below, limits)
    least = None if low is None else math.floor(low) + 1 if is_above else math.ceil(low)
    most = None if high is None else math.ceil(high) - 1 if is_below else math.floor(high)
    return _lowered_integer(least, most, 1 if step is None else int(step), limits)


def _lowered_integer(
    least: int | None, most: int | None, step: int, limits: tuple[str, ...]
) -> dict[str, Any]:
    if least is not None and most is not None and least > most:
        raise Refused(f"no integer has {' and '.join(map(repr, limits))}", *limits)
    if (least or 0) > _LARGEST or (most or 0) < -_LARGEST:
        raise Refused(f"{limits[0]!r} is beyond 64 bits", *limits)
    lowered: dict[str, Any] = {"type": "integer"}
    if step != 1:
        if least is not None and most is not None and (most - least) // step <= _MAX_VALUES:
            values = list(range(-(-least // step) * step, most + 1, step))
            if not values:
                raise Refused(f"no multiple of 'multipleOf' has {limits[0]!r}", *limits)
            return {"enum": values}
        if limits:
            raise Refused(f"'multipleOf' beside {limits[0]!r} is not supported", "multipleOf")
        if step > _MAX_MULTIPLE:
            raise Refused(f"'multipleOf' above {_MAX_MULTIPLE} is not supported", "multipleOf")
        return {**lowered, "multipleOf": step}
    if least is not None and least >= -_LARGEST:
        lowered["minimum"] = least
    if most is not None:
        lowered["maximum"] = min(most, _LARGEST)
    elif least is None:
        return lowered
    return lowered


def _lowered_real(
    low: Fraction | None,
    is_above: bool,
    high: Fraction | None,
    is_below: bool,
    limits: tuple[str, ...],
) -> dict[str, Any]:
    is_point = low == high and (is_above or is_below)
    if low is not None and high is not None and (low > high or is_point):
        raise Refused(f"no number has {' and '.join(map(repr, limits))}", *limits)
    lowered: dict[str, Any] = {"type": "number"}
    if low is not None:
        lowered["exclusiveMinimum" if is_above else "minimum"] = _plain(low)
    if high is not None:
        lowered["exclusiveMaximum" if is_below else "maximum"] = _plain(high)
    if any(limit is not None and abs(limit) > _LARGEST for limit in (low, high)):
        raise Refused(f"{limits[0]!r} is beyond 64 bits", *limits)
    return lowered


def _plain(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _step(own: dict[str, Any]) -> Fraction | None:
    if "multipleOf" not in own:
        return None
    step = _number(own, "multipleOf")
    if step <= 0:
        raise Refused("'multipleOf' must be above 0", "multipleOf")
    return step


def _number(own: dict[str, Any], name: str) -> Fraction:
    value = own[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refused(f"{name!r} must be a number, got {value!r:.100}", name)
    return Fraction(repr(value))


def _limit(
    own: dict[str, Any], plain: str, exclusive: str, tighter: Any
) -> tuple[Fraction | None, bool]:
    """The limit, and whether it is not reached; draft 4 says the latter by a boolean."""
    limit = _number(own, plain) if plain in own else None
    if exclusive not in own:
        return limit, False
    if isinstance(own[exclusive], bool):
        return limit, own[exclusive] and limit is not None
    other = _number(own, exclusive)
    if limit is None or limit == other or tighter(limit, other) == other:
        return other, True
    return limit, False
