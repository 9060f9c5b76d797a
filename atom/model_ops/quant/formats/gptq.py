"""`quant_method: gptq`: weights of 4 or 8 bits of AutoGPTQ and GPTQModel.

Source: the `QuantLinear` of AutoGPTQ, and GPTQModel's `dynamic` rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from atom.config import ConfigError
from atom.model_ops.quant.base import (
    IN,
    OUT,
    Axis,
    Header,
    LayerKind,
    QuantConfig,
    QuantMethod,
    StoredTensor,
)
from atom.model_ops.quant.names import find_header, read_flag, read_object, same_for_all
from atom.model_ops.quant.patterns import PatternReader
from atom.model_ops.quant.scales import scale_dtype
from atom.model_ops.quant.weights import QuantWeights, WeightFormat, unpack_nibbles
from atom.model_ops.quant.words import (
    Groups,
    as_bytes,
    read_group_size,
    read_layout,
    signed,
    take_columns,
)

# How GPTQ stores the weights of a layer.
#
# Source: the `QuantLinear` of AutoGPTQ and GPTQModel.

_WORD_BITS = 32


@dataclass(frozen=True)
class Scheme:
    """Attributes:
    symmetric: all zero points stand for the middle code.
    has_order: inputs are grouped in another order than their own (`desc_act`).
    zeros_less_one: zero points are stored less one (`checkpoint_format: gptq`).
    """

    bits: int
    groups: Groups
    symmetric: bool
    has_order: bool
    zeros_less_one: bool

    def __str__(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits} bits, group_size {self.groups.size or -1}, {kind}"

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)


class GptqMethod(QuantMethod):
    """`qweight` int32 [in / n, out], `qzeros` int32 [in / group, out / n] with n codes to a word,
    `scales` [in / group, out], `g_idx` int32 or int64 [in]: the group of each input.

    A stored zero point of 15 is 16 if zero points are stored less one; for 8 bits, 255 is refused.
    """

    def __init__(self, scheme: Scheme, scale: Header | None) -> None:
        self._scheme = scheme
        groups, codes = scheme.groups, _WORD_BITS // scheme.bits
        self.format = WeightFormat(
            "int4" if scheme.bits == 4 else "int8",
            1,
            groups.columns,
            has_zeros=not scheme.symmetric,
        )
        middles = scheme.middle - scheme.zeros_less_one
        self.stored = {
            "qweight": StoredTensor((Axis("in", codes), OUT), torch.int32),
            "qzeros": StoredTensor(
                (groups.axis, Axis("out", codes)),
                torch.int32,
                is_optional=scheme.symmetric,
                fill=int.from_bytes(
                    (middles * (0x11 if scheme.bits == 4 else 1)).to_bytes(1, "little") * 4,
                    "little",
                    signed=True,
                ),
            ),
            "scales": StoredTensor((groups.axis, OUT), scale_dtype(scale), "numbers"),
            "g_idx": StoredTensor((IN,), torch.int32, is_optional=not scheme.has_order),
            # Of models without biases; older tools stored it nevertheless.
            "bias": StoredTensor((OUT,), torch.float32, "zeros", is_optional=True),
        }

    def read(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """`g_idx` less the groups of inputs in their own order, which survives cuts for ranks."""
        size = self._scheme.groups.size
        if name == "g_idx" and tensor.dtype is torch.int64:
            if not tensor.is_meta and bool(((tensor < 0) | (tensor >= tensor.numel())).any()):
                raise ValueError(f"groups {int(tensor.min())} to {int(tensor.max())} of inputs")
            tensor = tensor.to(torch.int32)
        if name == "g_idx" and size is not None:
            inputs = torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            tensor = tensor - inputs // size
        return {name: tensor}

    def convert(
        self, tensors: Mapping[str, torch.Tensor], rows: Sequence[int], columns: int
    ) -> QuantWeights:
        scheme, groups = self._scheme, self._scheme.groups
        # int32 words are little-endian: their bytes are codes, or pairs of them.
        codes = as_bytes(tensors["qweight"].mT)
        order = self._order(tensors["g_idx"], columns)
        if order is not None:
            codes = take_columns(codes, order, scheme.bits)
        zeros = None
        stored_zeros = self._zeros(tensors["qzeros"])
        if not scheme.symmetric:
            zeros = groups.spread(stored_zeros.to(codes.dtype), columns)
        elif bool((stored_zeros != scheme.middle).any()):
            raise ValueError(
                f"zero points are {int(stored_zeros.min())} to {int(stored_zeros.max())}, and the "
                f"weights are symmetric (sym), which makes them {scheme.middle}"
            )
        if scheme.bits == 8:
            codes = signed(codes)
            zeros = None if zeros is None else signed(zeros)
        scale = groups.spread(tensors["scales"].mT, columns)
        return QuantWeights(self.format, codes, scale, zeros, column_order=order)

    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        """[..., groups, words] -> int16 [..., out, groups]."""
        zeros = as_bytes(words)
        if self._scheme.bits == 4:
            zeros = unpack_nibbles(zeros)
        zeros = zeros.to(torch.int16).mT + int(self._scheme.zeros_less_one)
        if self._scheme.bits == 8 and bool((zeros > 255).any()):
            raise ValueError("a zero point of 8 bits is stored as 255, which stands for 256")
        return zeros

    def _order(self, shifts: torch.Tensor, columns: int) -> torch.Tensor | None:
        """The inputs sorted by group, [in]; None if they are.

        Args:
            shifts: [..., stacked matrices, in], from `read`.
        """
        if not shifts.any():
            return None
        every = shifts.flatten(0, -2)
        if bool((every != every[0]).any()):
            raise ValueError(
                f"the {len(every)} matrices of one product group their inputs in different orders "
                f"(g_idx), which is not supported"
            )
        size = self._scheme.groups.size or columns
        inputs = torch.arange(columns, device=shifts.device)
        group = every[0] + inputs // size
        own = (inputs // size).bincount()
        if bool((group < 0).any()) or not torch.equal(own, group.bincount(minlength=len(own))):
            raise ValueError(
                f"g_idx does not divide this rank's {columns} inputs into its {len(own)} groups of "
                f"{size}: with desc_act, a layer whose inputs are split over ranks is not "
                f"supported; use one rank"
            )
        return group.argsort(stable=True)


# Keys that change what the stored numbers mean.
_REFUSED = ("is_marlin_format", "rotation", "adapter", "modules_in_block_to_quantize")


def parse(config: Mapping[str, Any], headers: Mapping[str, Header]) -> QuantConfig:
    """Raises:
    ConfigError: for a key whose value is not supported.
    """
    for key in _REFUSED:
        if config.get(key):
            raise ConfigError(f"quantization_config: {key}={config[key]!r} is not supported")
    stored_as = read_layout(config, ("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    read_flag(config, "pack_dtype", ("int32",), "int32")
    base = _override(Scheme(4, Groups(None), True, False, stored_as == "gptq"), config)
    if "bits" not in config or "group_size" not in config:
        raise ConfigError("quantization_config: GPTQ needs bits and group_size")
    reader = PatternReader("dynamic")
    rules = tuple(
        _read_rule(reader, rule, overrides, base)
        for rule, overrides in read_object("dynamic", config.get("dynamic")).items()
    )
    return GptqConfig(base, rules, bool(config.get("lm_head")), headers)


@dataclass(frozen=True)
class GptqConfig:
    """Attributes:
    base: of all layers that no rule matches.
    rules: patterns for the start of a name and what they change; None skips the layer.
    """

    base: Scheme
    rules: tuple[tuple[re.Pattern[str], Scheme | None], ...]
    has_head: bool
    headers: Mapping[str, Header]

    def method_for(
        self, prefix: str, parts: Sequence[str] = (), kind: LayerKind = "linear"
    ) -> QuantMethod | None:
        if kind == "embedding" or (kind == "head" and not self.has_head):
            return None
        scheme = same_for_all(prefix, parts, self._scheme_of)
        if scheme is None:
            return None
        return GptqMethod(scheme, find_header(self.headers, prefix, parts, "scales"))

    def _scheme_of(self, name: str) -> Scheme | None:
        for pattern, scheme in self.rules:
            if pattern.match(name):
                return scheme
        return self.base


def _read_rule(
    reader: PatternReader, rule: str, overrides: object, base: Scheme
) -> tuple[re.Pattern[str], Scheme | None]:
    """`-:` skips the modules that match, `+:` or no sign changes them."""
    pattern = reader.expression(rule.removeprefix("-:").removeprefix("+:"), rule)
    changes = read_object(f"dynamic[{rule!r}]", overrides)
    return pattern, None if rule.startswith("-:") else _override(base, changes)


def _override(scheme: Scheme, config: Mapping[str, Any]) -> Scheme:
    if "bits" in config:
        bits = config["bits"]
        if bits not in (4, 8):
            raise ConfigError(
                f"quantization_config: GPTQ with bits={bits!r} is not supported, only 4 and 8"
            )
        scheme = replace(scheme, bits=bits)
    if "group_size" in config:
        scheme = replace(scheme, groups=Groups(read_group_size(config["group_size"])))
    return replace(
        scheme,
        symmetric=bool(config.get("sym", scheme.symmetric)),
        has_order=bool(config.get("desc_act", scheme.has_order)),
    )
