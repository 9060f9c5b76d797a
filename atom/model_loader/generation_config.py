"""The sampling parameters that a model comes with, for requests that do not give their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atom.config import ConfigError, ModelOptions
from atom.models.config.file import is_there, read_json_object
from atom.sampling_params import SamplingParams

GENERATION_CONFIG = "generation_config.json"

# Read from a generation config; its other fields are not about choosing tokens.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def sampling_defaults(folder: Path, options: ModelOptions) -> dict[str, Any]:
    """Fields of `SamplingParams` by name, as `--generation-config` and its override say.

    Args:
        folder: the one whose generation config `auto` means; it need not have one.

    Raises:
        ConfigError: for a folder without a generation config, and for values that cannot be.
    """
    named = options.generation_config
    found: dict[str, Any] = {}
    if named == "auto":
        found = _read(folder / GENERATION_CONFIG)
    elif named != "none":
        path = Path(named).expanduser() / GENERATION_CONFIG
        if not is_there(path):
            raise ConfigError(
                f"--generation-config {named}: there is no {path}; give auto, none or a folder "
                f"with a {GENERATION_CONFIG}"
            )
        found = _read(path)
    return found | _check("--override-generation-config", options.override_generation_config or {})


def describe_defaults(defaults: Mapping[str, Any]) -> str:
    """One line for the log."""
    if not defaults:
        return "requests that give no sampling parameters are sampled at temperature 1"
    listed = ", ".join(f"{name}={value:g}" for name, value in defaults.items())
    return (
        f"the model's generation config applies where a request says nothing: {listed} "
        f"(--generation-config none turns it off)"
    )


def _read(path: Path) -> dict[str, Any]:
    if not is_there(path):
        return {}
    content = read_json_object(path)
    stated = {name: content[name] for name in SAMPLING_FIELDS if content.get(name) is not None}
    return _check(str(path), stated)


def _check(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(values.keys() - set(SAMPLING_FIELDS)):
        raise ConfigError(
            f"{source} does not know {', '.join(unknown)}; it knows {', '.join(SAMPLING_FIELDS)}"
        )
    try:
        SamplingParams(**values)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error
    return dict(values)
