"""The `atom` command: its words, and the programs behind them."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from atom.__main__ import run
from atom.entrypoints import process_exit
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
    assert command.main(["bench", "srve"]) == 2
    assert "did you mean serve?\natom bench --help" in capsys.readouterr().err


def test_ctrl_c_ends_the_process_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "main", interrupted)
    monkeypatch.setattr(process_exit.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as raised:
        run()
    assert raised.value.code == 130
    assert not capsys.readouterr().err


# Presses Ctrl-C at each import, in a process that is forked there, and says how that ends.
_INTERRUPTED_AT_EACH_IMPORT = """
import os, signal, sys
from atom.__main__ import run

class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if child := os.fork():
            print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        else:
            sys.meta_path.remove(Finder)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
sys.argv = ["atom", "--version"]
run()
"""


def test_ctrl_c_ends_imports_quietly() -> None:
    command = [sys.executable, "-c", _INTERRUPTED_AT_EACH_IMPORT]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    *imports, version = ended.stdout.splitlines()
    assert version == f"atom {__version__}"
    codes = dict(line.split() for line in imports)
    assert set(codes.values()) == {"130"}
    assert {"atom.entrypoints.terminal.command", "atom.torch_start"} <= codes.keys()
    assert not ended.stderr


def test_ctrl_c_stays_ignored() -> None:
    """As in programs that a shell starts in the background."""
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    program += "from atom import __main__; from atom.entrypoints import process_exit; "
    program += "says = lambda _: print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN); "
    program += "process_exit.end_process = says; "
    program += "sys.argv = ['atom', '--version']; __main__.run()"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout == f"atom {__version__}\nTrue\n", said.stderr


def _all_words() -> Iterator[list[str]]:
    for name, program in command.PROGRAMS.items():
        yield [name]
        yield from ([name, inner] for inner in program.programs)


@pytest.mark.parametrize("words", list(_all_words()), ids=" ".join)
def test_each_command_has_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        command.main([*words, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: atom {' '.join(words)} ")


def test_training_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "atom_train" else find(name)
    )
    assert command.main(["train", "synthesize"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: atom train comes with atom-train")
    assert error.endswith(": pip install ./training\n")
    assert '"train "*' in completion.script("bash")


def test_the_help_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten flags first, then subjects; each flag once, in one spelling."""
    with pytest.raises(SystemExit):
        command.main(["serve", "--help"])
    out = capsys.readouterr().out
    sections = re.split(r"^(\S.*):$", out, flags=re.M)
    titles, contents = sections[1::2], sections[2::2]
    assert titles[:3] == ["positional arguments", "what most people need first", "options"]
    assert titles[-7:][:3] == ["model and weights", "speculation", "memory for keys and values"]
    flags = [re.findall(r"^  (--\S+?),? ", content, re.M) for content in contents]
    assert len(flags[1]) == 10
    everything = [flag for section in flags for flag in section]
    assert len(everything) == len(set(everything)) >= 60
    assert "--[no-]ui" in everything
    assert not [flag for flag in everything if "_" in flag]


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
    shell = shutil.which("bash")
    assert shell is not None
    for words, last, expected in (
        ("atom ser", 1, "serve"),
        ("atom serve --max-mod", 2, "--max-model-len"),
        ("atom bench lat", 2, "latency"),
        ("atom bench serve --num-pr", 3, "--num-prompts"),
    ):
        asked = f"{bash}COMP_WORDS=({words}) COMP_CWORD={last}; _atom; echo $COMPREPLY"
        done = subprocess.run([shell, "-c", asked], capture_output=True, text=True, check=True)
        assert done.stdout == f"{expected}\n"
    assert completion.script("zsh").endswith(bash)
    fish = completion.script("fish").splitlines()
    assert [line for line in fish if "-a latency" in line and "from bench" in line]
    inner = [line for line in fish if line.endswith(" -l num-iters")]
    assert len(inner) == 1
    assert "from bench; and __fish_seen_subcommand_from latency" in inner[0]
    with pytest.raises(SystemExit):
        command.main(["completion", "tcsh"])
    assert "name a shell: bash, zsh, fish" in capsys.readouterr().err
