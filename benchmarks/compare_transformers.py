"""The same prompts through transformers' `generate` and through us, round about in one process.

Decode speed counts every token but the first over the time since the first; prefill speed is
the prompt's tokens over the time to the first token. Medians over the rounds are compared.

python benchmarks/compare_transformers.py
python benchmarks/compare_transformers.py --dtype float32 --rounds 5 --cases decode-1 prefill
python benchmarks/compare_transformers.py --random-model qwen3-next-200m
python benchmarks/compare_transformers.py --modelling-code --quantization auto --cases decode-1

With `--modelling-code` both are ours: the native class, and transformers' modelling code, as
`--model-impl transformers` runs it; `--op-by-op` refuses it recorded steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _random_models import SHAPES, write_random_model

from atom.bench.report import (
    DEFAULT_CONVERSATIONS,
    environment,
    environment_markdown,
    markdown_table,
    write_json,
)

if TYPE_CHECKING:
    import torch

    from atom import LLM

CASES = ("decode-1", "decode-8", "prefill")


@dataclass(frozen=True)
class Case:
    """Attributes:
    rounds: the prompts of each round, as token ids.
    max_tokens: tokens to generate per prompt.
    """

    name: str
    rounds: list[list[list[int]]]
    max_tokens: int


@dataclass(frozen=True)
class Result:
    tokens_per_s: float
    token_ids: list[list[int]]


# Takes prompts and a number of tokens to generate.
Engine = Callable[[list[list[int]], int], Result]


class TransformersEngine:
    """Greedy `generate` of one batch, padded on the left; end tokens do not stop it."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
        # A None in the configuration of a call would mean this one.
        self._model.generation_config.eos_token_id = None
        self._device = device

    def __call__(self, prompts: list[list[int]], max_tokens: int) -> Result:
        import torch
        from transformers import GenerationConfig

        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(p)) + p for p in prompts]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        clock = _StepClock(self._device)
        config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        start = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(padded, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                generation_config=config,
                stopping_criteria=[clock],
            )
        token_ids = output[:, longest:].tolist()
        first, last = clock.times[0], clock.times[-1]
        return Result(_speed(prompts, max_tokens, first - start, last - first), token_ids)


class _StepClock:
    """A stopping criterion that stops nothing and notes when each step ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class AtomEngine:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __call__(self, prompts: list[list[int]], max_tokens: int) -> Result:
        from atom import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        start = time.monotonic()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        first = min(_known(output.metrics.first_token_time) for output in outputs)
        last = max(_known(output.metrics.last_token_time) for output in outputs)
        token_ids = [output.outputs[0].token_ids for output in outputs]
        return Result(_speed(prompts, max_tokens, first - start, last - first), token_ids)


def _known(value: float | None) -> float:
    assert value is not None
    return value


def _speed(prompts: list[list[int]], max_tokens: int, to_first: float, since_first: float) -> float:
    if max_tokens == 1:
        return sum(map(len, prompts)) / to_first
    return len(prompts) * (max_tokens - 1) / since_first


def make_cases(llm: LLM, args: argparse.Namespace) -> list[Case]:
    """One round more than asked for: the first warms up."""
    num_rounds = args.rounds + 1
    chats = [llm.render_chat(conversation) for conversation in DEFAULT_CONVERSATIONS]
    text = llm.tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))
    prefills = []
    for i in range(num_rounds):
        # Another beginning in each round, so that nothing could have been cached.
        shifted = text[37 * i :] + text[: 37 * i]
        repeats = -(-args.prefill_tokens // len(shifted))
        prefills.append([(shifted * repeats)[: args.prefill_tokens]])
    cases = {
        "decode-1": Case("decode-1", [[chats[i % 8]] for i in range(num_rounds)], args.max_tokens),
        "decode-8": Case("decode-8", [chats] * num_rounds, args.max_tokens),
        "prefill": Case("prefill", prefills, 1),
    }
    return [cases[name] for name in args.cases]


def compare(case: Case, engines: dict[str, Engine]) -> dict[str, Any]:
    """Alternate the two engines, swapping who goes first; the first round is not counted. The ratio
    is the second's speed over the first's.
    """
    reference, measured = engines
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    same = total = 0
    for number, prompts in enumerate(case.rounds):
        order = list(engines) if number % 2 else list(reversed(engines))
        results = {name: engines[name](prompts, case.max_tokens) for name in order}
        if number == 0:
            continue
        for name, result in results.items():
            speeds[name].append(result.tokens_per_s)
        for ours, theirs in zip(*(r.token_ids for r in results.values()), strict=True):
            same += sum(a == b for a, b in zip(ours, theirs, strict=True))
            total += len(ours)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "case": case.name,
        "median_tokens_per_s": medians,
        "ratio": medians[measured] / medians[reference],
        "same_tokens": same / total,
        "rounds": speeds,
    }


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", help="folder, .gguf or hub id; the embedded model when omitted")
    model.add_argument("--random-model", choices=SHAPES, help="of this shape, with random weights")
    parser.add_argument(
        "--modelling-code", action="store_true", help="transformers' modelling code over the native"
    )
    parser.add_argument(
        "--op-by-op", action="store_true", help="with --modelling-code: its steps are not recorded"
    )
    parser.add_argument(
        "--quantization", default="none", help="with --modelling-code (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="decoded (default: %(default)s)")
    parser.add_argument("--prefill-tokens", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--num-threads", type=int, help="of both; all processors when omitted")
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--output-md", type=Path)
    args = parser.parse_args(argv)
    if args.quantization != "none" and not args.modelling_code:
        parser.error("--quantization needs --modelling-code: generate has floating-point weights")
    if args.op_by_op and not args.modelling_code:
        parser.error("--op-by-op needs --modelling-code")
    return args


def make_engines(args: argparse.Namespace) -> tuple[LLM, dict[str, Engine]]:
    """The native engine, and two to compare by their names."""
    from atom.processors import default_num_threads

    threads = args.num_threads or default_num_threads()
    native = make_llm(args, threads)
    if args.modelling_code:
        other = make_llm(args, threads, model_impl="transformers", enforce_eager=args.op_by_op)
        return native, {"native": AtomEngine(native), "modelling code": AtomEngine(other)}
    return native, {"transformers": make_generate(args, threads), "atom": AtomEngine(native)}


def make_llm(args: argparse.Namespace, threads: int, **options: Any) -> LLM:
    from atom import LLM

    return LLM(
        model=args.model,
        no_speculation=True,
        dtype=args.dtype,
        quantization=args.quantization,
        num_threads=threads,
        enable_prefix_caching=False,
        max_num_seqs=8,
        max_num_batched_tokens=max(2048, args.prefill_tokens),
        **options,
    )


def make_generate(args: argparse.Namespace, threads: int) -> TransformersEngine:
    import torch

    from atom.config import ModelOptions
    from atom.model_loader.source import resolve_model
    from atom.platform import current_platform

    torch.set_num_threads(threads)
    path = resolve_model(ModelOptions(model=args.model, quantization="none")).path
    dtype = {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[args.dtype]
    return TransformersEngine(path, dtype, current_platform().device)


def to_markdown(results: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    rows = [
        (
            r["case"],
            *(f"{speed:.1f}" for speed in r["median_tokens_per_s"].values()),
            f"{r['ratio']:.2f}",
            f"{r['same_tokens']:.1%}",
        )
        for r in results
    ]
    names = [f"{name} tok/s" for name in results[0]["median_tokens_per_s"]]
    header = ["case", *names, "ratio", "same tokens"]
    return f"{markdown_table(header, rows)}\n\n{environment_markdown(facts)}\n"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if args.random_model is not None:
            args.model = str(write_random_model(args.random_model, Path(folder)))
        run(args)


def run(args: argparse.Namespace) -> None:
    llm, engines = make_engines(args)
    results = []
    for case in make_cases(llm, args):
        results.append(compare(case, engines))
        print(f"{case.name}: {results[-1]['ratio']:.2f}x", flush=True)
    llm.shutdown()
    facts = environment()
    markdown = to_markdown(results, facts)
    print("\n" + markdown)
    if args.output_md is not None:
        args.output_md.parent.mkdir(parents=True, exist_ok=True)
        args.output_md.write_text(markdown, encoding="utf-8")
    write_json(args.output_json, {"environment": facts, "dtype": args.dtype, "results": results})


if __name__ == "__main__":
    main()
