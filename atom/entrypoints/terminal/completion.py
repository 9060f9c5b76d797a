"""`atom completion`: words that a shell completes, as a script for it.

Write it to a file that the shell reads:

atom completion bash > ~/.local/share/bash-completion/completions/atom
atom completion zsh > ~/.atom-completion    # and `source ~/.atom-completion` in ~/.zshrc
atom completion fish > ~/.config/fish/completions/atom.fish
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Mapping, Sequence

from atom.command_line.parser import CommandLine
from atom.entrypoints.terminal.command import PROGRAMS, Program

_BASH = """\
_atom() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" said="${{COMP_WORDS[*]:1:COMP_CWORD-1}} "
  case "$said" in
{cases}
  esac
}}
complete -o default -F _atom atom
"""
# Words that follow others, and flags anywhere after them.
_WORDS = """    "{said}") COMPREPLY=($(compgen -W "{words}" -- "$word"));;"""
_FLAGS = (
    """    "{said}"*) [[ "$word" == -* ]] && COMPREPLY=($(compgen -W "{flags}" -- "$word"));;"""
)
_SHELLS = ("bash", "zsh", "fish")


def main(argv: Sequence[str] | None = None, *, prog: str = "atom completion") -> int:
    parser = create_parser(prog)
    args = parser.parse_args(argv)
    if args.shell not in _SHELLS:
        parser.error(f"name a shell: {', '.join(_SHELLS)}")
    print(script(args.shell), end="")
    return 0


def create_parser(prog: str = "atom completion") -> CommandLine:
    parser = CommandLine(prog=prog, description=__doc__)
    parser.add_positional("shell", " or ".join(_SHELLS))
    return parser


def script(shell: str) -> str:
    """What the shell should run."""
    if shell == "fish":
        return "\n".join(_fish((), PROGRAMS)) + "\n"
    cases = "\n".join(_cases((), PROGRAMS))
    bash = _BASH.format(cases=cases)
    # zsh runs completions of bash.
    return bash if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{bash}"


def _cases(said: tuple[str, ...], programs: Mapping[str, Program]) -> Iterator[str]:
    """Branches for what may follow the words `said`."""
    for name, program in programs.items():
        words = (*said, name)
        if program.programs:
            yield from _cases(words, program.programs)
        else:
            yield _FLAGS.format(said=" ".join(words) + " ", flags=" ".join(_flags(program)))
    yield _WORDS.format(said=" ".join(said) + " ", words=" ".join(programs))


def _fish(said: tuple[str, ...], programs: Mapping[str, Program]) -> Iterator[str]:
    """Lines for what may follow the words `said`."""
    after = [f"__fish_seen_subcommand_from {word}" for word in said]
    others = f"not __fish_seen_subcommand_from {' '.join(programs)}"
    here = "; and ".join([*after, others]) if said else "__fish_use_subcommand"
    for name, program in programs.items():
        yield f"complete -c atom -n '{here}' -f -a {name} -d '{program.help}'"
        if program.programs:
            yield from _fish((*said, name), program.programs)
        else:
            there = "; and ".join([*after, f"__fish_seen_subcommand_from {name}"])
            # Words of one name stand at several places: `serve`, and `bench serve`.
            if not said:
                there += "; and not __fish_seen_subcommand_from bench"
            for flag in _flags(program):
                yield f"complete -c atom -n '{there}' -l {flag[2:]}"


def _flags(program: Program) -> list[str]:
    """The long flags of a program, without spellings with underscores; none if not installed."""
    if not program.is_installed:
        return []
    module = importlib.import_module(program.entry.partition(":")[0])
    parser: argparse.ArgumentParser = module.create_parser()
    names = (name for action in parser._actions for name in action.option_strings)
    return sorted(name for name in names if name.startswith("--") and "_" not in name)
