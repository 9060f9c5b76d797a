"""How near the kernels come to the memory's speed: achieved bytes/s over those of a copy.

python benchmarks/kernels.py                              # needs a GPU
python benchmarks/kernels.py --ops mla_decode --batch-sizes 1 16 --contexts 8192
python benchmarks/kernels.py --device cpu --tiny          # a rehearsal, its figures mean nothing

Paged decode of a Llama-3-8B layer and of an Eagle3 draft's, latent decode and fused experts of a
Kimi-K2.5 layer on one rank of eight. Every implementation that runs here takes its turn, plain
torch (`F.sdpa` over gathered blocks, `bmm` over experts) last; all must agree with it. Calls are
captured in a graph over data that no cache holds, and the device's clock counts. Exit status: 0,
1 when an implementation fails or disagrees, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _device import (
    NO_GPU,
    ROTATED_BYTES,
    Clock,
    add_device_option,
    chosen_platform,
    copy_bandwidth,
    free_device_memory,
    time_calls,
)
from _kernel_loads import (
    BLOCK_SIZE,
    TOLERANCES,
    Case,
    Experts,
    ExpertSizes,
    HeadSizes,
    LatentDecode,
    LatentSizes,
    Load,
    PagedDecode,
    implementations,
    worst_error,
)

from atom.bench.report import environment, environment_markdown, markdown_table, write_json
from atom.model_ops.registry import OpUnavailableError
from atom.platform import Platform, free_memory_bytes

OPS = ("paged_attention", "mla_decode", "moe_experts")
STORAGES = ("auto", "fp8")
# Of the memory that is free, a pool takes so much at most: gathering it takes as much again.
_POOL_SHARE = 0.55
# Plain torch copies what it attends over, and would take all the time.
_MOST_GATHERED_BYTES = 12 << 30
_TINY_ROTATED_BYTES = 1 << 16


@dataclasses.dataclass
class Report:
    """Rows that were measured, rows that were not and why, and what is wrong."""

    copy_bytes_per_s: float
    results: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    left_out: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = " (default: %(default)s)"
    add_device_option(parser)
    parser.add_argument("--tiny", action="store_true", help="small layers, batches and contexts")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--kv-cache-dtypes", "--kv_cache_dtypes", nargs="+", choices=STORAGES,
        default=list(STORAGES), help=f"auto is --dtype{default}",
    )  # fmt: skip
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="(default: 64 1 16 256)")
    parser.add_argument("--contexts", type=int, nargs="+", help="(default: 8192 1024 65536)")
    parser.add_argument("--implementations", nargs="+", help="only these; torch checks the others")
    parser.add_argument("--seconds", type=float, help="what does not fit is listed as not run")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args(argv)
    # The first pair is what goals are set for: it runs whatever the time.
    args.batch_sizes = args.batch_sizes or ([3, 1] if args.tiny else [64, 1, 16, 256])
    args.contexts = args.contexts or ([40] if args.tiny else [8192, 1024, 65536])
    return args


def loads(
    args: argparse.Namespace, platform: Platform
) -> Iterator[tuple[Callable[[], Load], list[Case]]]:
    """What makes each load, when its turn comes, and its cases."""
    dtype: torch.dtype = getattr(torch, args.dtype)
    rotated = _TINY_ROTATED_BYTES if args.tiny else ROTATED_BYTES
    cases = [Case(batch, context) for context in args.contexts for batch in args.batch_sizes]
    heads = HeadSizes(4, 2, 32) if args.tiny else HeadSizes()
    draft = HeadSizes(2, 2, 32) if args.tiny else HeadSizes(8, 8, 128)
    of_draft = [case for case in cases if case.context == args.contexts[0]]
    latents = LatentSizes(2, 32, 16, 16, 16) if args.tiny else LatentSizes()
    experts = ExpertSizes(8, 2, 64, 32) if args.tiny else ExpertSizes()

    def tokens(token_bytes: int) -> int:
        largest = max(c.batch * -(-c.context // BLOCK_SIZE) for c in cases) * BLOCK_SIZE
        rotation = 2 * rotated // token_bytes
        most = int(_POOL_SHARE * free_memory_bytes(platform)) // token_bytes
        return min(max(largest, rotation), most)

    for name in args.kv_cache_dtypes:
        storage = dtype if name == "auto" else platform.fp8_dtype

        def paged(sizes: HeadSizes, storage: torch.dtype = storage) -> Load:
            size = 2 * sizes.kv_heads * sizes.head_dim * storage.itemsize
            return PagedDecode(sizes, platform, dtype, storage, tokens(size), rotated)

        def latent(storage: torch.dtype = storage) -> Load:
            size = (latents.rank + latents.rope) * storage.itemsize
            return LatentDecode(latents, platform, dtype, storage, tokens(size), rotated)

        if "paged_attention" in args.ops:
            yield partial(paged, heads), cases
            yield partial(paged, draft), of_draft
        if "mla_decode" in args.ops:
            yield latent, cases
    if "moe_experts" in args.ops:
        yield (
            lambda: Experts(experts, platform, dtype, rotated),
            [Case(batch) for batch in args.batch_sizes],
        )


def measure(
    load: Load, cases: Sequence[Case], args: argparse.Namespace, platform: Platform, clock: Clock,
    report: Report,
) -> None:  # fmt: skip
    """Every implementation of one load; plain torch last, which the others are compared with."""
    names = implementations(load.op, platform)
    if args.implementations:
        names = [name for name in names if name in args.implementations]
    outputs: dict[tuple[str, Case], torch.Tensor] = {}
    for name in names:
        where = {
            "op": load.op,
            "implementation": name,
            "cache": str(load.storage).removeprefix("torch."),
            "sizes": load.sizes,
        }
        try:
            load.use(name)
        except OpUnavailableError as error:
            reason = str(error).rpartition(f": {name}: ")[2]
            report.left_out.append({**where, "why": f"cannot run here: {reason}"})
            continue
        for case in cases:
            row = where | dataclasses.asdict(case)
            why = None if clock.allows() else "out of time"
            why = why or load.refusal(case)
            if why is not None:
                report.left_out.append({**row, "why": why})
                continue
            _measure_case(load, case, row, platform, report, outputs)
    _compare(load, outputs, TOLERANCES[getattr(torch, args.dtype)], report)


def _measure_case(
    load: Load,
    case: Case,
    row: dict[str, Any],
    platform: Platform,
    report: Report,
    outputs: dict[tuple[str, Case], torch.Tensor],
) -> None:
    name = row["implementation"]
    try:
        work = load.calls(case)
        if name == "torch" and load.storage is not None and work.num_bytes > _MOST_GATHERED_BYTES:
            gib = work.num_bytes / 2**30
            why = f"plain torch would copy {gib:.0f} GiB out of the cache"
            report.left_out.append({**row, "why": why})
            return
        outputs[name, case] = work.calls[0]().cpu()
        timing = time_calls(work.calls, platform.device)
    except torch.OutOfMemoryError:
        report.left_out.append({**row, "why": "out of memory"})
        return
    except Exception as error:
        report.faults.append(f"{_named(row)}: {type(error).__name__}: {error}")
        return
    finally:
        free_device_memory(platform)
    achieved = work.num_bytes / timing.seconds
    report.results.append(
        row
        | {
            "bytes": work.num_bytes,
            "seconds": timing.seconds,
            "how": timing.how,
            "calls": len(work.calls),
            "bytes_per_s": achieved,
            "of_copy": achieved / report.copy_bytes_per_s,
        }
    )


def _compare(
    load: Load,
    outputs: dict[tuple[str, Case], torch.Tensor],
    tolerance: float,
    report: Report,
) -> None:
    """Set the largest relative error, and the time over torch's, of every row of `load`."""
    storage = str(load.storage).removeprefix("torch.")
    about = load.op, load.sizes, storage
    rows = [r for r in report.results if (r["op"], r["sizes"], r["cache"]) == about]
    seconds = {(r["implementation"], r["batch"], r["context"]): r["seconds"] for r in rows}
    for row in rows:
        case = Case(row["batch"], row["context"])
        expected = outputs.get(("torch", case))
        if row["implementation"] == "torch" or expected is None:
            continue
        row["error"] = worst_error(outputs[row["implementation"], case], expected)
        baseline = seconds.get(("torch", case.batch, case.context))
        if baseline is not None:
            row["torch_over_this"] = baseline / row["seconds"]
        if not row["error"] <= tolerance:  # nor may it be no number
            report.faults.append(
                f"{_named(row)} differs from torch by {row['error']:.1e} of the largest result, "
                f"more than {tolerance:.0e}"
            )


def _named(row: dict[str, Any]) -> str:
    parts = [f"{row['op']} ({row['sizes']}) by {row['implementation']}"]
    if row["cache"] != "None":
        parts.append(f"cache {row['cache']}")
    parts += [f"{name} {row[name]}" for name in ("batch", "context") if row.get(name)]
    return ", ".join(parts)


def to_markdown(report: dict[str, Any]) -> str:
    """The tables of a report, as this program writes it to JSON."""
    header = ["op", "sizes", "by", "cache", "batch", "context", "us", "GB", "GB/s", "of copy",
              "torch takes", "error"]  # fmt: skip
    rows = [
        (
            r["op"],
            r["sizes"],
            r["implementation"] + ("" if r["how"] in ("graph", "called") else f" ({r['how']})"),
            r["cache"] if r["context"] else "",
            r["batch"],
            r["context"] or "",
            f"{1e6 * r['seconds']:.1f}",
            f"{r['bytes'] / 1e9:.3g}",
            f"{r['bytes_per_s'] / 1e9:.0f}",
            f"{100 * r['of_copy']:.0f} %",
            f"{r['torch_over_this']:.1f} x" if "torch_over_this" in r else "",
            f"{r['error']:.0e}" if "error" in r else "",
        )
        for r in report["results"]
    ]
    parts = [
        f"A copy within the device moves {report['copy_bytes_per_s'] / 1e9:.0f} GB/s, reads and "
        f"writes together.",
        markdown_table(header, rows),
    ]
    if report["faults"]:
        parts.append("Wrong:\n\n" + "\n".join(f"- {fault}" for fault in report["faults"]))
    if report["left_out"]:
        left = [f"- {_named(row)}: {row['why']}" for row in report["left_out"]]
        parts.append("Not run:\n\n" + "\n".join(left))
    return "\n\n".join(parts)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    platform = chosen_platform(args.device, "kernels.py")
    if platform is None:
        return NO_GPU
    clock = Clock(args.seconds)
    facts = environment()
    report = Report(copy_bandwidth(platform))
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}

    def so_far() -> dict[str, Any]:
        return {"environment": facts, "options": options, **dataclasses.asdict(report)}

    for create, cases in loads(args, platform):
        load = create()
        measure(load, cases, args, platform, clock, report)
        del load
        gc.collect()
        free_device_memory(platform)
        write_json(args.output_json, so_far())  # for whoever has to stop this program
    print(environment_markdown(facts), to_markdown(so_far()), sep="\n\n")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
