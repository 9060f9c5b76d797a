"""Products and experts for kernels.py, with plain weights or quantised ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from _bytes import linear_bytes, moe_experts_bytes, quantised_bytes
from _device import num_calls
from _kernel_loads import Calls, Case, FoundOps
from _kernel_sizes import ExpertSizes, ProductSizes
from _operations import linear_operations, moe_experts_operations

from atom.model_ops.quant.weights import Activations, QuantWeights, WeightFormat
from atom.platform import Platform

# What checkpoints of these sizes come in: DeepSeek's 8 bits, Kimi-K2.5's own 4, and AMD's.
FORMATS = {
    "fp8": WeightFormat("fp8", 128, 128, activations=Activations("fp8", 128)),
    "int4": WeightFormat("int4", 1, 32),
    "mxfp4": WeightFormat("fp4", 1, 32, "e8m0", activations=Activations("fp4", 32, "e8m0")),
}
_SCALE_DTYPES = {"fp8": torch.float32, "int4": torch.bfloat16, "fp4": torch.uint8}
# Standard deviations of the codes that `random_weights` draws.
_SPREADS = {"fp8": 64.0, "int4": 4.6, "fp4": 2.9}


def random_weights(form: WeightFormat, generator: torch.Generator, *shape: int) -> QuantWeights:
    """Weights [..., out, in] of standard deviation near in ** -0.5.

    Args:
        form: one of `FORMATS`.
    """
    *experts, outputs, inputs = shape
    device = generator.device
    stored = (*experts, outputs, int(inputs / form.codes_per_byte))
    spread = _SPREADS[form.codes]
    if form.codes == "fp8":
        # By matrix: the numbers take four times as much as their codes.
        codes = torch.empty(stored, dtype=torch.float8_e4m3fn, device=device)
        for matrix in codes.view(-1, outputs, inputs):
            normal = torch.randn(matrix.shape, generator=generator, device=device)
            matrix.copy_((spread * normal).clamp(-448, 448))
    else:
        codes = torch.empty(stored, dtype=torch.uint8, device=device)
        codes.random_(0, 256, generator=generator)
    groups = (*experts, math.ceil(outputs / form.rows), math.ceil(inputs / form.columns))
    size = 1 / (spread * inputs**0.5)
    if form.scale_type == "e8m0":
        exponent = 127 + round(math.log2(size))
        scale = torch.randint(
            exponent - 1, exponent + 2, groups, generator=generator, device=device
        )
    else:
        scale = size * (0.5 + torch.rand(groups, generator=generator, device=device))
    return QuantWeights(form, codes, scale.to(_SCALE_DTYPES[form.codes]))


def _sizes(sizes: object, form: WeightFormat | None) -> str:
    return str(sizes) if form is None else f"{sizes}, {form}"


class _Weighted:
    """What products and experts share: weights of one format, and no cache."""

    storage: torch.dtype | None = None

    def __init__(
        self,
        platform: Platform,
        dtype: torch.dtype,
        rotated_bytes: int,
        form: WeightFormat | None = None,
    ) -> None:
        self._platform, self._dtype, self._form = platform, dtype, form
        self._rotated_bytes = rotated_bytes
        self._function: Any = None
        self._prepare: Any = None

    def refusal(self, case: Case) -> str | None:
        """None: tokens take next to no memory."""
        del case
        return None

    def _resolve(self, op: str, implementation: str, **shape: int) -> None:
        ops = FoundOps(self._platform, op, implementation)
        choice = ops.resolve_weights(op, self._dtype, self._form, **shape)
        self._function, self._prepare = choice.function, choice.prepare

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self._platform.device).manual_seed(seed)

    def _normal(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator, device=generator.device)
        return numbers.to(self._dtype)

    def _weight_bytes(self, outputs: int, inputs: int) -> int:
        if self._form is None:
            return outputs * inputs * self._dtype.itemsize
        scale = _SCALE_DTYPES[self._form.codes].itemsize
        return quantised_bytes(self._form, outputs, inputs, scale)


class Product(_Weighted):
    """A product with weights that each call has others of."""

    def __init__(self, sizes: ProductSizes, *common: Any) -> None:
        super().__init__(*common)
        self.op = "linear" if self._form is None else "quant_linear"
        self.sizes = _sizes(sizes, self._form)
        self._sizes = sizes

    def use(self, implementation: str) -> None:
        s = self._sizes
        self._resolve(self.op, implementation, in_features=s.inputs, out_features=s.outputs)

    def calls(self, case: Case) -> Calls:
        s, function = self._sizes, self._function
        generator = self._generator(case.batch)
        x = self._normal(generator, case.batch, s.inputs)
        matrix = self._weight_bytes(s.outputs, s.inputs)
        size = linear_bytes(case.batch, s.inputs, s.outputs, x.itemsize, matrix)
        count = num_calls(size, self._rotated_bytes, self._rotated_bytes)
        weights = [self._weights(generator) for _ in range(count)]

        def call(weight: Any) -> Callable[[], torch.Tensor]:
            return lambda: function(x, weight, None)

        operations = linear_operations(case.batch, s.inputs, s.outputs)
        return Calls([call(weight) for weight in weights], size, operations)

    def _weights(self, generator: torch.Generator) -> Any:
        s = self._sizes
        if self._form is None:
            return self._normal(generator, s.outputs, s.inputs) / s.inputs**0.5
        weights = random_weights(self._form, generator, s.outputs, s.inputs)
        return self._prepare(weights, self._dtype) if self._prepare is not None else weights


class Experts(_Weighted):
    """Every token's experts; each call draws others."""

    def __init__(self, sizes: ExpertSizes, *common: Any) -> None:
        super().__init__(*common)
        self.op = "moe_experts" if self._form is None else "quant_experts"
        self.sizes = _sizes(sizes, self._form)
        self._sizes = sizes
        self._weights: tuple[Any, Any] | None = None

    def use(self, implementation: str) -> None:
        s = self._sizes
        self._resolve(
            self.op,
            implementation,
            num_experts=s.experts,
            top_k=s.top_k,
            elsewhere=0,
            hidden_size=s.hidden,
            intermediate_size=s.intermediate,
        )
        self._weights = None  # its memory first
        generator = self._generator(2)
        shapes = (2 * s.intermediate, s.hidden), (s.hidden, s.intermediate)
        self._weights = self._prepared(*(self._matrices(generator, *shape) for shape in shapes))

    def _matrices(self, generator: torch.Generator, outputs: int, inputs: int) -> Any:
        shape = self._sizes.experts, outputs, inputs
        if self._form is not None:
            return random_weights(self._form, generator, *shape)
        weights = torch.empty(shape, dtype=self._dtype, device=generator.device)
        return weights.normal_(std=inputs**-0.5, generator=generator)

    def _prepared(self, w13: Any, w2: Any) -> tuple[Any, Any]:
        if self._prepare is None:
            return w13, w2
        dtype = () if self._form is None else (self._dtype,)
        prepared: tuple[Any, Any] = self._prepare(w13, w2, *dtype)
        return prepared

    def calls(self, case: Case) -> Calls:
        assert self._weights is not None, "use() comes first"
        s, function, (w13, w2) = self._sizes, self._function, self._weights
        generator = self._generator(case.batch)
        x = self._normal(generator, case.batch, s.hidden)
        matrices = (2 * s.intermediate, s.hidden), (s.hidden, s.intermediate)
        expert = sum(self._weight_bytes(*shape) for shape in matrices)
        once = s.top_k * expert
        count = num_calls(once, self._rotated_bytes, self._rotated_bytes)
        ids = [self._draw(case.batch, generator) for _ in range(count)]
        weights = torch.full((case.batch, s.top_k), 1 / s.top_k, device=x.device)
        visited = [len(set(drawn.flatten().tolist())) for drawn in ids]
        sizes = [
            moe_experts_bytes(
                n, case.batch, s.top_k, s.hidden, s.intermediate, x.itemsize, expert
            )
            for n in visited
        ]  # fmt: skip

        def call(drawn: torch.Tensor) -> Callable[[], torch.Tensor]:
            return lambda: function(x, w13, w2, weights, drawn, 0)

        operations = moe_experts_operations(case.batch, s.top_k, s.hidden, s.intermediate)
        return Calls([call(drawn) for drawn in ids], sum(sizes) / len(sizes), operations)

    def _draw(self, tokens: int, generator: torch.Generator) -> torch.Tensor:
        """[T, k] int64, every expert as likely as any other."""
        s = self._sizes
        order = torch.rand(tokens, s.experts, generator=generator, device=generator.device)
        return order.argsort(dim=1)[:, : s.top_k].contiguous()
