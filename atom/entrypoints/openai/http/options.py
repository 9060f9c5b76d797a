"""The server's own options and their flags; the engine's are `EngineArgs`."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from atom.config import api_key_from_environment
from atom.entrypoints.openai.parsing.reasoning import REASONING_PARSERS
from atom.entrypoints.openai.parsing.tool_parsers import TOOL_PARSERS

LOG_LEVELS = ("debug", "info", "warning", "error")

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_MAX_BODY_BYTES = 10 * 2**20
DEFAULT_DRAIN_SECONDS = 30.0


class OptionError(ValueError):
    """A server option is wrong; the message says what was given and what is expected."""


@dataclass(frozen=True)
class ServerOptions:
    """Attributes:
    port: 0 takes any free port.
    api_keys: any of them opens every route; without one the server is open.
    served_model_names: what requests may call the model; the engine's name when empty.
    max_waiting_requests: requests that may wait for the engine; None is unlimited.
    cors_allow_origins: origins whose pages may call the server; `*` is all.
    drain_seconds: how long requests in flight may go on after SIGTERM or SIGINT.
    chat_template: Jinja text that replaces the tokenizer's own template.
    tool_call_parser, reasoning_parser: how the model writes tool calls and reasoning.
    enable_auto_tool_choice: requests may leave it to the model whether it calls tools.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    max_waiting_requests: int | None = None
    cors_allow_origins: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    drain_seconds: float = DEFAULT_DRAIN_SECONDS
    log_level: str = "info"
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_auto_tool_choice: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise OptionError(f"--port must be in [0, 65535], got {self.port}")
        if any(not key.strip() for key in self.api_keys):
            raise OptionError("--api-key must not be empty")
        if any(not name for name in self.served_model_names):
            raise OptionError("--served-model-name must not be empty")
        if self.max_waiting_requests is not None and self.max_waiting_requests < 0:
            raise OptionError(
                f"--max-waiting-requests must be at least 0, got {self.max_waiting_requests}"
            )
        if self.max_body_bytes < 1:
            raise OptionError(f"--max-body-bytes must be at least 1, got {self.max_body_bytes}")
        if not 0 <= self.drain_seconds < float("inf"):
            raise OptionError(f"--drain-seconds must be at least 0, got {self.drain_seconds}")
        _check_name("--tool-call-parser", self.tool_call_parser, TOOL_PARSERS)
        _check_name("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS)
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise OptionError("--enable-auto-tool-choice needs --tool-call-parser NAME")

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("server")
        add = group.add_argument
        add("--host", default=DEFAULT_HOST, help="address to listen on (default: %(default)s)")
        add(
            "--port",
            type=int,
            default=DEFAULT_PORT,
            help="port, 0 for any free one (default: %(default)s)",
        )
        add(
            "--api-key",
            action="extend",
            nargs="+",
            default=[],
            help="key(s) that clients must send; else $ATOM_API_KEY; else the server is open",
        )
        add(
            "--served-model-name",
            action="extend",
            nargs="+",
            default=[],
            help="name(s) of the model in the API; its own name when omitted",
        )
        add(
            "--max-waiting-requests",
            type=int,
            help="answer 429 when more wait; unlimited when omitted",
        )
        add(
            "--cors-allow-origin",
            "--cors-allow-origins",
            action="extend",
            nargs="+",
            default=[],
            help="origin(s) whose web pages may call the server; none when omitted",
        )
        add(
            "--max-body-bytes",
            type=int,
            default=DEFAULT_MAX_BODY_BYTES,
            help="largest request body (default: %(default)s)",
        )
        add(
            "--drain-seconds",
            type=float,
            default=DEFAULT_DRAIN_SECONDS,
            help="time that requests have to end after SIGTERM (default: %(default)s)",
        )
        add("--log-level", choices=LOG_LEVELS, default="info", help="(default: %(default)s)")
        add("--chat-template", type=Path, help="file with a Jinja chat template")
        add(
            "--tool-call-parser",
            metavar="NAME",
            help=f"how the model writes tool calls: {', '.join(TOOL_PARSERS)}",
        )
        add(
            "--reasoning-parser",
            metavar="NAME",
            help=f"how the model marks reasoning: {', '.join(REASONING_PARSERS)}",
        )
        add(
            "--enable-auto-tool-choice",
            action="store_true",
            help="let the model decide whether it calls the tools of a request",
        )

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> ServerOptions:
        """Raises:
        OptionError: for a value that cannot be, or a template file that cannot be read.
        """
        key = api_key_from_environment()
        return cls(
            host=namespace.host,
            port=namespace.port,
            api_keys=tuple(namespace.api_key) or ((key,) if key else ()),
            served_model_names=tuple(namespace.served_model_name),
            max_waiting_requests=namespace.max_waiting_requests,
            cors_allow_origins=tuple(namespace.cors_allow_origin),
            max_body_bytes=namespace.max_body_bytes,
            drain_seconds=namespace.drain_seconds,
            log_level=namespace.log_level,
            chat_template=_read_template(namespace.chat_template),
            tool_call_parser=namespace.tool_call_parser,
            reasoning_parser=namespace.reasoning_parser,
            enable_auto_tool_choice=namespace.enable_auto_tool_choice,
        )


def _check_name(flag: str, name: str | None, known: Collection[str]) -> None:
    if name is not None and name not in known:
        raise OptionError(f"{flag} must be one of {', '.join(known)}, got {name!r}")


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--chat-template: cannot read {path}: {error}") from error
