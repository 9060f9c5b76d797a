"""The command line of the planning tool."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch

from atom.command_line.parser import CommandLine
from atom.config import STATE_DTYPES, ConfigError, ModelOptions, parse_count
from atom.model_loader.source import ModelSource, resolve_model
from atom.plan.folders import folder_of
from atom.plan.gpus import NAMES, Gpu, find_gpu
from atom.plan.layouts import Costs, Load, Plan, plan_layouts
from atom.plan.sizes import RankSizes, rank_sizes

# A plan as text, with its arithmetic.

_HEADER = ("layout", "weights", "KV cache", "other", "of memory", "step", "per user", "in all")


def format_plans(plans: Sequence[Plan], gpu: Gpu) -> str:
    """One row per layout; layouts that do not fit say by how much."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for plan in plans:
        share = f"{plan.needed / plan.room:.0%}"
        speeds = [f"{plan.step * 1e3:.2f} ms", f"{plan.tokens_per_user:.0f} tok/s"]
        speeds += [f"{plan.tokens:.0f} tok/s"]
        rows.append(
            (
                plan.name,
                _gb(plan.weights),
                _gb(plan.kv_cache),
                _gb(plan.needed - plan.weights - plan.kv_cache),
                share,
                *(speeds if plan.fits else [f"needs {_gb(plan.needed - plan.room)} more", "", ""]),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(
        [f"per {gpu.name} ({_gb(gpu.memory)}, {gpu.bandwidth / 1e12:.2f} TB/s):", *lines]
    )


def explain(plan: Plan, sizes: RankSizes, gpu: Gpu, load: Load, costs: Costs) -> str:
    """How the numbers of one layout come about; `sizes` are those of the whole model."""
    per_token = sizes.cached_token
    lines = [
        f"arithmetic of {plan.name}:",
        f"  model: {_gb(sizes.weights)} of weights, {per_token / 1024:.1f} KiB of KV cache a token",
        f"  KV cache of a GPU: {plan.sequences} sequences x {load.context} tokens = "
        f"{_gb(plan.kv_cache)}",
        f"  read in a step by a GPU: {_gb(plan.read)} of weights and KV cache, at "
        f"{costs.efficiency:.0%} of {gpu.bandwidth / 1e12:.2f} TB/s = "
        f"{plan.read / gpu.bandwidth / costs.efficiency * 1e3:.2f} ms",
    ]
    if sizes.num_experts:
        rows = load.concurrency * load.queries
        lines.append(
            f"  experts: {rows} rows visit {sizes.top_k} of {sizes.num_experts} each; the step "
            f"reads those that some row visits"
        )
    if plan.num_gpus > 1:
        lines.append(
            f"  collectives: 2 x {sizes.num_layers} layers x {costs.collective * 1e6:.0f} us = "
            f"{2 * sizes.num_layers * costs.collective * 1e3:.2f} ms"
        )
    lines.append(
        f"  a sequence gets {load.tokens_per_forward:g} tokens a step: "
        f"{plan.tokens_per_user:.0f} tok/s; no computation, launch or wait is counted"
    )
    return "\n".join(lines)


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


_CACHE_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_STATE_DTYPES = {name: getattr(torch, name) for name in STATE_DTYPES}


def create_parser(prog: str = "python -m atom.plan") -> CommandLine:
    parser = CommandLine(
        prog=prog,
        description="How a model is placed on GPUs, and what bounds its speed, from its config.",
    )
    parser.add_positional("model", "the same as --model")
    add = parser.add_argument
    add(
        "--rehearse",
        action="store_true",
        help="rehearse a whole start instead, with the engine's flags: --rehearse --help",
    )
    add("--model", help="config.json, a folder that holds it, or a hub id")
    add("--gpu", default="mi355x", help=f"one of {', '.join(NAMES)}")
    add("--gpus", type=int, nargs="+", default=[1, 2, 4, 8], help="how many, each planned")
    add("--context", default="8k", help="tokens of each sequence, such as 32k")
    add("--concurrency", type=int, default=1, help="sequences at once, over all GPUs")
    add("--kv-cache-dtype", choices=tuple(_CACHE_DTYPES), default="bf16")
    add("--mamba-ssm-cache-dtype", choices=STATE_DTYPES, default="float32")
    add("--tokens-per-forward", type=float, default=1.0, help="with speculation, such as 2.4")
    add("--num-speculative-tokens", type=int, default=0, help="drafts of a decode step")
    add("--efficiency", type=float, default=0.7, help="share of the bandwidth that is reached")
    add("--collective-us", type=float, default=10.0, help="microseconds of an all-reduce")
    return parser


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m atom.plan") -> int:
    given = sys.argv[1:] if argv is None else argv
    if "--rehearse" in given:
        from atom.plan.rehearsal.cli import main as rehearse

        return rehearse(given, prog=prog)
    parser = create_parser(prog)
    args = parser.parse_args(argv)
    try:
        if args.model is None:
            raise ConfigError("name a model: config.json, its folder or a hub id")
        gpu = find_gpu(args.gpu)
        load = Load(
            context=_positive("context", parse_count(args.context)),
            concurrency=_positive("concurrency", args.concurrency),
            tokens_per_forward=args.tokens_per_forward,
            queries=1 + args.num_speculative_tokens,
        )
        if not 1 <= load.tokens_per_forward <= load.queries:
            raise ConfigError(
                f"--tokens-per-forward {load.tokens_per_forward:g} must lie between 1 and the "
                f"number of drafts and one more, {load.queries}"
            )
        if not 0 < args.efficiency <= 1:
            raise ConfigError(f"--efficiency {args.efficiency:g} must lie between 0 and 1")
        source = _source(args.model)
        dtypes = _CACHE_DTYPES[args.kv_cache_dtype], _STATE_DTYPES[args.mamba_ssm_cache_dtype]
        sizes_on = functools.cache(
            lambda ranks: rank_sizes(source, source.default_dtype, dtypes[0], ranks, dtypes[1])
        )
        costs = Costs(args.efficiency, args.collective_us * 1e-6)
        plans = [
            plan
            for count in args.gpus
            for plan in plan_layouts(sizes_on, _positive("gpus", count), gpu, load, costs)
        ]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_plans(plans, gpu))
    if fitting := [plan for plan in plans if plan.fits]:
        fastest = min(fitting, key=lambda plan: plan.step / plan.load.tokens_per_forward)
        print(explain(fastest, sizes_on(1), gpu, load, costs))
    else:
        print("no layout fits; take more GPUs, a shorter --context or a smaller --concurrency")
    return 0


def _source(model: str) -> ModelSource:
    return resolve_model(ModelOptions(model=folder_of(model), load_format="dummy"))


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"--{name} must be at least 1, got {value}")
    return value
