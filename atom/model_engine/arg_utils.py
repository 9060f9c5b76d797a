"""Engine options as a flat dictionary, from command-line flags or keyword arguments.

`engine_config` validates the dictionary and makes it an `EngineConfig`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping
from typing import Any

from atom.command_line.parser import CommandLine
from atom.config import ConfigError, EngineConfig
from atom.model_loader.drafts.shipped import SHIPPED_OPTIONS, shipped_draft_for
from atom.options.fields import (
    add_flags_by_subject,
    build,
    given_flags,
    options_of,
    with_gpu_defaults,
)
from atom.torch_start import is_for_gpus

EngineOptions = Mapping[str, Any]

_CHOOSE_DRAFTS = {"method", "draft_model", "speculative_config"}


# The sections of the help.
SUBJECTS: Mapping[str | None, str] = {
    "model": "model and weights",
    "speculative": "speculation",
    "cache": "memory for keys and values",
    "scheduler": "batches",
    "graphs": "recorded steps",
    "parallel": "several GPUs and machines, threads",
    None: "engine",
}


def add_engine_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add a flag for each engine option, as --kebab-case and --snake_case.

    Args:
        without: options whose names are those of other flags of the program.
    """
    add_flags_by_subject(parser, EngineConfig, SUBJECTS, without)


def add_model(parser: CommandLine) -> None:
    """Let the model be named without a flag."""
    parser.add_positional("model", "what --model says")


def add_no_speculation(parser: argparse.ArgumentParser) -> None:
    """Add --no-speculation, which disables the shipped draft model (see `choose_draft`)."""
    parser.add_argument(
        "--no-speculation",
        action="store_true",
        help="do not use the draft that comes with the package, where there is one for the model",
    )


def add_show_ops(parser: argparse.ArgumentParser) -> None:
    """Add --show-ops, which prints the selected kernels (see `show_ops.describe_ops`)."""
    parser.add_argument(
        "--show-ops",
        "--show_ops",
        action="store_true",
        help="load the model, print which implementation runs each operation and why no better "
        "one does, and exit",
    )


def engine_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given on the command line."""
    return given_flags(namespace, EngineConfig)


def engine_config(**options: Any) -> EngineConfig:
    """Build the configuration from engine options; on a GPU, some have other defaults.

    Raises:
        TypeError: for unknown options, with their names and the known ones.
        ConfigError: for an invalid value, with what is expected.
    """
    if _is_for_gpu(options.get("device")):
        tokens, seqs = options.get("max_num_batched_tokens"), options.get("max_num_seqs")
        options = with_gpu_defaults(EngineConfig, options)
        if isinstance(tokens, int) and seqs is None:  # no more than a step has tokens
            options["max_num_seqs"] = max(min(options["max_num_seqs"], tokens), 1)
    return build(EngineConfig, options, "engine argument")


def _is_for_gpu(device: str | None) -> bool:
    """Whether `device` is a GPU, or may be one and there is one."""
    if device in (None, "auto"):
        if sys.modules.get("torch") is None and not is_for_gpus():
            return False
        from atom.platform import num_gpus  # imports torch

        return num_gpus() > 0
    return device != "cpu"


def speculation_of(options: EngineOptions) -> dict[str, Any]:
    """The speculative decoding options among `options`."""
    names = {
        each.name
        for each in options_of(EngineConfig)
        if "speculative" in (each.group, each.field.name)
    }
    return {name: value for name, value in options.items() if name in names}


def without_speculation(options: EngineOptions) -> dict[str, Any]:
    """The options without those of speculative decoding."""
    dropped = speculation_of(options)
    return {name: value for name, value in options.items() if name not in dropped}


def with_shipped_draft(options: EngineOptions) -> dict[str, Any]:
    """Add the draft model that the package ships for this model, and how it runs.

    What the options say of speculation goes before that. Returns them unchanged when there is no
    such draft, or when they say what to draft with.
    """
    draft = shipped_draft_for(options.get("model"))
    if draft is None or _CHOOSE_DRAFTS & options.keys():
        return dict(options)
    given = {name: value for name, value in options.items() if value is not None}
    return {**SHIPPED_OPTIONS, "draft_model": str(draft), **given}


def choose_draft(options: EngineOptions, no_speculation: bool) -> dict[str, Any]:
    """The options with the shipped draft model added, or without it if `no_speculation`.

    Args:
        no_speculation: value of the --no-speculation flag.

    Raises:
        ConfigError: when the flag is combined with a speculative option.
    """
    if no_speculation and any(value is not False for value in speculation_of(options).values()):
        raise ConfigError("--no-speculation and the options of speculation contradict each other")
    return dict(options) if no_speculation else with_shipped_draft(options)
