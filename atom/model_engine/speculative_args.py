"""The speculation flags, and the JSON that says the same, as one configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atom.config import ConfigError, SpeculativeOptions

_JSON_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "ngram_max",
    "ngram_min",
    "draft_tensor_parallel_size",
)


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
                f"--speculative-config and --{sorted(given)[0].replace('_', '-')} say the same "
                "thing; give one of them"
            )
        given = _parse(config)
    if not given:
        return None
    if "method" not in given:
        raise ConfigError(
            f"{', '.join(sorted(given))} has no effect without a speculative method; add --method"
        )
    if "num_speculative_tokens" not in given:
        raise ConfigError(f"method {given['method']} needs num_speculative_tokens")
    unused = sorted({"ngram_max", "ngram_min"} & set(given))
    if given["method"] != "ngram" and unused:
        raise ConfigError(f"{', '.join(unused)} is for method ngram, not {given['method']}")
    return SpeculativeOptions(**given)


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
