"""A plan as text, with its arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from atom.plan.gpus import Gpu
from atom.plan.layouts import Costs, Load, Plan
from atom.plan.sizes import RankSizes

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
