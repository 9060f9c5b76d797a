"""`atom`: one command for the programs of the package.

atom serve MODEL, atom chat MODEL, atom run PROMPT, ...: each is the `main` of a module, which is
imported when it is chosen.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from atom import torch_start
from atom.command_line.parser import did_you_mean
from atom.version import __version__


class Program(NamedTuple):
    """What a word stands for.

    Attributes:
        help: one line.
        entry: `module:function`, which takes the arguments and `prog`; "" where `programs` says
            what the next word may be.
        distribution: what it comes with, if not with the engine, and the words that install it.
        is_engine: whether it runs an engine in this process, whatever its arguments.
    """

    help: str
    entry: str = ""
    programs: Mapping[str, Program] = MappingProxyType({})
    distribution: str = ""
    is_engine: bool = False

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.entry.partition(".")[0]) is not None


PROGRAMS = {
    "serve": Program(
        "serve a model with the OpenAI and Anthropic APIs", "atom.entrypoints.openai_server:main"
    ),
    "chat": Program("talk to a model in the terminal", "atom.entrypoints.terminal.chat:main"),
    "run": Program("answer one prompt", "atom.entrypoints.terminal.run:main", is_engine=True),
    "demo": Program(
        "what speculation brings on this machine",
        "atom.examples.simple_inference:main",
        is_engine=True,
    ),
    "bench": Program(
        "measure a server or an engine under load",
        programs={
            "serve": Program("load on a running server", "atom.bench.serve:main"),
            "latency": Program("one batch, again and again", "atom.bench.latency:main"),
            "throughput": Program("all prompts at once", "atom.bench.throughput:main"),
        },
    ),
    "plan": Program("how a model is placed on GPUs, and how fast it can be", "atom.plan.cli:main"),
    "train": Program(
        "train a draft for a model",
        "atom_train.cli:main",
        distribution="atom-train, which a clone of the repository has: pip install ./training",
    ),
    "ops": Program("which kernel runs each operation here", "atom.entrypoints.terminal.ops:main"),
    "flight": Program(
        "the last steps of an engine that died", "atom.entrypoints.terminal.flight:main"
    ),
    "completion": Program(
        "completion of these words, for a shell", "atom.entrypoints.terminal.completion:main"
    ),
}
_ABOUT = """
  atom COMMAND --help lists what a command takes; atom --version says which this is.
  Without a model, a small one that comes with the package is used."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program that the first words name; returns its exit code, 2 for an unknown word."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("--version", "-V", "version"):
        print(f"atom {__version__}")
        return 0
    about = Program("LLM inference with lossless speculative decoding.", programs=PROGRAMS)
    return _dispatch("atom", about, words, _ABOUT)


def _dispatch(prog: str, program: Program, words: Sequence[str], about: str = "") -> int:
    if program.entry:
        if not program.is_installed:
            print(f"error: {prog} comes with {program.distribution}", file=sys.stderr)
            return 2
        if program.is_engine and not {"-h", "--help"}.intersection(words):
            torch_start.begin()  # while the program is imported
        module, _, function = program.entry.partition(":")
        status: int = getattr(importlib.import_module(module), function)(words, prog=prog)
        return status
    name = words[0] if words else "--help"
    if name in ("--help", "-h", "help"):
        print(_describe(prog, program), about, sep="\n" if about else "")
        return 0
    chosen = program.programs.get(name)
    if chosen is None:
        hint = did_you_mean(name, program.programs)
        print(f"error: unknown command {name}{hint}\n{prog} --help lists them", file=sys.stderr)
        return 2
    return _dispatch(f"{prog} {name}", chosen, words[1:])


def _describe(prog: str, program: Program) -> str:
    lines = [f"  {name:<11} {each.help}" for name, each in program.programs.items()]
    return "\n".join([f"usage: {prog} COMMAND ...", "", program.help, "", *lines])
