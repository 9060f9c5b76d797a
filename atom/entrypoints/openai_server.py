"""`python -m atom.entrypoints.openai_server`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from atom import logs, torch_start
from atom.command_line.parser import CommandLine
from atom.config import ConfigError, EngineConfig
from atom.entrypoints.process_exit import end_process
from atom.entrypoints.server.listening import bind, bind_uds
from atom.entrypoints.server_options import OptionError, ServerOptions
from atom.messages import EngineDeadError
from atom.model_engine.arg_utils import (
    add_engine_flags,
    add_model,
    add_no_speculation,
    add_show_ops,
    choose_draft,
    engine_config,
    engine_options,
)
from atom.model_engine.processes.launched import run_as_follower_if_launched
from atom.model_engine.processes.spawn import SpawnedEngines, spawned_engines
from atom.model_loader.errors import WeightError
from atom.model_loader.locate import is_here
from atom.pooling.source import PoolingSource, pooling_source

_PROG = "python -m atom.entrypoints.openai_server"
_FIRST = (
    *("--host", "--port", "--api-key", "--served-model-name"),
    *("--max-model-len", "--quantization", "--tensor-parallel-size"),
    *("--method", "--draft-model", "--num-speculative-tokens"),
)


def main(argv: Sequence[str] | None = None, *, prog: str = _PROG) -> int:
    """Serve until stopped, or show the ops.

    Returns:
        The exit code: 0 after a signal or the table of ops, 1 after a failure.
    """
    torch_start.begin(loads=False)  # only models that embed, score or see need it in here
    parser = create_parser(prog=prog)
    namespace = parser.parse_args(argv)
    try:
        config, options = read_options(namespace)
    except (ConfigError, OptionError) as error:
        parser.error(str(error))
    logs.set_up(options.log_format, level=options.log_level.upper())
    logging.getLogger("uvicorn").setLevel(
        logging.DEBUG if options.log_level == "debug" else logging.WARNING
    )
    try:
        status = run_as_follower_if_launched(config)
    except ConfigError as error:
        parser.error(str(error))
    if status is not None:
        return status
    if namespace.show_ops:
        return show_ops(config)
    return serve_forever(config, options)


def create_parser(kind: type[CommandLine] = CommandLine, *, prog: str = _PROG) -> CommandLine:
    parser = kind(
        prog=prog, description="Serve a model with the OpenAI and Anthropic APIs.", first=_FIRST
    )
    add_model(parser)
    ServerOptions.add_cli_args(parser)
    add_engine_flags(parser)
    add_no_speculation(parser)
    add_show_ops(parser)
    return parser


def read_options(namespace: argparse.Namespace) -> tuple[EngineConfig, ServerOptions]:
    """What the flags of `create_parser` say.

    Raises:
        ConfigError, OptionError: for values that cannot be.
    """
    options = ServerOptions.from_cli_args(namespace)
    given = choose_draft(engine_options(namespace), namespace.no_speculation)
    config = engine_config(**given)
    if config.speculative is not None:
        options.check_sharing(config.speculative.suffix_cache_tokens)
    return config, options


def show_ops(config: EngineConfig) -> int:
    """Print the table of ops; returns the exit code."""
    # After the options were found right: these imports bring torch.
    from atom.model_engine.start_up.show_ops import describe_ops

    try:
        print(describe_ops(config))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def serve_forever(config: EngineConfig, options: ServerOptions) -> int:
    where = options.uds or f"{options.host}:{options.port}"
    try:
        sock = bind_uds(options.uds) if options.uds else bind(options.host, options.port)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE and not options.uds
        hint = "; --port chooses another" if is_taken else ""
        print(f"error: cannot listen on {where}: {error}{hint}", file=sys.stderr)
        return 1
    with sock:
        try:
            return _serve(config, options, sock)
        except (ConfigError, OptionError, WeightError, EngineDeadError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            if options.uds:
                Path(options.uds).unlink(missing_ok=True)


def _serve(config: EngineConfig, options: ServerOptions, sock: socket.socket) -> int:
    if not is_here(config.model):  # what is downloaded may be stopped by a signal
        return _run(config, options, sock, None)
    if (source := pooling_source(config)) is not None:
        return _run(config, options, sock, source)
    with spawned_engines(config) as engines:
        return _run(config, options, sock, engines)


def _run(
    config: EngineConfig,
    options: ServerOptions,
    sock: socket.socket,
    model: PoolingSource | SpawnedEngines | None,
) -> int:
    # The engines' processes import torch while this one does.
    from atom.entrypoints.server.serve import serve

    return _run_loop(serve(config, options, sock, model))


def _run_loop(main: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:  # not for every platform
        return asyncio.run(main)
    return uvloop.run(main)


def _leave(*_: object) -> None:
    """Before `serve` handles signals; the first process of a container has no default action."""
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    end_process(main())
