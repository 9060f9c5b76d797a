"""The time from an image to the first token, through transformers and through us, in turns.

The model has Kimi-K2.5's tower and projector, whole, and a small text network; its weights are
random. Each picture is a new one, so nothing is found in a cache.

python benchmarks/images.py
python benchmarks/images.py --sizes 448x448 1000x700 --images 2 --dtype float32
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _random_models import write_kimi_k25

from atom.bench.report import environment, environment_markdown, markdown_table, write_json

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from atom import LLM

SIZES = ("224x224", "448x448", "1000x700")
_BEFORE, _BEHIND = list(range(100, 120)), list(range(200, 220))

# Takes pictures; the seconds to the first token, and that token.
Engine = Callable[[list["Image"]], tuple[float, int]]


class TransformersEngine:
    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoImageProcessor, Kimi_K25ForConditionalGeneration

        model = Kimi_K25ForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        self._model = model.eval()
        self._processor = AutoImageProcessor.from_pretrained(folder)

    def __call__(self, images: list[Image]) -> tuple[float, int]:
        import torch

        start = time.perf_counter()
        made = self._processor(images, return_tensors="pt")
        pad = self._model.config.image_token_id
        ids = list(_BEFORE)
        for grid in made["image_grid_thw"].tolist():
            ids += [pad] * (grid[1] * grid[2] // 4) + _BEHIND
        with torch.inference_mode():
            output = self._model(
                torch.tensor([ids]),
                pixel_values=made["pixel_values"].to(self._model.dtype),
                image_grid_thw=made["image_grid_thw"],
                logits_to_keep=1,
            )
        token = int(output.logits[0, -1].argmax())
        return time.perf_counter() - start, token


class AtomEngine:
    def __init__(self, llm: LLM, placeholder: int) -> None:
        self._llm = llm
        self._placeholder = placeholder

    def __call__(self, images: list[Image]) -> tuple[float, int]:
        from atom import SamplingParams

        start = time.perf_counter()
        ids = [*_BEFORE, *[token for _ in images for token in (self._placeholder, *_BEHIND)]]
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}
        params = SamplingParams(temperature=0, max_tokens=1)
        (output,) = self._llm.generate(prompt, params, use_tqdm=False)
        return time.perf_counter() - start, output.outputs[0].token_ids[0]


def picture(size: str, seed: int) -> Image:
    """Coloured noise of half the resolution."""
    from PIL import Image as pillow

    width, height = map(int, size.split("x"))
    shape = -(-height // 2), -(-width // 2), 3
    coarse = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return pillow.fromarray(coarse.repeat(2, 0).repeat(2, 1)[:height, :width])


def compare(size: str, num_images: int, rounds: int, engines: dict[str, Engine]) -> dict[str, Any]:
    """Alternate the engines, swapping who goes first; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    same = 0
    for number in range(rounds + 1):
        images = [picture(size, 1000 * number + i) for i in range(num_images)]
        order = list(engines) if number % 2 else list(reversed(engines))
        made = {name: engines[name](images) for name in order}
        if number:
            for name, (took, _) in made.items():
                seconds[name].append(took)
            same += len({token for _, token in made.values()}) == 1
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "case": f"{num_images} of {size}",
        "median_seconds": medians,
        "ratio": medians["atom"] / medians["transformers"],
        "same_first_tokens": same / rounds,
        "rounds": seconds,
    }


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="of the model, written if it is not there")
    parser.add_argument("--layers", type=int, default=27, help="of the tower (default: 27)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="WIDTHxHEIGHT")
    parser.add_argument("--images", type=int, default=1, help="of a prompt (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--num-threads", type=int, help="of both; all processors when omitted")
    parser.add_argument("--output-json", type=Path)
    return parser.parse_args(argv)


def make_engines(args: argparse.Namespace) -> tuple[LLM, dict[str, Engine]]:
    import torch

    from atom import LLM
    from atom.processors import default_num_threads

    threads = args.num_threads or default_num_threads()
    llm = LLM(
        model=str(args.folder),
        dtype=args.dtype,
        quantization="none",
        num_threads=threads,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=2,
        kv_cache_memory="64MiB",
    )
    torch.set_num_threads(threads)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[args.dtype]
    theirs = TransformersEngine(args.folder, dtype)
    placeholder = llm.engine.image_processor
    assert placeholder is not None
    return llm, {"transformers": theirs, "atom": AtomEngine(llm, placeholder.placeholder_id)}


def to_markdown(results: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    rows = [
        (
            r["case"],
            f"{r['median_seconds']['transformers']:.2f}",
            f"{r['median_seconds']['atom']:.2f}",
            f"{r['ratio']:.2f}",
            f"{r['same_first_tokens']:.0%}",
        )
        for r in results
    ]
    header = ["images", "transformers s", "atom s", "ratio", "same first tokens"]
    return f"{markdown_table(header, rows)}\n\n{environment_markdown(facts)}\n"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        args.folder = args.folder or Path(folder)
        if not (args.folder / "config.json").exists():
            write_kimi_k25(args.folder, args.layers)
        run(args)


def run(args: argparse.Namespace) -> None:
    llm, engines = make_engines(args)
    results = []
    for size in args.sizes:
        results.append(compare(size, args.images, args.rounds, engines))
        print(f"{results[-1]['case']}: {results[-1]['ratio']:.2f} of the time", flush=True)
    llm.shutdown()
    facts = environment()
    print("\n" + to_markdown(results, facts))
    write_json(args.output_json, {"environment": facts, "dtype": args.dtype, "results": results})


if __name__ == "__main__":
    main()
