"""`atom completion`: words that a shell completes, as a script for it.

Put `eval "$(atom completion bash)"` into ~/.bashrc, or zsh into ~/.zshrc, or
`atom completion fish | source` into config.fish.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from atom.command_line import CommandLine
from atom.entrypoints.terminal.command import PROGRAMS

_BASH = """\
_atom() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" = 1 ]; then COMPREPLY=($(compgen -W "{commands}" -- "$word")); return; fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
}}
complete -o default -F _atom atom
"""
_CASE = """    {name}) [[ "$word" == -* ]] && COMPREPLY=($(compgen -W "{flags}" -- "$word"));;"""
_SHELLS = ("bash", "zsh", "fish")


def main(argv: Sequence[str] | None = None, *, prog: str = "atom completion") -> int:
    parser = create_parser(prog)
    args = parser.parse_args(argv)
    if args.shell not in _SHELLS:
        parser.error(f"name a shell: {', '.join(_SHELLS)}")
    print(script(args.shell), end="")
    return 0


def create_parser(prog: str = "atom completion") -> CommandLine:
    parser = CommandLine(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_positional("shell", " or ".join(_SHELLS))
    return parser


def script(shell: str) -> str:
    """What the shell should run."""
    flags = {name: _flags(name) for name in PROGRAMS}
    if shell == "fish":
        lines = [
            f"complete -c atom -n __fish_use_subcommand -f -a {name} -d '{program.help}'"
            for name, program in PROGRAMS.items()
        ]
        lines += [
            f"complete -c atom -n '__fish_seen_subcommand_from {name}' -l {flag[2:]}"
            for name, known in flags.items()
            for flag in known
        ]
        return "\n".join(lines) + "\n"
    cases = "\n".join(_CASE.format(name=name, flags=" ".join(f)) for name, f in flags.items())
    bash = _BASH.format(commands=" ".join(PROGRAMS), cases=cases)
    # zsh runs completions of bash.
    return bash if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{bash}"


def _flags(program: str) -> list[str]:
    """The long flags of a program, without spellings with underscores."""
    module = importlib.import_module(PROGRAMS[program].entry.partition(":")[0])
    parser: argparse.ArgumentParser = module.create_parser()
    names = (name for action in parser._actions for name in action.option_strings)
    return sorted(name for name in names if name.startswith("--") and "_" not in name)
