"""The `atom` command: its words, and the programs behind them."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from atom.entrypoints.terminal import command, completion
from atom.version import __version__


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == command.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in command.PROGRAMS)
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"atom {__version__}\n"


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["serv"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown command serv; did you mean serve?\n")


@pytest.mark.parametrize("name", command.PROGRAMS)
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: atom {name} ")


def test_errors_name_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["serve", "--prot", "1"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: unknown option --prot; did you mean --port?")
    assert "atom serve --help" in error


def test_python_m_atom() -> None:
    words = [sys.executable, "-m", "atom", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"atom {__version__}\n"


def test_completion(capsys: pytest.CaptureFixture[str]) -> None:
    bash = completion.script("bash")
    assert "serve chat run" in bash
    assert " --max-model-len " in bash
    if (shell := shutil.which("bash")) is not None:
        asked = f"{bash}COMP_WORDS=(atom serve --max-mod) COMP_CWORD=2; _atom; echo $COMPREPLY"
        done = subprocess.run([shell, "-c", asked], capture_output=True, text=True, check=True)
        assert done.stdout == "--max-model-len\n"
    assert "complete -c atom" in completion.script("fish")
    with pytest.raises(SystemExit):
        command.main(["completion", "tcsh"])
    assert "name a shell: bash, zsh, fish" in capsys.readouterr().err
