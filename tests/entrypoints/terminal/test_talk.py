"""`atom chat` and `atom run`: parameters, a conversation, and both through a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from models import checkpoints
from patience import PATIENCE_SECONDS
from scripted_server import ScriptedServer
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.entrypoints.server_options import ServerOptions
from atom.entrypoints.terminal import chat, run
from atom.entrypoints.terminal.remote import RemoteModel
from atom.entrypoints.terminal.settings import (
    SETTING_FLAGS,
    SETTINGS,
    descriptions,
    given_settings,
    read_setting,
)
from atom.entrypoints.terminal.talk import LocalModel, Talk
from atom.model_engine.arg_utils import engine_options


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    path = tmp_path_factory.mktemp("talk")
    checkpoints.llama(path, vocab_size=len(byte_level_tokenizer), max_position_embeddings=65536)
    byte_level_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", num_threads=1, max_model_len=8192) as engine:
        yield engine


def test_settings() -> None:
    assert read_setting("temperature", "0.5") == 0.5
    assert read_setting("max_tokens", "none") is None
    assert read_setting("seed", "7") == 7
    assert read_setting("speculation", "False") is False
    for name, value in (("temperature", "hot"), ("temperature", "-1"), ("top_k", "1.5")):
        with pytest.raises(ValueError, match=name):
            read_setting(name, value)
    with pytest.raises(ValueError, match="unknown setting 'heat'; there are presence_penalty"):
        read_setting("heat", "1")


def test_settings_may_be_text_lists_and_tables() -> None:
    assert read_setting("stop", "END") == "END"
    assert read_setting("stop", "42") == "42"
    assert read_setting("stop", '["a", "b"]') == ["a", "b"]
    assert read_setting("logit_bias", '{"5": -100}') == {5: -100}
    # Its limit is of the answer, not the one that an API has when none is given.
    assert read_setting("min_tokens", "50") == 50
    with pytest.raises(ValueError, match="stop must hold non-empty strings"):
        read_setting("stop", '[""]')


def test_each_parameter_of_an_answer_is_a_flag_with_help() -> None:
    help_of = descriptions()
    assert not [name for name in SETTINGS if not help_of.get(name)]
    for program in (run, chat):
        parser = program.create_parser()
        text = " ".join(parser.format_help().split())
        for name in SETTING_FLAGS:
            assert f"--{name}" in parser._option_string_actions
            assert help_of[name][:40] in text
        given = parser.parse_args(
            [
                "--temperature",
                "0.5",
                "--max-tokens",
                "60",
                "--seed=7",
                "--top_p",
                "0.9",
                "--ignore-eos",
                "--no-skip-special-tokens",
                "--stop",
                "END",
            ]
        )
        assert given_settings(given) == {
            "temperature": 0.5,
            "max_tokens": 60,
            "seed": 7,
            "top_p": 0.9,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "stop": "END",
        }
        # The seed is of the answer; nothing of it is an option of the engine.
        assert engine_options(given) == {}


def _talk(llm: LLM, max_tokens: int, system: str | None = None) -> Talk:
    talk = Talk(LocalModel(llm), system)
    talk.settings |= {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    return talk


def test_a_conversation(llm: LLM) -> None:
    talk = _talk(llm, 8, "Be brief.")
    pieces: list[str] = []
    answer = talk.ask("hello", pieces.append)
    assert "".join(pieces) == answer.text
    assert answer.num_tokens == 8
    assert re.fullmatch(
        r"8 tokens, [\d.]+ a second, the first after [\d.]+ s, cut off at max_tokens .*",
        answer.describe(),
    )
    expected = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": answer.text},
    ]
    assert talk.messages == expected
    rendered = llm.render_chat([{"role": "system", "content": "Be brief."}, expected[0]])
    own = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    assert llm.generate([rendered], own)[0].outputs[0].text == answer.text
    assert talk.take_back() == "hello"
    assert talk.ask("hello", pieces.append).text == answer.text
    talk.reset()
    assert talk.take_back() is None


def test_ctrl_c_keeps_what_came(llm: LLM) -> None:
    talk = _talk(llm, 50)

    def interrupt(_: str) -> None:
        if answer_so_far := len(shown):
            assert answer_so_far == 1
            raise KeyboardInterrupt
        shown.append(_)

    shown: list[str] = []
    answer = talk.ask("hello", interrupt)
    assert answer.describe().endswith("stopped")
    assert 1 <= answer.num_tokens < 50
    assert talk.messages[-1] == {"role": "assistant", "content": answer.text}
    assert not llm.engine.has_unfinished


def test_a_message_that_does_not_fit_is_taken_back(llm: LLM) -> None:
    talk = _talk(llm, 4)
    with pytest.raises(ValueError, match="token"):
        talk.ask("a" * 100_000, print)
    assert talk.messages == []


@pytest.fixture(scope="module")
def server(byte_level_tokenizer: PreTrainedTokenizerFast) -> Iterator[ScriptedServer]:
    """Speculates, is called `far`, and wants a key."""
    options = ServerOptions(served_model_names=("far",), given_api_keys=("secret",))
    server = ScriptedServer(byte_level_tokenizer, options)
    server.model.drafts = lambda number: (2, 1, "eagle3")
    server.says("Blue light scatters most.")
    yield server
    server.stop()


def test_a_conversation_with_a_server(server: ScriptedServer) -> None:
    talk = Talk(RemoteModel(f"{server.url}/v1/", "secret", None), "Be brief.")
    talk.set("seed", "7")
    pieces: list[str] = []
    answer = talk.ask("Why?", pieces.append)
    assert "".join(pieces) == answer.text == "Blue light scatters most."
    assert answer.finish_reason == "stop"
    assert answer.per_forward is not None
    assert 1.5 < answer.per_forward <= 2
    assert server.model.params is not None
    assert server.model.params.seed == 7
    assert "Be brief." in server.prompt
    talk.ask("And why?", pieces.append)
    assert answer.text in server.prompt
    talk.set("speculation", "false")
    plain = talk.ask("Why?", pieces.append)
    assert (plain.per_forward, plain.num_tokens) == (None, answer.num_tokens)
    assert talk.value("top_p") == "the server's"
    with pytest.raises(ValueError, match="8000"):
        talk.ask("a" * 50_000, pieces.append)
    assert len(talk.messages) == 6


def test_a_connection_that_breaks(server: ScriptedServer) -> None:
    talk = Talk(RemoteModel(server.url, "secret", "far"))
    server.model.seconds_per_step = PATIENCE_SECONDS
    with pytest.raises(RuntimeError, match="connection was lost"):
        talk.ask("Why?", lambda _: server.drop_connections())
    server.model.seconds_per_step = 0.0
    assert talk.ask("Why?", print).finish_reason == "stop"


def test_servers_that_do_not_answer(server: ScriptedServer) -> None:
    with pytest.raises(RuntimeError, match=r"no server answers at http://127\.0\.0\.1:9: "):
        RemoteModel("http://127.0.0.1:9", None, None)
    with pytest.raises(RuntimeError, match="give --api-key, or set ATOM_API_KEY"):
        RemoteModel(server.url, None, None)
    with pytest.raises(RuntimeError, match="has no model near; it has far"):
        RemoteModel(server.url, "secret", "near")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "http://127.0.0.1:9", "--dtype", "float32"], "--dtype is for a model in this"),
        (["--url", "http://127.0.0.1:9", "--no-speculation"], "--no-speculation is for a model"),
        (["--url", "http://127.0.0.1:9"], "no server answers at"),
        (["--temperature", "hot"], "temperature cannot be 'hot'"),
        (["--api-key", "k"], "--api-key has no effect without --url"),
        (["no/such-folder"], "no/such-folder"),
    ],
)
def test_what_cannot_be_is_said_plainly(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = chat.main(words)
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error


class PseudoTerminal:
    """A program with a terminal of its own."""

    def __init__(self, *words: str, home: Path) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ |= {"XDG_STATE_HOME": str(home), "TERM": "dumb"}
            os.execv(sys.executable, [sys.executable, "-m", "atom", *words])
        self.seen = ""

    def say(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str, seconds: float = 100) -> str:
        """What was shown up to and with the pattern, which is then forgotten."""
        end = time.monotonic() + seconds
        while (match := re.search(pattern, self.seen)) is None:
            ready, _, _ = select.select([self._fd], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen!r}"
            try:
                self.seen += os.read(self._fd, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended before {pattern!r}: {self.seen!r}") from None
        shown, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return shown

    def interrupt(self, pattern: str) -> str:
        """Sends Ctrl-C's signal until the pattern is shown: `input` notices one that comes between
        the prompt and its waiting only when something else wakes it.
        """
        for seconds in (1, 3, 10, 30):
            os.kill(self.pid, signal.SIGINT)
            with suppress(AssertionError):
                return self.wait_for(pattern, seconds)
        return self.wait_for(pattern)

    def end(self) -> int:
        """The exit code."""
        while True:
            try:
                if not os.read(self._fd, 4096):
                    break
            except OSError:
                break
        _, status = os.waitpid(self.pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)


def test_chat_in_a_terminal(folder: Path, tmp_path: Path) -> None:
    words = (
        "chat",
        str(folder),
        "--dtype",
        "float32",
        "--num-threads",
        "1",
        "--max-model-len",
        "60000",
        "--temperature=0.25",
        "--max-tokens=7",
    )
    terminal = PseudoTerminal(*words, home=tmp_path)
    terminal.wait_for("Ctrl-D leaves\r\n> ")
    terminal.say("/set\n")
    terminal.wait_for(r"temperature 0\.25(?s:.*)max_tokens 7(?s:.*)> ")
    terminal.say("/set temperature 0\n/set max_tokens 5\n/set heat 1\n/show\n")
    terminal.wait_for("error: unknown setting 'heat'")
    terminal.wait_for(r"temperature 0(?s:.*)max_tokens 5(?s:.*)system none")
    terminal.say("hello\n")
    terminal.wait_for(r"\(\d tokens(?s:.*)> ")
    terminal.say("/set max_tokens 50000\nhello\n")
    terminal.wait_for(r"hello\r\n(?s:.*)\S")  # it would end by itself within a second
    os.kill(terminal.pid, signal.SIGINT)
    terminal.wait_for(r"stopped\)(?s:.*)> ")
    terminal.say("\x04")
    assert terminal.end() == 0
    history = (tmp_path / "atom" / "chat_history").read_text()
    assert "hello" in history


def test_chat_with_a_server_in_a_terminal(server: ScriptedServer, tmp_path: Path) -> None:
    words = ("chat", "--url", server.url, "--api-key", "secret")
    terminal = PseudoTerminal(*words, home=tmp_path)
    terminal.wait_for("far; /help lists commands, Ctrl-D leaves\r\n> ")
    terminal.say("Why?\n")
    terminal.wait_for(r"scatters most\.\r\n\S*\(\d+ tokens, .*, 1\.\d\d per forward\)(?s:.*)> ")
    server.model.seconds_per_step = PATIENCE_SECONDS
    terminal.say("Why?\n")
    terminal.wait_for(r"Why\?(?s:.*)B")
    os.kill(terminal.pid, signal.SIGINT)
    terminal.wait_for(r"stopped\)(?s:.*)> ")
    terminal.interrupt(r"\(Ctrl-D leaves\)")
    server.model.seconds_per_step = 0.0
    terminal.say("/hlep\n")
    terminal.wait_for(r"unknown command /hlep; did you mean /help\?")
    terminal.say("/quit\n")
    assert terminal.end() == 0


def test_run(folder: Path) -> None:
    words = [sys.executable, "-m", "atom", "run", "--model", str(folder), "--num-threads", "1"]
    settings = ["--max-tokens", "4", "--set", "temperature=0", "--verbose"]

    def answer(*more: str, piped: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*words, *more], input=piped, capture_output=True, text=True, timeout=240, check=False
        )

    given = answer("hello", *settings)
    assert given.returncode == 0, given.stderr
    assert re.search(r"^\d tokens", given.stderr, re.M)
    nothing = answer()
    assert nothing.returncode == 2
    assert "say what to answer" in nothing.stderr
    wrong = answer("hello", "--set", "heat=1")
    assert wrong.returncode == 2
    assert "unknown setting 'heat'" in wrong.stderr
