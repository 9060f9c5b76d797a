"""Native experts with packed weights, against products of single experts and other batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_ops.kernels.test_native_quant import FORMATS, REASON, inputs, weights, with_inputs

from atom.model_ops.gates import ClampedGate
from atom.model_ops.kernels.native.quant import experts as quant_experts
from atom.model_ops.kernels.native.quant import linear as quant
from atom.model_ops.kernels.native.quant import pack as quant_pack
from atom.model_ops.kernels.torch import quant as torch_quant
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.quant.weights import QuantWeights, WeightFormat
from atom.model_ops.registry import OpQuery, OpTable
from atom.platform import cpu_platform

pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

EXPERTS, HIDDEN, INTER, TOP_K = 5, 256, 128, 3
ROWS = 40
INPUTS = ("float", "group", "wide")


def stacked(form: WeightFormat, out: int, size: int, seed: int) -> QuantWeights:
    """Of all experts, with small results."""
    each = [weights(form, out, size, seed=seed + e) for e in range(EXPERTS)]
    parts = {name: torch.stack([e.tensors()[name] for e in each]) for name in each[0].tensors()}
    return QuantWeights(form, **parts)


def expert(of: QuantWeights, index: int) -> QuantWeights:
    one = of.experts(index, index + 1)
    return replace(one, **{name: tensor[0] for name, tensor in one.tensors().items()})


def choices(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids; one expert of each fourth row is elsewhere."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(rows, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K].int()
    ids[::4, 0] = EXPERTS
    return torch.rand(rows, TOP_K, generator=generator), ids


def one_by_one(
    x: torch.Tensor, w13: QuantWeights, w2: QuantWeights, scores: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The sum over experts in the order of their ids, with `quant_linear`."""
    total = torch.zeros(x.shape[0], w2.shape[0])
    for e in range(EXPERTS):
        into, out_of = (quant_pack.prepare(expert(w, e), x.dtype) for w in (w13, w2))
        gate, up = quant.quant_linear(x, into, None).float().chunk(2, dim=-1)
        h = (gate * torch.sigmoid(gate) * up).to(x.dtype)
        result = quant.quant_linear(h, out_of, None).float()
        total += (scores * (ids == e)).sum(-1, keepdim=True) * result
    return total


def experts(
    x: torch.Tensor, w13: QuantWeights, w2: QuantWeights, scores: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    prepared = quant_experts.prepare(w13, w2, x.dtype)
    return quant_experts.quant_experts(x, *prepared, scores, ids)


@pytest.mark.parametrize("how", INPUTS)
@pytest.mark.parametrize("name", ["int8 rows", "int8", "int4", "int4 zeros", "int4 of 256"])
def test_the_sum_of_single_experts(name: str, how: str) -> None:
    form = with_inputs(FORMATS[name], how)
    w13, w2 = stacked(form, 2 * INTER, HIDDEN, 0), stacked(form, HIDDEN, INTER, 50)
    if form.super_columns:
        w2 = stacked(with_inputs(FORMATS["int4"], how), HIDDEN, INTER, 50)
    x, (scores, ids) = inputs(ROWS, HIDDEN), choices()
    expected = one_by_one(x, w13, w2, scores, ids)
    got = experts(x, w13, w2, scores, ids)
    # A code of what lies between the products may fall on either side of a half.
    near = 1e-5 if how == "float" else 1e-2
    assert (got - expected).abs().max() < near * expected.abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", INPUTS)
def test_a_row_has_the_same_bits_in_every_batch(how: str, dtype: torch.dtype) -> None:
    form = with_inputs(FORMATS["int4"], how)
    w13, w2 = stacked(form, 2 * INTER, HIDDEN, 0), stacked(form, HIDDEN, INTER, 50)
    prepared = quant_experts.prepare(w13, w2, dtype)
    x, (scores, ids) = inputs(200, HIDDEN, dtype), choices(200)
    together = quant_experts.quant_experts(x, *prepared, scores, ids)
    for rows in (slice(0, 1), slice(7, 9), slice(30, 60)):
        alone = quant_experts.quant_experts(x[rows], *prepared, scores[rows], ids[rows])
        assert torch.equal(alone, together[rows])


def test_only_experts_elsewhere() -> None:
    form = FORMATS["int4"]
    w13, w2 = stacked(form, 2 * INTER, HIDDEN, 0), stacked(form, HIDDEN, INTER, 50)
    ids = torch.full((2, TOP_K), EXPERTS, dtype=torch.int64)
    assert not experts(inputs(2, HIDDEN), w13, w2, torch.ones(2, TOP_K), ids).any()
    ids[1, 2] = -1
    with pytest.raises(IndexError, match="token 1 has experts"):
        experts(inputs(2, HIDDEN), w13, w2, torch.ones(2, TOP_K), ids)


def test_dequantised_experts() -> None:
    form = WeightFormat("fp8", 128, 128)
    codes = torch.randn(EXPERTS, 2 * INTER, HIDDEN).to(torch.float8_e4m3fn)
    w13 = QuantWeights(form, codes, torch.rand(EXPERTS, 2, 2))
    w2 = QuantWeights(form, codes[:, :HIDDEN, :INTER].contiguous(), torch.rand(EXPERTS, 2, 1))
    dense = torch_quant.prepare_experts(w13, w2, torch.float32)
    x, (scores, ids) = inputs(ROWS, HIDDEN), choices()
    expected = torch_quant.quant_experts(x, *dense, scores, ids)
    got = quant_experts.dense_experts(x, *dense, scores, ids)
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("form", "inter", "reason"),
    [
        (FORMATS["int4"], 98, "intermediate_size=98"),
        (FORMATS["int4 zeros"], 64 + 32, None),
        (WeightFormat("fp8", 128, 128), 128, "reads int4, int6 and int8"),
    ],
)
def test_what_is_refused(form: WeightFormat, inter: int, reason: str | None) -> None:
    shape = {"num_experts": 4, "hidden_size": HIDDEN, "intermediate_size": inter}
    refusal = quant_experts.refuses(OpQuery(cpu_platform(), torch.bfloat16, shape, weights=form))
    assert (refusal is None) == (reason is None)
    assert reason is None or (refusal is not None and refusal.startswith(reason))


MXFP4 = WeightFormat("fp4", 1, 32, "e8m0")


def mxfp4(out: int, size: int, seed: int) -> QuantWeights:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (EXPERTS, out, size // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(119, 124, (EXPERTS, out, size // 32), generator=generator)
    return QuantWeights(MXFP4, codes, scale.to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_experts_of_mxfp4(dtype: torch.dtype) -> None:
    """The table's choice is what PyTorch makes of the numbers; rows have the same bits alone."""
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "elsewhere": 0}
    sizes |= {"hidden_size": HIDDEN, "intermediate_size": INTER}
    w13, w2 = mxfp4(2 * INTER, HIDDEN, 1), mxfp4(HIDDEN, INTER, 2)
    generator = torch.Generator().manual_seed(4)
    biases = [torch.randn(EXPERTS, n, generator=generator).to(dtype) for n in (2 * INTER, HIDDEN)]
    x, (scores, ids) = inputs(ROWS, HIDDEN, dtype), choices()
    table = OpTable(cpu_platform(), OPS)
    choice = table.resolve_weights("quant_experts", dtype, MXFP4, **sizes, clamped=1)
    assert choice.name == "native"
    assert choice.prepare is not None
    assert not choice.dequantises
    prepared = choice.prepare(w13, w2, dtype)
    gate = ClampedGate(1.702, 2.0)
    found = choice.function(x, *prepared, scores, ids, 0, gate, biases)
    dense = torch_quant.prepare_experts(w13, w2, torch.float32)
    wide = biases[0].float(), biases[1].float()
    expected = torch_quant.quant_experts(x.float(), *dense, scores, ids, 0, gate, wide)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype] * float(expected.abs().max())
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=0)
    for rows in ([7], [3, 39, 5]):
        own = choice.function(x[rows], *prepared, scores[rows], ids[rows], 0, gate, biases)
        assert torch.equal(own, found[rows])
