"""A decode step on a GPU: eager against graphs, without and with an Eagle3 draft.

python benchmarks/gpu_decode.py
python benchmarks/gpu_decode.py --shape 8b --batch-sizes 1 16 64 --num-speculative-tokens 5

Target and draft are Llama-shaped with dummy weights, so that no checkpoint is needed. Such a draft
is hardly ever right: what speculation costs is measured, what it gains depends on the draft, and
the last column says what it would be if all drafts were accepted. Engines take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _report import environment, markdown_table, summarise, write_json

from atom.model_engine.arg_utils import EngineArgs
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.messages import EngineRequest
from atom.sampling_params import SamplingParams

# hidden_size, intermediate_size, layers, heads, KV heads, vocabulary
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 128),
    "1b": (2048, 8192, 16, 32, 8, 32000),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}
_WARMUP_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One engine, and the seconds and tokens of its timed steps by batch size."""

    mode: str
    core: EngineCore
    seconds: dict[int, list[float]]
    tokens: dict[int, list[int]]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = " (default: %(default)s)"
    parser.add_argument("--shape", choices=SHAPES, default="1b", help=f"sizes{default}")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 8, 32], help=f"sequences{default}"
    )
    parser.add_argument("--prompt-len", type=int, default=128, help=f"tokens{default}")
    parser.add_argument("--steps", type=int, default=32, help=f"timed steps of a round{default}")
    parser.add_argument("--rounds", type=int, default=3, help=f"turns of each engine{default}")
    parser.add_argument("--num-speculative-tokens", type=int, default=3, help=f"drafts{default}")
    parser.add_argument("--dtype", default="bfloat16", help=default.strip())
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--output-json", type=Path)
    return parser.parse_args(argv)


def write_configs(folder: Path, shape: str, context: int) -> tuple[Path, Path]:
    """Folders of a target and a draft that hold configurations and no weights."""
    hidden, intermediate, layers, heads, kv_heads, vocab = SHAPES[shape]
    common = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    target = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers}
    draft = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": vocab}
    for name, own in (("target", target), ("draft", draft)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(common | own), encoding="utf-8")
    return folder / "target", folder / "draft"


def create(
    args: argparse.Namespace, folders: tuple[Path, Path], mode: str, num_drafts: int, context: int
) -> Candidate:
    speculation: dict[str, Any] = {}
    if num_drafts:
        speculation = {
            "method": "eagle3",
            "draft_model": str(folders[1]),
            "num_speculative_tokens": num_drafts,
        }
    graphs: dict[str, Any] = {}
    if mode == "graph":
        graphs = {"cudagraph_capture_sizes": sorted(set(args.batch_sizes))}
    engine_args = EngineArgs(
        model=str(folders[0]),
        load_format="dummy",
        dtype=args.dtype,
        device=args.device,
        max_num_seqs=max(args.batch_sizes),
        max_model_len=context,
        enable_prefix_caching=False,
        enforce_eager=mode == "eager",
        seed=0,
        **graphs,
        **speculation,
    )
    sizes = args.batch_sizes
    core = EngineCore(engine_args.create_config())
    return Candidate(mode, core, {b: [] for b in sizes}, {b: [] for b in sizes})


def decode(candidate: Candidate, batch_size: int, args: argparse.Namespace) -> None:
    """Prefill `batch_size` prompts, then time steps in which all of them decode."""
    core = candidate.core
    rng = random.Random(batch_size)
    room = core.limits.max_model_len - args.prompt_len
    params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
    ids = [f"{batch_size}-{i}" for i in range(batch_size)]
    for name in ids:
        prompt = [rng.randrange(core.limits.vocab_size) for _ in range(args.prompt_len)]
        core.add_request(
            EngineRequest(id=name, prompt_token_ids=prompt, params=params, seed=batch_size)
        )
    waiting = set(ids)
    while waiting:
        waiting -= {output.id for output in core.step().outputs if output.token_ids}
    for step in range(_WARMUP_STEPS + args.steps):
        started = time.perf_counter()
        report = core.step()  # ends with the drafts on the host, so the device is done
        if len(report.outputs) != batch_size:
            raise RuntimeError(f"{len(report.outputs)} of {batch_size} sequences were computed")
        if step >= _WARMUP_STEPS:
            candidate.seconds[batch_size].append(time.perf_counter() - started)
            candidate.tokens[batch_size].append(sum(len(o.token_ids) for o in report.outputs))
    core.abort(ids)
    core.step()


def results_of(
    candidate: Candidate, num_drafts: int, batch_sizes: Sequence[int]
) -> Iterator[dict[str, Any]]:
    for batch_size in batch_sizes:
        seconds, tokens = candidate.seconds[batch_size], candidate.tokens[batch_size]
        median = statistics.median(seconds)
        yield {
            "speculation": f"eagle3, k={num_drafts}" if num_drafts else "off",
            "batch_size": batch_size,
            "mode": candidate.mode,
            "step_seconds": summarise(seconds),
            "step_ms": 1000 * median,
            "tokens_per_s": statistics.fmean(tokens) / median,
            "tokens_per_s_if_all_accepted": batch_size * (num_drafts + 1) / median,
        }


def measure(args: argparse.Namespace, modes: Sequence[str], num_drafts: int) -> list[Any]:
    """All batch sizes with and without graphs, at one number of drafts."""
    steps = _WARMUP_STEPS + args.steps + 2
    # Twice what a sequence needs: the pool, which holds all of them, is never short of blocks.
    context = 2 * (args.prompt_len + steps * (num_drafts + 1))
    with tempfile.TemporaryDirectory() as folder:
        folders = write_configs(Path(folder), args.shape, context)
        candidates = [create(args, folders, mode, num_drafts, context) for mode in modes]
        for _ in range(args.rounds):
            for batch_size in args.batch_sizes:
                for candidate in candidates:
                    decode(candidate, batch_size, args)
        for candidate in candidates:
            candidate.core.shutdown()
    results = [results_of(c, num_drafts, args.batch_sizes) for c in candidates]
    # One after another, so that both modes of a batch size stand together.
    return [row for rows in zip(*results, strict=True) for row in rows]


def to_markdown(results: Sequence[dict[str, Any]]) -> str:
    header = ["speculation", "batch", "mode", "step (ms)", "tokens/s", "if all accepted"]
    rows = [
        (
            r["speculation"],
            r["batch_size"],
            r["mode"],
            f"{r['step_ms']:.2f}",
            f"{r['tokens_per_s']:.0f}",
            f"{r['tokens_per_s_if_all_accepted']:.0f}",
        )
        for r in results
    ]
    return markdown_table(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    if not on_gpu:
        print("no GPU: there are no graphs, eager steps only", file=sys.stderr)
    modes = ("eager", "graph") if on_gpu else ("eager",)
    results: list[dict[str, Any]] = []
    for num_drafts in (0, args.num_speculative_tokens):
        results += measure(args, modes, num_drafts)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    print(to_markdown(results))
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    report = {"environment": environment(), "options": options, "results": results}
    write_json(args.output_json, report)


if __name__ == "__main__":
    main()
