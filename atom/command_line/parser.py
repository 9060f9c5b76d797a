"""A command line whose errors come first, and whose flags may stand in a YAML file, too."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from atom.command_line.foreign_command_line import as_ours, words_of

# How the programs' help looks: what most people need first, then flags by subject.

FIRST = "what most people need first"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows each flag in one spelling, and a switch as --[no-]NAME."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [name for name in action.option_strings if "_" not in name]
        if isinstance(action, argparse.BooleanOptionalAction):
            return ", ".join(f"--[no-]{n[2:]}" for n in names if not n.startswith("--no-"))
        values = self._format_args(action, self._get_default_metavar_for_optional(action))
        return ", ".join(names) + (f" {values}" if action.nargs != 0 else "")

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        if action.type in (int, float):
            return "N"
        return action.dest.rpartition("_")[2].upper()


def format_sections(
    parser: argparse.ArgumentParser,
    groups: Sequence[argparse._ArgumentGroup],
    first: Collection[str],
) -> str:
    """The help of a parser.

    Args:
        first: flags that stand before all others.
    """
    formatter = HelpFormatter(parser.prog)
    positionals = [action for action in parser._actions if not action.option_strings]
    words = " ".join(f"[{action.metavar}]" for action in positionals)
    formatter.add_usage(f"{parser.prog} {words} [options]".replace("  ", " "), [], [])
    formatter.add_text(parser.description)
    chosen = [a for name in first for a in parser._actions if name in a.option_strings]
    sections = [
        (group.title, [a for a in group._group_actions if a not in chosen]) for group in groups
    ]
    if chosen:
        sections.insert(1, (FIRST, chosen))
    for title, actions in sections:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


_POSITIONAL = "positional_"
_ENGINE_FLAG = "--max-num-seqs"


class CommandLine(argparse.ArgumentParser):
    """Flags, `--config FILE` with more of them, and one positional that stands for a flag.

    What the command line says goes before what the file says.

    Args:
        first: flags that the help lists before all others.
    """

    def __init__(self, *, first: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **kwargs)
        self._first = first
        self._stated: dict[argparse.Action, Any] = {}
        self.add_argument(
            "--config",
            metavar="FILE",
            help="YAML file with flags and their values, such as `max-model-len: 4096`; flags on "
            "the command line go before it",
        )

    @property
    def _loads_engine(self) -> bool:
        """Whether it has the engine's flags, and so may be given those of other engines."""
        return _ENGINE_FLAG in self._option_string_actions

    def add_positional(self, name: str, help: str) -> None:
        """Let flag `--name` be given without its name."""
        dest = _POSITIONAL + name
        self.add_argument(dest, nargs="?", metavar=name.upper(), help=help)

    def format_help(self) -> str:
        """The help text, which tells defaults also while they are set aside for parsing."""
        known = {action: self._stated.get(action, action.default) for action in self._actions}
        with _defaults(self._actions, known):
            return format_sections(self, self._action_groups, self._first)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and in one line where to read more; ends the process with code 2."""
        self.exit(2, f"error: {message}\n{self.prog} --help lists the options\n")

    def parse_args(  # type: ignore[override]  # without a namespace to fill
        self, args: Sequence[str] | None = None
    ) -> argparse.Namespace:
        """The values of all flags.

        Unknown flags, in `args` or in the file, end the process with the likeliest one meant.
        """
        given = self._given(args)
        if (path := given.get("config")) is not None:
            given = self._given(self._read_flags(path)) | given
        values = {
            action.dest: action.default
            for action in self._actions
            if action.default is not argparse.SUPPRESS and not action.dest.startswith(_POSITIONAL)
        }
        positionals = (a.dest.removeprefix(_POSITIONAL) for a in self._actions if a.nargs == "?")
        return argparse.Namespace(**(dict.fromkeys(positionals) | values | given))

    def _given(self, args: Sequence[str] | None) -> dict[str, Any]:
        """What was said, without defaults."""
        args = sys.argv[1:] if args is None else args
        if self._loads_engine:
            args = as_ours(args, self._option_string_actions, self.error)
        self._refuse_values_of_switches(args)
        self._stated = {action: action.default for action in self._actions}
        with _defaults(self._actions, dict.fromkeys(self._actions, argparse.SUPPRESS)):
            namespace, unknown = self.parse_known_args(args)
        if unknown:
            flag = unknown[0].partition("=")[0]
            known = [name for name in self._option_string_actions if name.startswith("--")]
            what = "option" if flag.startswith("-") else "argument"
            self.error(f"unknown {what} {flag}{did_you_mean(flag, known)}")
        given = vars(namespace)
        for dest in [dest for dest in given if dest.startswith(_POSITIONAL)]:
            name, value = dest.removeprefix(_POSITIONAL), given.pop(dest)
            if name in given:
                self.error(f"{name.upper()} is given twice: {value} and --{name} {given[name]}")
            given[name] = value
        return given

    def _refuse_values_of_switches(self, args: Sequence[str]) -> None:
        """A truth value behind a switch would be taken for the positional."""
        for flag, value in itertools.pairwise(args):
            action = self._option_string_actions.get(flag)
            if action is None or action.nargs != 0 or value.lower() not in ("true", "false"):
                continue
            off = f"--no-{flag.lstrip('-')}"
            without = off if off in action.option_strings else "leaving it out"
            self.error(f"{flag} takes no value, got {value}: {flag} alone is true, {without} false")

    def _read_flags(self, path: str) -> list[str]:
        """The file's content as flags."""
        import yaml

        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            self.error(f"--config: cannot read {path}: {error}")
        if not isinstance(content, Mapping):
            self.error(f"--config: {path} should hold flags and their values, one a line")
        return self.flags_of(content, f"--config: {path}")

    def flags_of(self, content: Mapping[Any, Any], source: str) -> list[str]:
        """Options by name, with or without underscores, and their values as flags.

        Args:
            source: what errors name.
        """
        known = {
            name.removeprefix("--"): action
            for name, action in self._option_string_actions.items()
            if name.startswith("--") and action.dest not in ("help", "config")
        }
        flags = []
        for name, value in content.items():
            key = str(name).replace("_", "-")
            if key not in known:
                foreign = words_of(key, value) if self._loads_engine else None
                if foreign is not None:
                    flags += foreign
                    continue
                self.error(f"{source}: unknown option {name}{did_you_mean(key, known)}")
            flags += self._flags(known[key], key, value, source)
        return flags

    def _flags(self, action: argparse.Action, key: str, value: Any, source: str) -> list[str]:
        """One option and its value."""
        if value is None:
            return []
        if action.nargs == 0:  # a switch
            if not isinstance(value, bool):
                self.error(f"{source}: {key} should be true or false, got {value!r}")
            if value:
                return [f"--{key}"]
            off = f"--no-{key}"
            return [off] if off in action.option_strings else []
        if isinstance(value, list) and action.nargs is not None:
            return [f"--{key}={each}" for each in value]
        if isinstance(value, (bool, list)):
            self.error(f"{source}: {key} takes one value, got {value!r}")
        return [f"--{key}={json.dumps(value) if isinstance(value, dict) else value}"]


@contextlib.contextmanager
def _defaults(
    actions: Collection[argparse.Action], values: Mapping[argparse.Action, Any]
) -> Iterator[None]:
    """Give flags other default values."""
    before = [action.default for action in actions]
    for action in actions:
        action.default = values[action]
    try:
        yield
    finally:
        for action, default in zip(actions, before, strict=True):
            action.default = default


def did_you_mean(name: str, known: Collection[str]) -> str:
    """What an error about an unknown name ends with."""
    # Dashes, which all flags have, make none alike.
    bare = {each.lstrip("-"): each for each in known}
    close = difflib.get_close_matches(name.lstrip("-"), bare, n=1)
    return f"; did you mean {bare[close[0]]}?" if close else ""
