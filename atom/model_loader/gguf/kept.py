"""Which matrices of a GGUF file keep their blocks, and why others become plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES

from atom.model_loader.gguf.tensors import ConvertedTensor
from atom.model_ops.quant.formats.gguf import TYPES

# Modules of a layer that are one product.
_FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)


@dataclass(frozen=True)
class KeptBlocks:
    """Attributes:
    types: GGUF's name of the type by module, of those whose blocks are kept.
    dequantised: why others are plain numbers -> how many.
    """

    types: Mapping[str, str]
    dequantised: Mapping[str, int]


def choose_kept(tensors: Sequence[ConvertedTensor]) -> KeptBlocks:
    """Keep the quantised matrices whose type has a format; parts of one product must be alike."""
    found = {
        tensor.name.removesuffix(".weight"): tensor.source.kind
        for tensor in tensors
        if len(tensor.source.shape) == 2 and GGML_QUANT_SIZES[tensor.source.kind][0] > 1
    }
    types, dequantised = {}, Counter[str]()
    for module, kind in found.items():
        others = [found.get(part) for part in _parts_of_product(module)]
        if kind.name not in TYPES:
            dequantised[f"of type {kind.name}"] += 1
        elif any(other is not kind for other in others):
            dequantised["in products of several types"] += 1
        else:
            types[module] = kind.name
    return KeptBlocks(types, dequantised)


def _parts_of_product(module: str) -> list[str]:
    """The modules that are multiplied together with one; itself if there are no others."""
    for parts in _FUSED:
        for part in parts:
            if module.endswith(f".{part}"):
                layer = module.removesuffix(part)
                return [layer + other for other in parts]
    return [module]
