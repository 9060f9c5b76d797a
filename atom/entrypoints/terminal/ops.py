"""`atom ops`: which implementation runs each op."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from atom.command_line.parser import CommandLine
from atom.config import ConfigError
from atom.model_engine.arg_utils import (
    add_engine_flags,
    add_model,
    add_no_speculation,
    choose_draft,
    engine_config,
    engine_options,
)


def main(argv: Sequence[str] | None = None, *, prog: str = "atom ops") -> int:
    parser = create_parser(prog)
    args = parser.parse_args(argv)
    try:
        config = engine_config(**choose_draft(engine_options(args), args.no_speculation))
        from atom.model_engine.start_up.show_ops import describe_ops

        print(describe_ops(config))
    except ConfigError as error:
        parser.error(str(error))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def create_parser(prog: str = "atom ops") -> CommandLine:
    parser = CommandLine(
        prog=prog,
        description="Load a model and print which implementation runs each operation, and why no "
        "better one does.",
    )
    add_model(parser)
    add_engine_flags(parser)
    add_no_speculation(parser)
    return parser
