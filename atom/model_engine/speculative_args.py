"""The speculation flags, and the JSON that says the same, as one configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from atom.config import ConfigError, SpeculativeOptions

_JSON_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "ngram_max",
    "ngram_min",
    "lookup",
    "adaptive",
    "draft_tensor_parallel_size",
)

# Flags that are not called like their option.
_FLAGS = {
    "model": "draft_model",
    "lookup": "speculative_lookup",
    "adaptive": "speculative_adaptive",
}


def speculative_options(
    flags: Mapping[str, Any], config: str | Mapping[str, Any] | None
) -> SpeculativeOptions | None:
    """Options from flags or from `--speculative-config`; None when neither is given.

    Args:
        flags: values by name; None is "not given".
        config: a JSON object, or a mapping.

    Raises:
        ConfigError: when both are given, or something is unknown, missing or impossible.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if config is not None:
        if given:
            raise ConfigError(
                f"--speculative-config and {_flags(given)[0]} say the same thing; give one of them"
            )
        given = _parse(config)
    if not given:
        return None
    if "method" not in given:
        raise ConfigError(
            f"{', '.join(_flags(given))} has no effect without a speculative method; add --method"
        )
    if "num_speculative_tokens" not in given:
        raise ConfigError(f"method {given['method']} needs num_speculative_tokens")
    unused = sorted({"ngram_max", "ngram_min"} & set(given))
    if given["method"] != "ngram" and not given.get("lookup") and unused:
        raise ConfigError(
            f"{', '.join(unused)} is for method ngram and for lookup beside a draft, not for "
            f"{given['method']} alone"
        )
    return SpeculativeOptions(**given)


def _flags(names: Iterable[str]) -> list[str]:
    """How the command line spells options."""
    flags = (_FLAGS.get(name, name).replace("_", "-") for name in names)
    return sorted(f"--{flag}" for flag in flags)


def _parse(config: str | Mapping[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(config) if isinstance(config, str) else config
    except json.JSONDecodeError as error:
        raise ConfigError(f"--speculative-config is not valid JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"--speculative-config must be a JSON object, got {config!r}")
    unknown = sorted(set(value) - set(_JSON_KEYS))
    if unknown:
        raise ConfigError(
            f"--speculative-config does not know {', '.join(unknown)}; it knows "
            f"{', '.join(_JSON_KEYS)}"
        )
    return dict(value)
