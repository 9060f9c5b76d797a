"""`atom plan --rehearse`: the engine's flags, and the GPU that is pretended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from atom.command_line.parser import CommandLine
from atom.config import ConfigError, EngineConfig
from atom.model_engine.arg_utils import (
    add_engine_flags,
    add_model,
    engine_config,
    engine_options,
)
from atom.model_loader.errors import WeightError
from atom.model_loader.source import resolve_model
from atom.model_ops.registry import OpUnavailableError
from atom.plan.folders import folder_of
from atom.plan.gpus import NAMES, find_gpu
from atom.plan.rehearsal.libraries import KNOWN, check_names
from atom.plan.rehearsal.rehearse import Rehearsed, Rehearser
from atom.plan.rehearsal.report import format_rehearsal

_READY, _NOT_READY, _REFUSED = 0, 1, 2
_GB = 1e9


def create_parser(prog: str = "python -m atom.plan") -> CommandLine:
    parser = CommandLine(
        prog=f"{prog} --rehearse",
        description="The whole start of an engine on GPUs that are not there, from config.json "
        "alone: memory, kernels of all ranks, graphs, launches, and what is missing. Takes the "
        "engine's flags.",
    )
    add_model(parser)
    add_engine_flags(parser)
    add = parser.add_argument
    add("--rehearse", action="store_true", help="do that, instead of a plan of layouts")
    add("--gpu", default="mi355x", help=f"one of {', '.join(NAMES)}")
    every = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in KNOWN.items())
    add(
        "--installed",
        nargs="*",
        help=f"what is installed beside torch and Triton; all of it unless said ({every})",
    )
    add(
        "--disk-gb-s",
        type=float,
        default=3.0,
        help="GB/s at which weights are read, for the estimate of the start",
    )
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m atom.plan") -> int:
    """Exit status: 0 when all is ready, 1 when it does not fit, ranks differ or something is
    missing, 2 when it cannot be rehearsed.
    """
    args = create_parser(prog).parse_args(argv)
    try:
        if args.disk_gb_s <= 0:
            raise ConfigError(f"--disk-gb-s must be above 0, got {args.disk_gb_s:g}")
        found = _rehearse(engine_options(args), args.gpu, args.installed)
    except (ConfigError, OpUnavailableError, WeightError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _REFUSED
    print(format_rehearsal(found, args.disk_gb_s * _GB))
    return _READY if found.is_ready else _NOT_READY


def _rehearse(options: dict[str, Any], name: str, installed: list[str] | None) -> Rehearsed:
    gpu = find_gpu(name)
    names = check_names(KNOWN[gpu.kind] if installed is None else installed, gpu)
    config = _config(options)
    return Rehearser(gpu).rehearse(config, resolve_model(config.model), names)


def _config(options: dict[str, Any]) -> EngineConfig:
    for name, what in (("device", "--gpu"), ("load_format", "config.json")):
        if name in options:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} has no effect on a rehearsal, which goes by {what}")
    if options.get("model") is None:
        raise ConfigError("name a model: config.json, its folder or a hub id")
    for name in ("model", "draft_model"):
        if name in options:
            options[name] = folder_of(options[name])
    config = engine_config(**options, device="cuda", load_format="dummy")
    parallel = config.parallel
    if parallel.couples_engines:
        raise ConfigError(
            f"a rehearsal is of one engine, and --data-parallel-size {parallel.data_parallel_size} "
            f"with shared experts couples several: leave it out"
        )
    return replace(config, parallel=replace(parallel, data_parallel_size=1))
