"""Engine options as the command line and keyword arguments give them: flat, by name.

What is given is a plain dictionary until `engine_config` makes it an `EngineConfig`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from atom.config import ConfigError, EngineConfig
from atom.model_loader.drafts.shipped import SHIPPED_OPTIONS, shipped_draft_for
from atom.options import add_flags, build, given_flags, options_of

EngineOptions = Mapping[str, Any]


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag per engine option, in kebab and in snake spelling."""
    add_flags(parser.add_argument_group("engine"), EngineConfig)


def add_no_speculation(parser: argparse.ArgumentParser) -> None:
    """Add the flag that turns the shipped draft off, for `choose_draft`."""
    parser.add_argument(
        "--no-speculation",
        action="store_true",
        help="do not use the draft that comes with the package, where there is one for the model",
    )


def add_show_ops(parser: argparse.ArgumentParser) -> None:
    """Add the flag that shows which kernels would run, for `show_ops.describe_ops`."""
    parser.add_argument(
        "--show-ops",
        "--show_ops",
        action="store_true",
        help="load the model, print which implementation runs each operation and why no better "
        "one does, and exit",
    )


def engine_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """What the flags of `add_engine_flags` say."""
    return given_flags(namespace, EngineConfig)


def engine_config(**options: Any) -> EngineConfig:
    """The configuration that engine options stand for.

    Raises:
        TypeError: naming every unknown option and the known ones.
        ConfigError: saying what was given and what is expected.
    """
    return build(EngineConfig, options, "engine argument")


def speculation_of(options: EngineOptions) -> dict[str, Any]:
    """Those of the options that are about speculation."""
    names = {
        each.name
        for each in options_of(EngineConfig)
        if "speculative" in (each.group, each.field.name)
    }
    return {name: value for name, value in options.items() if name in names}


def without_speculation(options: EngineOptions) -> dict[str, Any]:
    """The same engine, proposing no drafts."""
    dropped = speculation_of(options)
    return {name: value for name, value in options.items() if name not in dropped}


def with_shipped_draft(options: EngineOptions) -> dict[str, Any]:
    """The same engine with the draft that comes with the package for its model.

    Unchanged when there is none, or when anything was said about speculation.
    """
    draft = shipped_draft_for(options.get("model"))
    if draft is None or speculation_of(options):
        return dict(options)
    return {**options, **SHIPPED_OPTIONS, "draft_model": str(draft)}


def choose_draft(options: EngineOptions, no_speculation: bool) -> dict[str, Any]:
    """What programs run that speculate unless told not to.

    Args:
        no_speculation: the flag of `add_no_speculation`.

    Raises:
        ConfigError: when the flag contradicts another.
    """
    if no_speculation and speculation_of(options):
        raise ConfigError("--no-speculation and the options of speculation contradict each other")
    return dict(options) if no_speculation else with_shipped_draft(options)
