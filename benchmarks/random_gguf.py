"""Write a GGUF file of a published shape with random weights and the embedded model's tokenizer.

python benchmarks/random_gguf.py llama-1b q4_0 1b-q4_0.gguf
python benchmarks/random_gguf.py qwen3-30b-a3b q4_k_m moe.gguf --layers 6

Its texts mean nothing; its speed is that of a model of this shape, but for the vocabulary of
49,152 tokens. Blocks are random bytes whose scales make weights of a usual size. In `q4_k_m` the
matrices that llama.cpp gives more bits are Q6_K, and so is the embedding there and in `q4_0`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _hybrid_gguf import copy_fields
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

from atom.model_loader.locate import embedded_model

_SPREAD = 0.02
_VOCABULARY = 49152
_Q4_0, _Q8_0, _BF16, _F32, _Q4_K, _Q6_K = (
    GGMLQuantizationType[name] for name in ("Q4_0", "Q8_0", "BF16", "F32", "Q4_K", "Q6_K")
)
# Most matrices, the embedding, those of `Writer.is_finer`, and GGUF's number of the file's type.
TYPES = {
    "q4_0": (_Q4_0, _Q6_K, _Q4_0, 2),
    "q8_0": (_Q8_0, _Q8_0, _Q8_0, 7),
    "q4_k_m": (_Q4_K, _Q6_K, _Q6_K, 15),
    "bf16": (_BF16, _BF16, _BF16, 32),
}
# (byte, number) of the scales of a block.
_SCALES = {
    _Q4_0: ((0, _SPREAD / 4),),
    _Q8_0: ((0, _SPREAD / 64),),
    _Q4_K: ((0, _SPREAD / 160), (2, _SPREAD / 22)),
    _Q6_K: ((208, _SPREAD / 960),),
}


@dataclass(frozen=True)
class Shape:
    """Attributes:
    wide: of a feed-forward layer, or of an expert.
    context: the longest, in tokens.
    normed: whether each head's query and key are.
    experts, used: 0 where there are none.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    wide: int
    context: int
    normed: bool = False
    experts: int = 0
    used: int = 0


SHAPES = {
    "llama-1b": Shape("llama", 16, 2048, 32, 8, 64, 8192, 131072),
    "llama-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 131072),
    "qwen3-4b": Shape("qwen3", 36, 2560, 32, 8, 128, 9728, 40960, normed=True),
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 32, 4, 128, 768, 40960, True, 128, 8),
}


class Writer:
    """Writes one file."""

    def __init__(self, path: Path, shape: Shape, kind: str, layers: int) -> None:
        self._shape, self._layers = shape, layers
        self._usual, self._embedding, self._finer, self._file_type = TYPES[kind]
        self._random = np.random.default_rng(1)
        self._to = GGUFWriter(path, shape.architecture)

    def write(self) -> None:
        self._add_keys()
        for name, size in self._tensors():
            kind = self._kind_of(name, size)
            self._to.add_tensor(f"{name}.weight", self._blocks(kind, size), raw_dtype=kind)
        self._to.write_header_to_file()
        self._to.write_kv_data_to_file()
        self._to.write_tensors_to_file()
        self._to.close()

    def is_finer(self, name: str) -> bool:
        """Whether it is one of the values and second products that have more bits in `q4_k_m`."""
        _, layer, part = name.split(".")
        eighth, at = self._layers // 8, int(layer)
        of_these = at < eighth or at >= 7 * eighth or (at - eighth) % 3 == 2
        return of_these and part.startswith(("attn_v", "ffn_down"))

    def _add_keys(self) -> None:
        shape = self._shape
        keys: dict[str, Any] = {
            "block_count": self._layers,
            "context_length": shape.context,
            "embedding_length": shape.hidden,
            "feed_forward_length": shape.wide,
            "attention.head_count": shape.heads,
            "attention.head_count_kv": shape.kv_heads,
            "attention.key_length": shape.head,
            "attention.value_length": shape.head,
            "rope.dimension_count": shape.head,
        }
        if shape.experts:
            keys |= {"expert_count": shape.experts, "expert_used_count": shape.used}
            keys["expert_feed_forward_length"] = shape.wide
        for key, value in keys.items():
            self._to.add_uint32(f"{shape.architecture}.{key}", value)
        self._to.add_float32(f"{shape.architecture}.attention.layer_norm_rms_epsilon", 1e-5)
        self._to.add_file_type(self._file_type)
        tokenizer = GGUFReader(embedded_model())
        copy_fields(tokenizer, self._to, lambda key: key.startswith("tokenizer."))

    def _tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        shape = self._shape
        queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
        gate, down = (shape.wide, shape.hidden), (shape.hidden, shape.wide)
        yield "token_embd", (_VOCABULARY, shape.hidden)
        yield "output_norm", (shape.hidden,)
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm": (shape.hidden,),
            "ffn_norm": (shape.hidden,),
            "attn_q": (queries, shape.hidden),
            "attn_k": (keys, shape.hidden),
            "attn_v": (keys, shape.hidden),
            "attn_output": (shape.hidden, queries),
        }
        if shape.normed:
            parts |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (shape.head,))
        if shape.experts:
            parts["ffn_gate_inp"] = (shape.experts, shape.hidden)
            parts |= dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (shape.experts, *gate))
            parts["ffn_down_exps"] = (shape.experts, *down)
        else:
            parts |= {"ffn_gate": gate, "ffn_up": gate, "ffn_down": down}
        for layer in range(self._layers):
            for part, size in parts.items():
                yield f"blk.{layer}.{part}", size

    def _kind_of(self, name: str, size: tuple[int, ...]) -> GGMLQuantizationType:
        if len(size) == 1 or name.endswith("ffn_gate_inp"):
            return _F32
        if name == "token_embd":
            return self._embedding
        return self._finer if self.is_finer(name) else self._usual

    def _blocks(self, kind: GGMLQuantizationType, size: tuple[int, ...]) -> NDArray[Any]:
        if len(size) == 1:
            return np.ones(size, np.float32)
        if kind in (_F32, _BF16):
            numbers = self._random.standard_normal(size, dtype=np.float32)
            numbers *= np.float32(_SPREAD)
            if kind is _F32:
                return numbers
            high: NDArray[np.uint16] = numbers.view(np.uint16)[..., 1::2].copy()
            return high.view(np.uint8)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        count = int(np.prod(size)) // block
        raw: NDArray[np.uint8] = self._random.integers(0, 256, (count, block_bytes), dtype=np.uint8)
        for byte, scale in _SCALES[kind]:
            raw[:, byte : byte + 2] = np.array([scale], np.float16).view(np.uint8)
        return raw.reshape(*size[:-1], -1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("type", choices=TYPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    Writer(args.file, shape, args.type, args.layers or shape.layers).write()


if __name__ == "__main__":
    main()
