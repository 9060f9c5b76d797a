"""How the programs' help looks: what most people need first, then flags by subject."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence

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
