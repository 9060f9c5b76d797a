"""Quantised weights, and inputs that quantising does not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from aiter_cases import BF16, Aiter
from fake_aiter import AITER, FakeAiter
from fake_aiter_quant import E2M1, fp8_of

from atom.model_ops.kernels import probe
from atom.model_ops.quant.weights import QuantWeights, WeightFormat, pack_nibbles
from atom.model_ops.registry import OpTable
from atom.platform import Platform


@contextmanager
def fake_of(arch: str) -> Iterator[Aiter]:
    fake = FakeAiter(arch=arch)
    with probe.replaced(fake.library):
        yield Aiter(OpTable(Platform("rocm", arch, True), AITER), torch.device("cpu"), fake)


def random_weights(form: WeightFormat, *shape: int, seed: int = 0) -> QuantWeights:
    """[..., out, in] with all kinds of codes, -0 among them."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator)
    leading, (out, size) = shape[:-2], shape[-2:]
    if form.codes == "int8":
        codes = (numbers * 40).clamp(-128, 127).to(torch.int8)
    elif form.codes in ("fp4", "int4"):
        codes = pack_nibbles(torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator))
    else:
        numbers[..., ::5] = -0.0
        codes = (numbers * 90).clamp(-448, 448).to(torch.float8_e4m3fn)
    weights = QuantWeights(form, codes)
    if form.columns:
        blocks = *leading, -(-out // form.rows), size // form.columns
        exponents = torch.randint(124, 131, blocks, dtype=torch.uint8, generator=generator)
        factors = torch.rand(blocks, generator=generator) + 0.5
        weights.scale = exponents if form.scale_type == "e8m0" else factors.to(BF16)
    else:
        weights.row_scale = torch.rand(*leading, out, generator=generator) + 0.5
    if form.activations is not None and form.activations.is_static:
        weights.input_scale = torch.tensor(0.25)
    return weights


def clone(weights: QuantWeights, device: torch.device) -> QuantWeights:
    """On the device; preparing converts in place."""
    return replace(weights, **{n: x.to(device, copy=True) for n, x in weights.tensors().items()})


def exact_inputs(weights: QuantWeights, arch: str, tokens: int) -> torch.Tensor:
    """[tokens, in] bfloat16: numbers of the codes, the largest among each group, times powers."""
    how, size = weights.format.activations, weights.shape[1]
    generator = torch.Generator().manual_seed(9)
    if how is None:
        return torch.randn(tokens, size, generator=generator).to(BF16)
    group = how.group or size
    shape = tokens, size // group, group
    if how.codes == "fp4":
        numbers = E2M1[torch.randint(0, 8, shape, generator=generator)]
        numbers = numbers * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)
        limit = 6.0
    elif how.codes == "int8":
        numbers = torch.randint(-127, 128, shape, generator=generator).float()
        limit = 127.0
    else:
        limit = torch.finfo(fp8_of(arch)).max
        numbers = torch.randn(shape, generator=generator) * limit / 4
        numbers = numbers.clamp(-limit, limit).to(fp8_of(arch)).float()
    numbers[..., 3] = limit
    powers = torch.randint(-6, 3, (tokens, size // group, 1), generator=generator).float().exp2()
    if weights.input_scale is not None:
        powers = weights.input_scale * (2 if arch == "gfx942" else 1)
    return (numbers * powers).flatten(1).to(BF16)
