"""The arguments of the Ray Serve application: the server's flags by name, and how it scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from atom.command_line.parser import CommandLine
from atom.config import ConfigError, EngineConfig
from atom.entrypoints.openai_server import create_parser, read_options
from atom.entrypoints.server_options import ServerOptions
from atom.options.fields import Options, add_flags, build, given_flags, option

# Ray Serve's proxies listen, and it runs for ever.
_NOT_HERE = ("host", "port", "uds", "show_ops", "config")


@dataclass(frozen=True)
class ScalingOptions(Options):
    """How many deployment replicas there are."""

    min_replicas: int = option(1, "fewest replicas", at_least=1)
    max_replicas: int = option(1, "most replicas", at_least=1)
    target_ongoing_requests: int | None = option(
        None,
        "requests for each replica, waiting ones included, that autoscaling aims at; as many as "
        "one step takes when omitted",
        at_least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas={self.max_replicas} is less than min_replicas={self.min_replicas}"
            )


@dataclass(frozen=True)
class RayOptions:
    config: EngineConfig
    server: ServerOptions
    scaling: ScalingOptions

    @property
    def num_gpus(self) -> int:
        """Of one deployment replica."""
        return 0 if self.config.device == "cpu" else self.config.parallel.num_ranks

    @property
    def batch_size(self) -> int:
        """Sequences that a deployment replica computes at a time."""
        return self.config.scheduler.max_num_seqs * self.config.parallel.num_replicas


def read_args(args: Mapping[str, Any]) -> RayOptions:
    """The options that `serve run` or a Serve configuration gives; values may be text.

    Raises:
        ConfigError, OptionError: for an unknown option, or a value that cannot be.
    """
    if wrong := ", ".join(sorted({str(name).replace("-", "_") for name in args} & {*_NOT_HERE})):
        raise ConfigError(
            f"{wrong}: not for Ray Serve, whose own configuration says where it listens"
        )
    parser = create_parser(_RaisingCommandLine)
    add_flags(parser.add_argument_group("scaling"), ScalingOptions)
    words = {"true": True, "false": False}
    values = {
        name: words.get(value, value) if isinstance(value, str) else value
        for name, value in args.items()
    }
    namespace = parser.parse_args(parser.flags_of(values, "arguments"))
    config, server = read_options(namespace)
    parallel = config.parallel
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        raise ConfigError(
            "a deployment replica is one machine's; nnodes and distributed_executor_backend=ray "
            "are for a server of its own"
        )
    scaling = build(ScalingOptions, given_flags(namespace, ScalingOptions), "scaling option")
    return RayOptions(config, server, scaling)


class _RaisingCommandLine(CommandLine):
    """Nobody reads what a process of the cluster prints, or may end it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
