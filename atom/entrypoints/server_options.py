"""The server's own options and their flags; the engine's are `EngineConfig`."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atom import logs
from atom.entrypoints.parsing.reasoning import REASONING_PARSERS
from atom.entrypoints.parsing.tool_parsers import TOOL_PARSERS
from atom.environment import api_key_from_environment
from atom.model_engine.admission import AdmissionLimits
from atom.multimodal.policy import MediaPolicy
from atom.options.fields import add_flags, build, given_flags, option, options_of
from atom.quoting import quote

UNKNOWN_FIELDS = ("warn", "refuse")
MEDIA_OPTIONS = frozenset(
    [
        "allowed_media_hosts",
        "allowed_local_media_path",
        "max_image_bytes",
        "max_image_pixels",
        "media_fetch_timeout",
    ]
)
# Of requests, where the option is left out.
MAX_BODY_BYTES = 10 * 2**20
MAX_IMAGE_BODY_BYTES = 32 * 2**20
_HOST, _PORT = "127.0.0.1", 8000
TOOL_FORMATS = ("auto", "none", *sorted(TOOL_PARSERS))
REASONING_FORMATS = ("auto", "none", *REASONING_PARSERS)
TOOL_STRICTNESS = ("off", "names", "schemas")
LOG_LEVELS = ("debug", "info", "warning", "error")


class OptionError(ValueError):
    """A server option is wrong; the message says what was given and what is expected."""


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--chat-template: cannot read {path}: {error}") from error


@dataclass(frozen=True)
class ApiKey:
    """A key, and the name of who has it; several keys may have one name."""

    name: str
    key: str = field(repr=False)


def _read_keys(paths: Sequence[str]) -> tuple[ApiKey, ...]:
    """The keys of files, one a line, `KEY` or `NAME: KEY`; blank lines and comments are none.
    Messages quote no key.
    """
    keys: list[ApiKey] = []
    for path in paths:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise OptionError(f"--api-key-file: cannot read {path}: {reason}") from None
        stripped = map(str.strip, lines)
        found = [line for line in stripped if line and not line.startswith("#")]
        if not found:
            raise OptionError(f"--api-key-file: {path} has no key; write one a line")
        keys.extend(map(_read_key, found))
    return tuple(keys)


def _read_key(line: str) -> ApiKey:
    if (named := re.fullmatch(r"([A-Za-z0-9][\w.-]{0,63}):\s+(\S.*)", line, re.ASCII)) is None:
        return ApiKey("", line)
    return ApiKey(*named.groups())


@dataclass(frozen=True)
class ServerOptions:
    """Everything about the server but its engine; `chat_template` is Jinja text."""

    host: str = option(_HOST, "address to listen on")
    port: int = option(_PORT, "port, 0 for any free one")
    uds: str | None = option(
        None, "Unix domain socket to listen on, instead of an address and a port"
    )
    root_path: str = option("", "path under which a proxy shows the server, such as /llm")
    given_api_keys: tuple[str, ...] = option(
        (),
        "key(s) that clients must send; else $ATOM_API_KEY; else the server is open",
        name="api_key",
        parse=tuple,
        is_secret=True,
    )
    file_api_keys: tuple[ApiKey, ...] = option(
        (),
        "file(s) with keys, one a line, KEY or NAME: KEY, that the list of processes does not show",
        name="api_key_file",
        parse=_read_keys,
    )
    ssl_certfile: str | None = option(
        None, "file with the server's certificate and those that vouch for it, PEM; HTTPS then"
    )
    ssl_keyfile: str | None = option(
        None, "file with its key, PEM, not encrypted; in --ssl-certfile when omitted"
    )
    ssl_ca_certs: str | None = option(
        None, "file with the certificates that clients' own must descend from, PEM"
    )
    suffix_cache_across_api_keys: bool = option(
        False, "look up what clients with other keys were answered, too (--suffix-cache-tokens)"
    )
    served_model_names: tuple[str, ...] = option(
        (),
        "name(s) of the model in the API; its own name when omitted",
        name="served_model_name",
        parse=tuple,
    )
    max_waiting_requests: int | None = option(
        None, "answer 429 when more wait; unlimited when omitted"
    )
    max_waiting_tokens: int | None = option(
        None, "answer 429 when prompts that wait have more tokens; unlimited when omitted"
    )
    max_requests_per_key: int | None = option(
        None, "answer 429 when more with one API key run or wait; unlimited when omitted"
    )
    cors_allow_origins: tuple[str, ...] = option(
        (),
        "origin(s) whose web pages may call the server, * for all; none when omitted",
        name="cors_allow_origin",
        alias="cors_allow_origins",
        parse=tuple,
    )
    max_body_bytes: int | None = option(
        None, "largest request body; when omitted 10 MiB, and 32 MiB where the model reads images"
    )
    allowed_media_hosts: tuple[str, ...] = option(
        (),
        "host(s) from which images are fetched, as NAME or NAME:PORT; none when omitted",
        parse=tuple,
    )
    allowed_local_media_path: str | None = option(
        None, "folder below which requests may name image files; none when omitted"
    )
    max_image_bytes: int = option(MediaPolicy.max_bytes, "largest image file")
    max_image_pixels: int = option(MediaPolicy.max_pixels, "most pixels of an image")
    media_fetch_timeout: float = option(
        MediaPolicy.fetch_seconds, "seconds that an image may take to be fetched"
    )
    max_tool_grammar: int = option(
        2 * 2**20,
        "most characters of the grammar of a request's tools: twice their schemas, without "
        "descriptions",
    )
    drain_seconds: float = option(30.0, "time that requests have to end after SIGTERM")
    unknown_fields: str = option(
        "warn",
        "ignore fields that no API here knows, and say so, or refuse",
        choices=UNKNOWN_FIELDS,
    )
    ui: bool = option(True, "show the playground at /")
    log_level: str = option("info", "what the log holds", choices=LOG_LEVELS)
    log_format: str = option("text", "how its lines look", choices=logs.FORMATS)
    enable_log_requests: bool = option(
        False, "log each request: its id, key's name, status, tokens and times, never its texts"
    )
    otlp_traces_endpoint: str | None = option(
        None, "URL of an OpenTelemetry collector that is sent a span for each request, by HTTP"
    )
    metrics_per_api_key: bool = option(False, "count requests and tokens of each API key, too")
    chat_template: str | None = option(
        None, "file with a Jinja chat template", parse=_read_template
    )
    sanitize_control_tokens: bool = option(
        True, "special tokens that messages and tools spell stay text, and open or end no turn"
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls; auto is what its chat template shows",
        choices=TOOL_FORMATS,
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks reasoning; auto is what its chat template shows",
        choices=REASONING_FORMATS,
    )
    tool_strictness: str = option(
        "off",
        "what is enforced of calls that the model decides to make, beside tools with strict: "
        "nothing, that they name a tool, or their arguments' schema, too",
        choices=TOOL_STRICTNESS,
    )
    enable_auto_tool_choice: bool = option(
        True, "let the model decide whether it calls the tools of a request"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise OptionError(f"--port must be in [0, 65535], got {self.port}")
        if self.uds is not None and (self.host, self.port) != (_HOST, _PORT):
            raise OptionError("--uds is instead of --host and --port; give one or the other")
        if self.root_path and not re.fullmatch(r"(/[^/?#\s]+)+", self.root_path):
            raise OptionError(f"--root-path must be a path such as /llm, got {self.root_path!r}")
        self._check_certificates()
        _ = self.media_policy
        if any(not key.strip() for key in self.given_api_keys):
            raise OptionError("--api-key must not be empty")
        if any(not name for name in self.served_model_names):
            raise OptionError("--served-model-name must not be empty")
        _check_at_least("--max-waiting-requests", self.max_waiting_requests, 0)
        _check_at_least("--max-waiting-tokens", self.max_waiting_tokens, 1)
        _check_at_least("--max-requests-per-key", self.max_requests_per_key, 1)
        self._check_keys()
        self._check_traces()
        if self.max_tool_grammar < 1:
            raise OptionError(f"--max-tool-grammar must be at least 1, got {self.max_tool_grammar}")
        if self.max_body_bytes is not None and self.max_body_bytes < 1:
            raise OptionError(f"--max-body-bytes must be at least 1, got {self.max_body_bytes}")
        if not 0 <= self.drain_seconds < float("inf"):
            raise OptionError(f"--drain-seconds must be at least 0, got {self.drain_seconds}")
        _check_name("--unknown-fields", self.unknown_fields, UNKNOWN_FIELDS)
        _check_name("--tool-strictness", self.tool_strictness, TOOL_STRICTNESS)
        _check_name("--tool-call-parser", self.tool_call_parser, TOOL_FORMATS)
        _check_name("--reasoning-parser", self.reasoning_parser, REASONING_FORMATS)

    def _check_keys(self) -> None:
        if len(set(self.api_keys)) < len(self.api_keys):
            raise OptionError("--api-key and --api-key-file give one key twice")
        if self.metrics_per_api_key and not self.api_keys:
            raise OptionError("--metrics-per-api-key needs --api-key or --api-key-file")
        if self.max_requests_per_key is not None and not self.api_keys:
            raise OptionError("--max-requests-per-key needs --api-key or --api-key-file")

    def _check_traces(self) -> None:
        endpoint = self.otlp_traces_endpoint
        if endpoint is None:
            return
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint):
            raise OptionError(
                f"--otlp-traces-endpoint must be a URL such as http://127.0.0.1:4318/v1/traces "
                f"(OTLP by HTTP; gRPC is not spoken), got {quote(endpoint)}"
            )
        if not _can_import("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
            raise OptionError(
                "--otlp-traces-endpoint needs OpenTelemetry's SDK and its exporter by HTTP: "
                "pip install 'atom-llm[otel]'"
            )

    def _check_certificates(self) -> None:
        """A wrong file ends the start, not the first connection."""
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None or self.ssl_ca_certs is not None:
                raise OptionError("--ssl-keyfile and --ssl-ca-certs go with --ssl-certfile")
            return
        import ssl

        def no_password() -> str:
            raise OptionError("the key of --ssl-certfile is encrypted; give one that is not")

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, no_password)
            if self.ssl_ca_certs is not None:
                context.load_verify_locations(self.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:  # the error names no file
            files = [f for f in (self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs) if f]
            raise OptionError(f"cannot serve HTTPS with {', '.join(files)}: {error}") from error

    @property
    def media_policy(self) -> MediaPolicy:
        """Raises:
        OptionError: for hosts, a folder or limits that cannot be.
        """
        try:
            return MediaPolicy(
                self.allowed_media_hosts,
                Path(self.allowed_local_media_path) if self.allowed_local_media_path else None,
                self.max_image_bytes,
                self.max_image_pixels,
                self.media_fetch_timeout,
            )
        except ValueError as error:
            raise OptionError(f"options of images: {error}") from None

    @property
    def media_flags(self) -> list[str]:
        """Those of images that have another value than when they are left out."""
        return [
            option.flag
            for option in options_of(ServerOptions)
            if option.field.name in MEDIA_OPTIONS
            and vars(self)[option.field.name] != option.field.default
        ]

    def check_sharing(self, suffix_cache_tokens: int) -> None:
        """How long an answer takes tells a little about the answers that it was looked up in.

        Raises:
            OptionError: when recent outputs would be shared by keys, and nobody allowed it.
        """
        if suffix_cache_tokens and len(self.api_keys) > 1 and not self.suffix_cache_across_api_keys:
            raise OptionError(
                f"--suffix-cache-tokens {suffix_cache_tokens} would look up what clients with any "
                f"of {len(self.api_keys)} API keys were answered; leave it out, or allow that with "
                f"--suffix-cache-across-api-keys (requests with a cache_salt of their own still "
                f"share nothing)"
            )

    @property
    def tool_format(self) -> str | None:
        """The name in `TOOL_PARSERS`; None also while `auto` has not been replaced."""
        return self.tool_call_parser if self.tool_call_parser in TOOL_PARSERS else None

    @property
    def api_keys(self) -> tuple[str, ...]:
        """All that open the server, wherever they were given; without one it is open."""
        return tuple(each.key for each in self.named_api_keys)

    @property
    def named_api_keys(self) -> tuple[ApiKey, ...]:
        """All keys; those without a name are called by their number, from 1."""
        given = (*(ApiKey("", key) for key in self.given_api_keys), *self.file_api_keys)
        return tuple(
            ApiKey(each.name or f"key-{number}", each.key) for number, each in enumerate(given, 1)
        )

    @property
    def admission(self) -> AdmissionLimits:
        """How much may wait."""
        return AdmissionLimits(
            self.max_waiting_requests, self.max_waiting_tokens, self.max_requests_per_key
        )

    @property
    def reasoning_format(self) -> str | None:
        """The name in `REASONING_PARSERS`; None also while `auto` has not been replaced."""
        return self.reasoning_parser if self.reasoning_parser in REASONING_PARSERS else None

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        add_flags(parser.add_argument_group("server"), cls)

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> ServerOptions:
        """Raises:
        OptionError: for a value that cannot be, or a template file that cannot be read.
        """
        given = given_flags(namespace, cls)
        if (key := api_key_from_environment()) is not None and "api_key_file" not in given:
            given.setdefault("api_key", [key])
        return build(cls, given, "server option")


def _check_at_least(flag: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise OptionError(f"{flag} must be at least {low}, got {value}")


def _can_import(*modules: str) -> bool:
    try:
        return all(importlib.util.find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:  # a package above one of them
        return False


def _check_name(flag: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise OptionError(f"{flag} must be one of {', '.join(known)}, got {name!r}")
