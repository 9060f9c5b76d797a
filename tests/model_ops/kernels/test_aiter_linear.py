"""Products with aiter: which kernel multiplies how many rows, over the fake and over aiter."""

from __future__ import annotations

import pytest
import torch
from aiter_cases import BF16, MI300X, Aiter, check, random
from fake_aiter import AITER, FakeAiter

from atom.model_ops.kernels import probe
from atom.model_ops.kernels.aiter.linear import linear_few_rows_into
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpTable

# More outputs than compute units, which aiter has a small product for.
OUTPUTS = 641


def check_product(aiter: Aiter, x: torch.Tensor, outputs: int, has_bias: bool = False) -> None:
    sizes = {"in_features": x.shape[-1], "out_features": outputs}
    linear = aiter.ops.resolve("linear", x.dtype, **sizes)
    weight = random(aiter, outputs, x.shape[-1], seed=1, dtype=x.dtype)
    bias = random(aiter, outputs, seed=2, dtype=x.dtype) if has_bias else None
    before = x.clone()
    wanted = x.double() @ weight.double().T
    if bias is not None:
        wanted += bias.double()
    check(linear(x, weight, bias), wanted)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
# What fits into 64 KiB, hardly fits, and does not, with 4 rows; with whole tiles of outputs or not.
@pytest.mark.parametrize("inputs", [256, 8200, 16384])
@pytest.mark.parametrize("outputs", [640, OUTPUTS])
def test_few_rows(aiter: Aiter, rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    check_product(aiter, random(aiter, rows, inputs, dtype=dtype), outputs)
    aiter.called("wvSpltK")


def test_few_rows_that_are_apart_or_have_more_dimensions(aiter: Aiter) -> None:
    check_product(aiter, random(aiter, 4, 512)[:, :256], OUTPUTS)
    check_product(aiter, random(aiter, 2, 2, 256), OUTPUTS)
    aiter.called("wvSpltK")


@pytest.mark.parametrize(
    ("shape", "has_bias"), [((5, 256), False), ((0, 256), False), ((1, 256), True)]
)
def test_the_tuned_product_has_more_rows_none_and_biases(
    aiter: Aiter, shape: tuple[int, int], has_bias: bool
) -> None:
    if shape[0]:
        check_product(aiter, random(aiter, *shape), OUTPUTS, has_bias)
    else:
        linear = aiter.ops.resolve("linear", BF16, in_features=256, out_features=OUTPUTS)
        out = linear(random(aiter, *shape), random(aiter, OUTPUTS, 256), None)
        assert out.shape == (0, OUTPUTS)
    aiter.called("gemm_a16w16")


def on_a_fake(fake: FakeAiter) -> Aiter:
    return Aiter(OpTable(MI300X, AITER), torch.device("cpu"), fake)


def test_what_aiter_has_a_kernel_for_is_left_to_it() -> None:
    """A measured shape, and small products; the same shape with other rows is not measured."""
    fake = FakeAiter()
    fake.tuned.add((2, OUTPUTS, 256))
    with probe.replaced(fake.library):
        aiter = on_a_fake(fake)
        for rows, outputs in ((2, OUTPUTS), (1, 608), (4, 304)):
            check_product(aiter, random(aiter, rows, 256), outputs)
        aiter.called("gemm_a16w16")
        fake.calls.clear()
        check_product(aiter, random(aiter, 3, 256), OUTPUTS)
        aiter.called("wvSpltK")


@pytest.mark.parametrize(
    ("rows", "wide", "has_bias", "called"),
    [
        (4, 0, False, {"wvSpltK"}),
        (7, 0, False, set()),  # torch's product, as aiter's table says
        (2, 0, False, {"gemm_a16w16"}),  # measured
        (4, 3, False, {"wvSpltK"}),  # columns of a wider output
        (4, 0, True, {"gemm_a16w16"}),
    ],
)
def test_products_written_to_given_memory(
    rows: int, wide: int, has_bias: bool, called: set[str]
) -> None:
    fake = FakeAiter()
    fake.tuned.add((2, OUTPUTS, 256))
    with probe.replaced(fake.library):
        aiter = on_a_fake(fake)
        x, weight = random(aiter, rows, 256), random(aiter, OUTPUTS, 256, seed=1)
        bias = random(aiter, OUTPUTS, seed=2) if has_bias else None
        out = torch.full((rows, OUTPUTS + wide), torch.nan, dtype=BF16)[:, :OUTPUTS]
        linear_few_rows_into(x, weight, bias, out)
    wanted = x.double() @ weight.double().T
    check(out, wanted if bias is None else wanted + bias.double())
    aiter.called(*called)


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        (260, OUTPUTS, "few rows: in_features=260 is no multiple of 8"),
        (256, 15, "few rows: out_features=15 is below 16"),
        (65536, 65544, "few rows: 65536 x 65544 weights are more than 4294967296"),
    ],
)
def test_sizes_that_the_kernel_for_few_rows_lacks(inputs: int, outputs: int, reason: str) -> None:
    fake = FakeAiter()
    with probe.replaced(fake.library):
        aiter = on_a_fake(fake)
        linear = aiter.ops.resolve("linear", BF16, in_features=inputs, out_features=outputs)
        assert f"not aiter: {reason}" in aiter.ops.describe()
        x, weight = random(aiter, 1, 264)[:, :260], random(aiter, OUTPUTS, 260, seed=1)
        check(linear(x, weight, None), x.double() @ weight.double().T)
        aiter.called("gemm_a16w16")


@pytest.mark.parametrize("missing", ["ops.custom.wvSpltK", "tuned_gemm.get_GEMM_A16W16_config"])
def test_an_aiter_without_it_has_the_tuned_product(missing: str) -> None:
    fake = FakeAiter(missing=[missing.rpartition(".")[2]])
    with probe.replaced(fake.library):
        aiter = on_a_fake(fake)
        check_product(aiter, random(aiter, 1, 256), OUTPUTS)
        aiter.called("gemm_a16w16")
        assert f"not aiter: this aiter has no aiter.{missing}" in aiter.ops.describe()


def test_the_table_says_what_few_rows_run() -> None:
    with probe.replaced(FakeAiter().library):
        ops = OpTable(MI300X, OPS)
        ops.resolve("linear", BF16, in_features=256, out_features=OUTPUTS)
        [_, line] = ops.describe().splitlines()
        assert "up to 4 rows by wvSpltK, unless aiter has tuned the shape" in line
        invariant = OpTable(MI300X, {"linear": OPS["linear"]}, batch_invariant=True)
        choice = invariant.resolve_weights("linear", BF16, None, in_features=256, out_features=64)
        assert choice.name == "triton"
        assert ("aiter", "not batch-invariant") in choice.passed_over
