"""`atom chat`: a conversation in the terminal.

atom chat                              # with a model in this process
atom chat MODEL
atom chat --url http://127.0.0.1:8000  # with a running server

Ctrl-C stops an answer, Ctrl-D leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator, Sequence

from atom.command_line.parser import CommandLine, did_you_mean
from atom.config import ConfigError
from atom.entrypoints.offline.start import start_llm
from atom.entrypoints.terminal.settings import (
    SETTING_FLAGS,
    SETTINGS,
    add_setting_flags,
    given_settings,
)
from atom.entrypoints.terminal.talk import ChatModel, LocalModel, Talk
from atom.environment import api_key_from_environment, history_file
from atom.model_engine.arg_utils import (
    add_engine_flags,
    add_model,
    add_no_speculation,
    choose_draft,
    engine_options,
)

HELP = """\
/set              the parameters of answers
/set NAME VALUE   change one; none for what may be left out
/show             the parameters and the system prompt
/system [TEXT]    a system prompt; without a text, none
/retry            answer the last message again
/reset            forget the conversation
/help             this
/quit             leave, as Ctrl-D does
Ctrl-C stops an answer. Everything else is said to the model."""
_PROMPT = "> "


def main(argv: Sequence[str] | None = None, *, prog: str = "atom chat") -> int:
    parser = create_parser(prog)
    args = parser.parse_args(argv)
    try:
        settings = given_settings(args)
    except ValueError as error:
        parser.error(str(error))
    try:
        model = _connect(args) if args.url is not None else _load(args)
    except ConfigError as error:
        parser.error(str(error))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{model.name}; /help lists commands, Ctrl-D leaves")
    with _history():
        Terminal(Talk(model, args.system, settings)).run()
    return 0


def create_parser(prog: str = "atom chat") -> CommandLine:
    parser = CommandLine(prog=prog, description=__doc__)
    add_model(parser)
    parser.add_argument(
        "--url", help="of a running OpenAI-compatible server to talk to; --model names its model"
    )
    parser.add_argument("--api-key", metavar="KEY", help="of that server; else $ATOM_API_KEY")
    parser.add_argument("--system", metavar="TEXT", help="a system prompt")
    add_setting_flags(parser)
    add_engine_flags(parser, without=SETTING_FLAGS)
    add_no_speculation(parser)
    return parser


def _connect(args: argparse.Namespace) -> ChatModel:
    from atom.entrypoints.terminal.remote import RemoteModel

    others = sorted(set(engine_options(args)) - {"model"})
    if args.no_speculation:
        others.append("no_speculation")
    if others:
        flag = others[0].replace("_", "-")
        raise ConfigError(f"--{flag} is for a model in this process; --url talks to a server")
    return RemoteModel(args.url, args.api_key or api_key_from_environment(), args.model)


def _load(args: argparse.Namespace) -> ChatModel:
    if args.api_key is not None:
        raise ConfigError("--api-key has no effect without --url")
    return LocalModel(start_llm(choose_draft(engine_options(args), args.no_speculation)))


def _unknown(command: str) -> str:
    commands = [line.split()[0] for line in HELP.splitlines() if line.startswith("/")]
    return f"unknown command {command}{did_you_mean(command, commands)}\n{HELP}"


class Terminal:
    """Reads lines and prints answers."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> None:
        """Until the end of the input."""
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        """A line; None at the end."""
        while True:
            try:
                return input(_PROMPT if self._is_terminal else "").strip()
            except EOFError:
                if self._is_terminal:
                    print()
                return None
            except KeyboardInterrupt:
                print("\n(Ctrl-D leaves)")

    def _answer(self, text: str) -> None:
        try:
            answer = self._talk.ask(text, lambda piece: print(piece, end="", flush=True))
        except (ValueError, RuntimeError) as error:
            print(f"error: {error}")
            return
        print(f"\n{self._dim(f'({answer.describe()})')}")

    def _command(self, line: str) -> bool:
        """Whether to go on."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit"):
            return False
        if name == "/reset":
            self._talk.reset()
        elif name == "/retry":
            if (text := self._talk.take_back()) is None:
                print("nothing was said yet")
            else:
                self._answer(text)
        elif name == "/system":
            self._talk.system = rest or None
        elif name == "/set":
            self._set(rest)
        elif name == "/show":
            self._show()
        else:
            print(HELP if name == "/help" else _unknown(name))
        return True

    def _set(self, rest: str) -> None:
        if not rest:
            self._show_settings()
            return
        name, _, value = re.sub(r"[=\s]+", " ", rest, count=1).partition(" ")
        try:
            self._talk.set(name.replace("-", "_"), value)
        except ValueError as error:
            print(f"error: {error}")

    def _show(self) -> None:
        self._show_settings()
        print(f"system {self._talk.system or 'none'}")

    def _show_settings(self) -> None:
        for name in SETTINGS:
            print(f"{name} {self._talk.value(name)}")

    def _dim(self, text: str) -> str:
        return f"\033[2m{text}\033[0m" if sys.stdout.isatty() else text


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Lines of earlier conversations, with the arrow keys, if this is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        import readline
    except ImportError:  # not on every platform
        yield
        return
    path = history_file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        readline.read_history_file(path)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.write_history_file(path)
            path.chmod(0o600)
