"""How near the kernels come to the device's speed: bytes/s over those of a copy, operations/s over
those of a large product.

python benchmarks/kernels.py                              # needs a GPU
python benchmarks/kernels.py --ops mla_decode --batch-sizes 1 16 --contexts 8192
python benchmarks/kernels.py --warm                       # only compiles what the others run
python benchmarks/kernels.py --device cpu --tiny          # a rehearsal, its figures mean nothing

Paged decode of a Llama-3-8B layer and of an Eagle3 draft's, latent decode and prefill and fused
experts of a Kimi-K2.5 layer on one rank of eight, products of a Llama-3-8B layer, the same and
experts with quantised weights, tokens chosen with filters. Every implementation that runs here
takes its turn, plain torch (`F.sdpa` over gathered blocks, `bmm` over experts) last; all must
agree with it. Calls are captured in a graph over data that no cache holds, and the device's clock
counts. The first batch size and context are traced, too, and run a second time with --queries of
each sequence. Exit status: 0, 1 when an implementation fails or disagrees, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _device import (
    NO_GPU,
    Clock,
    add_device_option,
    chosen_platform,
    copy_bandwidth,
    free_device_memory,
    product_speed,
    time_calls,
)
from _kernel_loads import TOLERANCES, Case, Load, implementations, worst_error
from _kernel_plan import OPS, STORAGES, Plan
from _kernel_report import line_of, named, to_markdown
from _product_loads import FORMATS

from atom.bench.report import environment, environment_markdown, write_json
from atom.config import CacheOptions
from atom.model_ops.registry import OpUnavailableError
from atom.options.fields import with_gpu_defaults
from atom.platform import Platform

# Plain torch copies what it attends over, and would take all the time.
_MOST_GATHERED_BYTES = 12 << 30


@dataclasses.dataclass
class Report:
    """Rows that were measured, rows that were not and why, and what is wrong.

    `product_per_s` has the operations of a large product in 16 bits, `warmed` the seconds of first
    calls, which compile.
    """

    copy_bytes_per_s: float
    product_per_s: float
    results: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    warmed: list[dict[str, Any]] = dataclasses.field(default_factory=list)
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
    parser.add_argument("--queries", type=int, default=4, help=f"that verify drafts{default}")
    parser.add_argument(
        "--block-size", type=int, help="of the cache (default: an engine's on this device)"
    )
    parser.add_argument(
        "--formats", nargs="+", choices=tuple(FORMATS), default=list(FORMATS),
        help=f"of quantised weights{default}",
    )  # fmt: skip
    parser.add_argument("--implementations", nargs="+", help="only these; torch checks the others")
    parser.add_argument(
        "--warm", action="store_true", help="call each once, for kernels that compile; no torch"
    )
    parser.add_argument("--seconds", type=float, help="what does not fit is listed as not run")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args(argv)
    # The first pair is what goals are set for: it runs whatever the time.
    args.batch_sizes = args.batch_sizes or ([3, 1] if args.tiny else [64, 1, 16, 256])
    args.contexts = args.contexts or ([40] if args.tiny else [8192, 1024, 65536])
    return args


def measure(
    load: Load, cases: Sequence[Case], args: argparse.Namespace, platform: Platform, clock: Clock,
    report: Report,
) -> None:  # fmt: skip
    """Every implementation of one load; plain torch last, which the others are compared with."""
    names = implementations(load.op, platform)
    if args.warm:
        names = [name for name in names if name != "torch"]
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
            if args.warm:
                _warm_case(load, case, row, platform, report)
            else:
                trace = (case.batch, case.context) == (cases[0].batch, cases[0].context)
                _measure_case(load, case, row, platform, report, outputs, trace)
    _compare(load, outputs, TOLERANCES[getattr(torch, args.dtype)], report)


def _warm_case(
    load: Load, case: Case, row: dict[str, Any], platform: Platform, report: Report
) -> None:
    """Call once; what is in the way is found when it is measured."""
    started = time.perf_counter()
    try:
        load.calls(case).calls[0]()
    except Exception as error:
        report.left_out.append({**row, "why": f"{type(error).__name__}: {error}"})
        return
    finally:
        free_device_memory(platform)
    report.warmed.append({**row, "seconds": time.perf_counter() - started})
    print(f"{named(row)}: {report.warmed[-1]['seconds']:.1f} s", file=sys.stderr, flush=True)


def _measure_case(
    load: Load,
    case: Case,
    row: dict[str, Any],
    platform: Platform,
    report: Report,
    outputs: dict[tuple[str, Case], torch.Tensor],
    trace: bool,
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
        timing = time_calls(work.calls, platform.device, trace=trace)
    except torch.OutOfMemoryError:
        report.left_out.append({**row, "why": "out of memory"})
        return
    except Exception as error:
        report.faults.append(f"{named(row)}: {type(error).__name__}: {error}")
        return
    finally:
        free_device_memory(platform)
    achieved = work.num_bytes / timing.seconds
    computed = work.operations / timing.seconds
    of_copy = achieved / report.copy_bytes_per_s
    report.results.append(
        row
        | {
            "bytes": work.num_bytes,
            "seconds": timing.seconds,
            "how": timing.how,
            "calls": len(work.calls),
            "kernels": timing.kernels,
            "bytes_per_s": achieved,
            "of_copy": of_copy,
            "operations": work.operations,
            "operations_per_s": computed,
            "of_bound": max(of_copy, computed / report.product_per_s),
        }
    )
    print(line_of(report.results[-1]), file=sys.stderr, flush=True)


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
    seconds = {(r["implementation"], _case_of(r)): r["seconds"] for r in rows}
    for row in rows:
        case = _case_of(row)
        expected = outputs.get(("torch", case))
        if row["implementation"] == "torch" or expected is None:
            continue
        row["error"] = worst_error(outputs[row["implementation"], case], expected)
        baseline = seconds.get(("torch", case))
        if baseline is not None:
            row["torch_over_this"] = baseline / row["seconds"]
        if not row["error"] <= tolerance:  # nor may it be no number
            report.faults.append(
                f"{named(row)} differs from torch by {row['error']:.1e} of the largest result, "
                f"more than {tolerance:.0e}"
            )


def _case_of(row: dict[str, Any]) -> Case:
    return Case(row["batch"], row["context"], row["queries"])


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    platform = chosen_platform(args.device, "kernels.py")
    if platform is None:
        return NO_GPU
    if args.block_size is None:
        defaults = with_gpu_defaults(CacheOptions, {}) if platform.kind != "cpu" else {}
        args.block_size = CacheOptions(**defaults).block_size
    clock = Clock(args.seconds)
    facts = environment()
    report = Report(copy_bandwidth(platform), product_speed(platform))
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}

    def so_far() -> dict[str, Any]:
        return {"environment": facts, "options": options, **dataclasses.asdict(report)}

    for create, cases in Plan(args, platform):
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
