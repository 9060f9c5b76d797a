"""Every pre-tokenizer of GGUF files that is known here, beside llama.cpp's of that name.

python benchmarks/compare_pre_tokenizers.py FILE.gguf --python peers/venv_lc/bin/python

The file, of a byte-level BPE model (Qwen's has a large vocabulary), lends vocabulary and merges:
for each name a file without tensors is written that names it, and both tokenize the lines of this
project's documentation and sources and some of many scripts. Lines of other tokens are counted, and
the first is printed. Where llama.cpp approximates classes of letters or does not normalise, such
lines are expected (`atom/model_loader/gguf/pre_tokenizers.py` says where).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from compare_llama_cpp import llama_cpp_answers
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from tokenizers import Tokenizer

from atom.model_loader.gguf.file import read_gguf
from atom.model_loader.gguf.pre_tokenizers import PRE_TOKENIZERS
from atom.model_loader.gguf.tokenizer import write_tokenizer

_ROOT = Path(__file__).parents[1]
_KEY = "tokenizer.ggml.pre"
LINES = [
    "3.14159 and 2,718,281; x86_64, 0x7fff, 1234567 12 345",
    "It's what they've said; I'LL do it. DON'T, o'clock",
    "camelCase HTTPServer iPhone XMLHttpRequest aB Ab AB",
    "def f(x):\n\treturn x ** 2  # squares\n\n\nif __name__ == '__main__':\r\n    print(f(12))",
    "Straße, naïve café, Ελληνικά, ПриветМир, 日本語の文章です。한국어 텍스트, العربية, हिन्दी",
    "emoji 😀🚀 👩‍👩‍👧‍👦, combining e\u0301 and o\u0308, \u200b zero width, a\u00a0b\u3000c",
    "$a^2+b^2=c^2$ | `code` ~ <tag/> 100% #1 @me /path/to//file\n/x",
    "....!!!???---___\n\n \n\t\n  trailing   ",
]


def lines() -> list[str]:
    paths = sorted([*_ROOT.glob("docs/*.md"), *_ROOT.glob("atom/model_loader/**/*.py")])
    found = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    # llama.cpp takes this text for a special token, whatever the file says.
    return [*LINES, *dict.fromkeys(line for line in found if line and "</s>" not in line)]


def write_vocabulary(source: Path, target: Path, pre: str) -> None:
    """A GGUF file with the metadata of another, but for its pre-tokenizer, and no tensors."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for key, value in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", _KEY):
            inner = value.types[-1] if value.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, value.contents(), value.types[0], sub_type=inner)
    writer.add_string(_KEY, pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def differing(
    path: Path, folder: Path, python: Path, texts: Sequence[str]
) -> Iterator[tuple[str, list[str | None], list[str | None]]]:
    """Texts of other tokens, with the tokens here and in llama.cpp."""
    folder.mkdir()
    write_tokenizer(read_gguf(path), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = llama_cpp_answers(python, path, texts, 0, False)
    for text, answer in zip(texts, theirs, strict=True):
        ids = tokenizer.encode(text).ids
        if ids != answer["prompt"]:
            yield (
                text,
                [tokenizer.id_to_token(i) for i in ids],
                [tokenizer.id_to_token(i) for i in answer["prompt"]],
            )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("--python", type=Path, required=True, help="one with llama-cpp-python")
    parser.add_argument("--names", nargs="+", choices=PRE_TOKENIZERS, default=list(PRE_TOKENIZERS))
    args = parser.parse_args(argv)
    texts = lines()
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.names:
            path = Path(scratch) / f"{name}.gguf"
            write_vocabulary(args.model, path, name)
            found = list(differing(path, Path(scratch) / name, args.python, texts))
            path.unlink()
            print(f"{name}: {len(found)} of {len(texts)} lines differ", flush=True)
            for text, ours, theirs in found[:1]:
                print(f"  {text[:200]!r}\n  here  {ours}\n  there {theirs}", flush=True)


if __name__ == "__main__":
    main()
