"""`atom run`: answer one prompt.

The answer goes to standard output as it comes, and nothing else does. Text from standard input, if
it is no terminal, follows the prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from atom.command_line.parser import CommandLine
from atom.config import ConfigError
from atom.entrypoints.offline.start import start_llm
from atom.entrypoints.terminal.settings import (
    SETTING_FLAGS,
    SETTINGS,
    add_setting_flags,
    given_settings,
    read_setting,
)
from atom.entrypoints.terminal.talk import LocalModel, Talk
from atom.model_engine.arg_utils import (
    add_engine_flags,
    add_no_speculation,
    choose_draft,
    engine_options,
)


def main(argv: Sequence[str] | None = None, *, prog: str = "atom run") -> int:
    """Returns 0 when answered, 1 when the engine failed, 130 after Ctrl-C."""
    parser = create_parser(prog)
    args = parser.parse_args(argv)
    try:
        prompt = _read_prompt(args.prompt)
        settings = given_settings(args) | _read_settings(args.set or ())
        llm = start_llm(choose_draft(engine_options(args), args.no_speculation))
        talk = Talk(LocalModel(llm), args.system, settings)
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        answer = talk.ask(prompt, lambda piece: print(piece, end="", flush=True))
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print()
    if args.verbose:
        print(answer.describe(), file=sys.stderr)
    return 0 if answer.finish_reason is not None else 130


def create_parser(prog: str = "atom run") -> CommandLine:
    parser = CommandLine(prog=prog, description=__doc__)
    parser.add_positional("prompt", "a user message")
    parser.add_argument("--system", metavar="TEXT", help="a system prompt")
    parser.add_argument(
        "--set",
        action="append",
        metavar="NAME=VALUE",
        help=f"a parameter of the answer, as its flag says it, too: {', '.join(SETTINGS)}; "
        "repeatable",
    )
    parser.add_argument("--verbose", action="store_true", help="end with what the answer cost")
    add_setting_flags(parser)
    add_engine_flags(parser, without=SETTING_FLAGS)
    add_no_speculation(parser)
    return parser


def _read_prompt(given: str | None) -> str:
    """Raises ConfigError when there is none."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    prompt = "\n\n".join(part for part in (given, piped) if part)
    if not prompt:
        raise ConfigError('say what to answer, such as atom run "Why is the sky blue?"')
    return prompt


def _read_settings(words: Sequence[str]) -> dict[str, Any]:
    """Raises ConfigError for a setting that cannot be."""
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--set {word} should be NAME=VALUE")
        name = name.replace("-", "_")
        try:
            settings[name] = read_setting(name, value)
        except ValueError as error:
            raise ConfigError(f"--set: {error}") from error
    return settings
