"""`atom`: one command for the programs of the package.

atom serve MODEL, atom chat MODEL, atom run PROMPT, ...: each is the `main` of a module, which is
imported when it is chosen.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from atom.command_line import did_you_mean
from atom.version import __version__


class Program(NamedTuple):
    """`module:function`, which takes the arguments and `prog`, and a line of help."""

    entry: str
    help: str


PROGRAMS = {
    "serve": Program(
        "atom.entrypoints.openai_server:main", "serve a model with the OpenAI and Anthropic APIs"
    ),
    "chat": Program("atom.entrypoints.terminal.chat:main", "talk to a model in the terminal"),
    "run": Program("atom.entrypoints.terminal.run:main", "answer one prompt"),
    "bench": Program(
        "atom.examples.simple_inference:main", "what speculation brings on this machine"
    ),
    "plan": Program("atom.plan.cli:main", "how a model lies on GPUs, and how fast it can be"),
    "train": Program("atom.training.cli:main", "train a draft for a model"),
    "ops": Program("atom.entrypoints.terminal.ops:main", "which kernel runs each operation here"),
    "completion": Program(
        "atom.entrypoints.terminal.completion:main", "completion of these words, for a shell"
    ),
}


def describe() -> str:
    """The help text."""
    lines = [
        "usage: atom COMMAND ...",
        "",
        "LLM inference with lossless speculative decoding.",
        "",
        *(f"  {name:<11} {program.help}" for name, program in PROGRAMS.items()),
        "",
        "  atom COMMAND --help lists what a command takes; atom --version says which this is.",
        "  Without a model, a small one that comes with the package is used.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program that the first word names; returns its exit code, 2 for an unknown word."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name in ("--help", "-h", "help"):
        print(describe())
        return 0
    if name in ("--version", "-V", "version"):
        print(f"atom {__version__}")
        return 0
    program = PROGRAMS.get(name)
    if program is None:
        print(
            f"error: unknown command {name}{did_you_mean(name, PROGRAMS)}\natom --help lists them",
            file=sys.stderr,
        )
        return 2
    module, _, function = program.entry.partition(":")
    status: int = getattr(importlib.import_module(module), function)(words[1:], prog=f"atom {name}")
    return status


def run() -> None:
    """The installed script."""
    from atom.entrypoints.process_exit import end_process

    end_process(main())
