"""Which matrices of a GGUF file keep their blocks, and why others become plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES

from atom.model_loader.gguf.tensors import ConvertedTensor
from atom.model_ops.quant.formats.gguf import TYPES


@dataclass(frozen=True)
class KeptBlocks:
    """Attributes:
    types: GGUF's name of the type by module, of those whose blocks are kept.
    dequantised: why others are plain numbers -> how many.
    """

    types: Mapping[str, str]
    dequantised: Mapping[str, int]


def choose_kept(tensors: Sequence[ConvertedTensor]) -> KeptBlocks:
    """Keep the quantised matrices whose type has a format."""
    types, dequantised = {}, Counter[str]()
    for tensor in tensors:
        kind = tensor.source.kind
        if len(tensor.source.shape) != 2 or GGML_QUANT_SIZES[kind][0] == 1:
            continue
        if kind.name in TYPES:
            types[tensor.name.removesuffix(".weight")] = kind.name
        else:
            dequantised[f"of type {kind.name}"] += 1
    return KeptBlocks(types, dequantised)
