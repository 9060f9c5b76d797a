"""A GGUF file's greedy answers here and in llama.cpp: the same tokens, but for near ties.

python benchmarks/compare_llama_cpp.py FILE.gguf --python peers/venv_lc/bin/python
python benchmarks/compare_llama_cpp.py FILE.gguf --python ... --unpacked copy.gguf --tie 0.02
python benchmarks/compare_llama_cpp.py FILE.gguf --python ... --chat --activations auto

`--python` has llama-cpp-python, as `compare_peers.py setup --only llama.cpp` installs it. Twenty
prompts: short ones in several languages and scripts, code, digits, and two of about a thousand
tokens, which are longer than many windows. First the prompts' tokens must be equal. Then this
engine answers by itself, and once more along llama.cpp's answers, so that every position counts,
also those after a difference. Where the likeliest tokens differ, both engines must hold the two
within `--tie` logits of each other; the exit status is 1 where they do not.

llama.cpp rounds the inputs of each product to 8 bits and the KV cache to float16, so logits differ;
by how much, the margins of the two likeliest tokens say. `--unpacked` writes the file's weights as
float32 and gives llama.cpp that file and a cache in float32: then it rounds nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _peer_setup import write_gguf

from atom.bench.report import DEFAULT_CONVERSATIONS, write_json

if TYPE_CHECKING:
    from atom import LLM

_PROGRAM = Path(__file__).with_name("_llama_cpp_answers.py")
_NUM_TOP = 20
_CONTEXT = 2048
_LONG_CHARACTERS = 3600
PROMPTS = [
    *(conversation[0]["content"] for conversation in DEFAULT_CONVERSATIONS),
    "The capital of France is",
    'def quicksort(items):\n    """Sort in place."""\n',
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Der Rhein entspringt in den Alpen und",
    "日本の首都は",
    "Столица России -",
    "SELECT name, COUNT(*) FROM users WHERE created_at > '2024-01-01'",
    "The 3 primary colours are:\n\n1.  Red\n2.  ",
    "Ça fait 12 345,67 € - l'été, naïve café 😀🚀 and",
    "<html>\n\t<head>\r\n\t\t<title>",
]


@dataclass(frozen=True)
class Difference:
    """Where the likeliest tokens differ.

    Attributes:
        ours, theirs: the tokens.
        our_margin, their_margin: by how many logits each engine prefers its own.
    """

    prompt: int
    position: int
    ours: int
    theirs: int
    our_margin: float
    their_margin: float


@dataclass(frozen=True)
class Result:
    """Attributes:
    other_tokens: prompts that are other tokens here.
    same_answers: of this engine by itself.
    differences: along llama.cpp's answers.
    noise: root mean square of the difference between the engines' margins.
    """

    other_tokens: list[int]
    same_answers: int
    positions: int
    differences: list[Difference]
    noise: float


def prompts() -> list[str]:
    """Twenty."""
    long = Path(__file__).with_name("compare_peers.py").read_text(encoding="utf-8")
    return [*PROMPTS, long[:_LONG_CHARACTERS], long[_LONG_CHARACTERS : 2 * _LONG_CHARACTERS]]


def llama_cpp_answers(
    python: Path, model: Path, texts: Sequence[str], max_tokens: int, wide_cache: bool
) -> list[dict[str, Any]]:
    """See `_llama_cpp_answers.py`.

    Raises:
        subprocess.CalledProcessError: when it fails.
    """
    request = {"model": str(model), "texts": list(texts), "max_tokens": max_tokens}
    request |= {"num_top": _NUM_TOP, "num_tokens": _CONTEXT, "wide_cache": wide_cache}
    found = subprocess.run(
        [str(python), str(_PROGRAM)],
        input=json.dumps(request) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in found.stdout.splitlines()]


def compare(llm: LLM, texts: Sequence[str], answers: Sequence[dict[str, Any]]) -> Result:
    """Answer the texts and compare with llama.cpp's answers."""
    from atom import SamplingParams

    tokens = [llm.tokenizer.encode(text) for text in texts]
    others = [i for i, answer in enumerate(answers) if tokens[i] != answer["prompt"]]
    prompts = [answer["prompt"] for answer in answers]
    count = len(answers[0]["tokens"])
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    alone = llm.generate(prompts, params, use_tqdm=False)
    pairs = zip(alone, answers, strict=True)
    same = sum(output.outputs[0].token_ids == answer["tokens"] for output, answer in pairs)
    differences: list[Difference] = []
    squares = []
    for number, answer in enumerate(answers):
        for position, ours in enumerate(_along(llm, answer)):
            theirs = dict(answer["top"][position])
            (first, second), best = list(theirs)[:2], max(ours, key=lambda i: ours[i])
            if second in ours and first in ours:
                between = ours[first] - ours[second] - (theirs[first] - theirs[second])
                squares.append(between**2)
            if best == first:
                continue
            differences.append(
                Difference(
                    number,
                    position,
                    best,
                    first,
                    ours[best] - ours.get(first, -math.inf),
                    theirs[first] - theirs.get(best, -math.inf),
                )
            )
    noise = math.sqrt(sum(squares) / max(len(squares), 1))
    return Result(others, same, count * len(answers), differences, noise)


def _along(llm: LLM, answer: dict[str, Any]) -> list[dict[int, float]]:
    """Before each token of llama.cpp's answer, log-probabilities of the likeliest tokens here."""
    from atom import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=_NUM_TOP)
    (output,) = llm.generate([answer["prompt"] + answer["tokens"]], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    found = []
    for position in output.prompt_logprobs[len(answer["prompt"]) :]:
        assert position is not None
        found.append({token: candidate.logprob for token, candidate in position.items()})
    return found


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("--python", type=Path, required=True, help="one with llama-cpp-python")
    parser.add_argument("--chat", action="store_true", help="prompts are turns of a user")
    parser.add_argument("--max-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--tie", type=float, default=1.0, help="logits (default: %(default)s)")
    parser.add_argument("--unpacked", type=Path, metavar="COPY", help="written if it is not there")
    parser.add_argument("--dtype", default="float32", help="(default: %(default)s)")
    parser.add_argument("--activations", default="float", help="(default: %(default)s)")
    parser.add_argument("--output-json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    from atom import LLM

    args = parse_args(argv)
    llm = LLM(
        model=str(args.model),
        no_speculation=True,
        dtype=args.dtype,
        activations=args.activations,
        max_model_len=_CONTEXT,
        max_num_seqs=8,
    )
    texts = prompts()
    if args.chat:
        turns = [[{"role": "user", "content": text}] for text in texts]
        texts = [llm.tokenizer.decode(llm.render_chat(turn)) for turn in turns]
    theirs = args.model
    if args.unpacked is not None:
        theirs = args.unpacked
        if not theirs.exists():
            write_gguf(args.model, theirs, "f32")
    is_wide = args.unpacked is not None
    answers = llama_cpp_answers(args.python, theirs, texts, args.max_tokens, is_wide)
    result = compare(llm, texts, answers)
    llm.shutdown()
    print(to_text(result, len(texts)))
    write_json(
        args.output_json, vars(result) | {"differences": list(map(vars, result.differences))}
    )
    if result.other_tokens or any(not is_tie(each, args.tie) for each in result.differences):
        sys.exit(1)


def is_tie(difference: Difference, most: float) -> bool:
    return max(difference.our_margin, difference.their_margin) <= most


def to_text(result: Result, count: int) -> str:
    lines = [
        f"prompts of other tokens: {result.other_tokens or 'none'}",
        f"answers that are wholly equal: {result.same_answers} of {count}",
        f"positions with another likeliest token along llama.cpp's answers: "
        f"{len(result.differences)} of {result.positions}",
        f"difference of the margins of the two likeliest tokens, root mean square: "
        f"{result.noise:.4f} logits",
    ]
    lines += [
        f"  prompt {each.prompt}, token {each.position}: {each.ours} here by "
        f"{each.our_margin:.3f}, {each.theirs} there by {each.their_margin:.3f}"
        for each in result.differences
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
