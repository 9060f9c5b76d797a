"""The command line, with one subcommand per training step."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from atom_train import calibrate, evaluate, export, synthesize_cli, train_cli

_PROG = "python -m atom_train"
_COMMANDS = {
    "synthesize": synthesize_cli,
    "train": train_cli,
    "export": export,
    "calibrate": calibrate,
    "evaluate": evaluate,
}


def create_parser(prog: str = _PROG) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Trains draft models.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in _COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = _PROG) -> int:
    args = create_parser(prog).parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        args.run(args)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; run the same command again to go on", file=sys.stderr)
        return 130
    return 0
