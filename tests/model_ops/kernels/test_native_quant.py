"""Native products with packed integer weights, against float64 and against other batches."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from one_thread import one_thread  # noqa: F401  # a fixture

from atom.model_ops.kernels.native.bindings import constant
from atom.model_ops.kernels.native.build import SOURCE_DIR, native_build
from atom.model_ops.kernels.native.linear import linear, logits
from atom.model_ops.kernels.native.quant import linear as quant
from atom.model_ops.kernels.native.quant import pack as quant_pack
from atom.model_ops.kernels.native.quant.embedding import quant_embedding
from atom.model_ops.kernels.torch import quant as torch_quant
from atom.model_ops.kernels.torch.quantise import requantise
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.quant.inputs import wide_inputs
from atom.model_ops.quant.weights import (
    Activations,
    QuantWeights,
    WeightFormat,
    dequantise,
    pack_int6,
)
from atom.model_ops.registry import OpQuery, OpTable
from atom.platform import cpu_platform

REASON = native_build().reason
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

TOKEN, GROUP = Activations("int8"), Activations("int8", 32)
ROW = WeightFormat("int8", has_row_scale=True)
INT8 = WeightFormat("int8", 1, 32)
INT4 = WeightFormat("int4", 1, 32)
FORMATS = {
    "int8 rows": ROW,
    "int4 rows": WeightFormat("int4", has_row_scale=True),
    "int8": INT8,
    "int8 zeros": WeightFormat("int8", 1, 64, has_zeros=True),
    "int8 blocks": WeightFormat("int8", 128, 128),
    "int4": INT4,
    "int4 zeros": WeightFormat("int4", 1, 128, has_zeros=True),
    "int4 offsets": WeightFormat("int4", 1, 32, has_offsets=True),
    "int4 of 256": WeightFormat("int4", 1, 32, "int8", has_offsets=True, super_columns=256),
    "int6 of 256": WeightFormat("int6", 1, 16, "int8", super_columns=256),
}
INPUTS = ("float", "token", "group", "wide")


def with_inputs(form: WeightFormat, how: str) -> WeightFormat:
    if how == "wide":
        return replace(form, activations=wide_inputs(form))
    return replace(form, activations={"float": None, "token": TOKEN, "group": GROUP}[how])


CASES = [(name, how) for name in FORMATS for how in INPUTS]


def weights(
    form: WeightFormat, out: int, size: int, dtype: torch.dtype = torch.float16, seed: int = 0
) -> QuantWeights:
    """Random ones, with codes of all values."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) / 64

    if form.codes == "int8":
        codes = integers(-128, 128, out, size).to(torch.int8)
    elif form.codes == "int4":
        codes = integers(0, 256, out, size // 2).to(torch.uint8)
    else:
        codes = pack_int6(integers(0, 64, out, size).to(torch.uint8))
    result = QuantWeights(form, codes)
    if form.has_row_scale:
        return replace(result, row_scale=numbers(out))
    groups = out, -(-size // form.columns)
    result.scale = numbers(-(-out // form.rows), groups[1]).to(dtype)
    if form.has_zeros:
        low, high = (0, 17) if form.codes == "int4" else (-128, 128)
        kind = torch.uint8 if form.codes == "int4" else torch.int8
        result.zeros = integers(low, high, *groups).to(kind)
    if form.has_offsets:
        result.offset = -numbers(*groups).to(dtype) * 8
    if form.super_columns:
        result.scale = integers(-32, 64, *groups).to(torch.int8)
        above = out, -(-size // form.super_columns)
        result.super_scale = numbers(*above).half() / 16
        if form.has_offsets:
            result.offset = integers(0, 64, *groups).to(torch.int8)
            result.super_offset = -numbers(*above).half() / 4
    return result


def inputs(rows: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, size, generator=generator).to(dtype)


def exact(x: torch.Tensor, of: QuantWeights) -> torch.Tensor:
    how = of.format.activations
    rounded = x if how is None else requantise(x, how, of.input_scale)
    return rounded.double() @ dequantise(of, torch.float64).T


def assert_exact(got: torch.Tensor, x: torch.Tensor, of: QuantWeights) -> None:
    """float32 sums of some hundred terms."""
    expected = exact(x, of)
    assert got.dtype is torch.float32
    assert (got - expected).abs().max() < 1e-5 * expected.abs().mean()


def query(form: WeightFormat, size: int, dtype: torch.dtype = torch.bfloat16) -> OpQuery:
    shape = {"in_features": size, "out_features": 64}
    return OpQuery(cpu_platform(), dtype, shape, weights=form)


@pytest.mark.parametrize(("name", "how"), CASES)
def test_products_are_exact_and_the_same_in_every_batch(name: str, how: str) -> None:
    """Few rows, and many of bfloat16, which are tiles' where the processor has them."""
    form = with_inputs(FORMATS[name], how)
    for out, size in ((37, 512), (70, 288)):
        size = size if form.columns <= 32 or size % form.columns == 0 else 576
        if form.super_columns:
            size = 512
        of = weights(form, out, size)
        assert quant_pack.refuses(query(form, size)) is None
        for dtype in (torch.float32, torch.bfloat16):
            packed = quant_pack.prepare(of, dtype)
            x = inputs(70, size, dtype)
            torch.set_num_threads(1)
            everything = quant.quant_logits(x, packed)
            if packed.takes_bfloat16:
                assert torch.equal(everything, logits(x, dequantise(of, dtype)))
            else:
                assert_exact(everything, x, of)
            torch.set_num_threads(2)
            for rows in (0, 1, 2, 3, 7, 13, 16, 29, 33, 69):
                assert torch.equal(quant.quant_logits(x[:rows], packed), everything[:rows])
                assert torch.equal(
                    quant.quant_logits(x[70 - rows :], packed), everything[70 - rows :]
                )


@pytest.mark.parametrize(
    "form",
    [
        replace(INT4, activations=GROUP),
        with_inputs(INT4, "wide"),
        with_inputs(INT8, "wide"),
        with_inputs(ROW, "wide"),
        with_inputs(FORMATS["int4 rows"], "wide"),
    ],
    ids=str,
)
def test_any_number_of_rows_and_threads(form: WeightFormat) -> None:
    of = weights(form, 100, 96)
    packed = quant_pack.prepare(of, torch.float32)
    x = inputs(300, 96)
    everything = quant.quant_logits(x, packed)
    assert_exact(everything, x, of)
    for rows in range(1, 71):
        torch.set_num_threads(rows % 3 + 1)
        assert torch.equal(quant.quant_logits(x[:rows], packed), everything[:rows])


needs_tiles = pytest.mark.skipif(
    REASON is not None or not constant("has_tiles"), reason="the processor has no AMX-BF16"
)


@needs_tiles
@pytest.mark.parametrize("name", FORMATS)
def test_tiles_have_the_bits_of_the_product_with_bfloat16_weights(name: str) -> None:
    """Few rows, whose tiles are unpacked on their way, and blocks of many."""
    size = 512 if FORMATS[name].super_columns else 640
    of = weights(FORMATS[name], 90, size)
    packed, dense = quant_pack.prepare(of, torch.bfloat16), dequantise(of, torch.bfloat16)
    assert packed.takes_bfloat16
    bias = inputs(1, 90, torch.bfloat16)[0]
    for rows in (1, 2, 16, 17, 32, 33, 64, 65, 150):
        x = inputs(rows, size + 8, torch.bfloat16)[:, 3 : size + 3]
        assert torch.equal(quant.quant_linear(x, packed, bias), linear(x, dense, bias))
    ids = torch.tensor([89, 0, 40])
    assert torch.equal(quant_embedding(ids, packed, torch.bfloat16), dense[ids])


@needs_tiles
def test_tiles_with_columns_in_another_order() -> None:
    of = weights(INT4, 40, 128)
    of.column_order = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    x = inputs(3, 128, torch.bfloat16)
    got = quant.quant_logits(x, quant_pack.prepare(of, torch.bfloat16))
    exact_sums = x.double() @ dequantise(of, torch.bfloat16).double().T
    assert (got - exact_sums).abs().max() < 1e-5 * exact_sums.abs().mean()


@needs_tiles
def test_weights_packed_for_bfloat16_take_nothing_else() -> None:
    packed = quant_pack.prepare(weights(INT4, 40, 64), torch.bfloat16)
    with pytest.raises(ValueError, match="do not fit together"):
        quant.quant_logits(inputs(2, 64), packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bias_and_output_have_the_dtype_of_inputs(dtype: torch.dtype) -> None:
    of = weights(replace(ROW, activations=TOKEN), 50, 70)  # 70 inputs are filled up
    packed = quant_pack.prepare(of, dtype)
    x, bias = inputs(5, 140, dtype)[:, 3:73], inputs(1, 50, dtype)[0]
    sums = quant.quant_logits(x, packed)
    assert_exact(sums, x, of)
    assert torch.equal(quant.quant_linear(x, packed, None), sums.to(dtype))
    assert torch.equal(quant.quant_linear(x, packed, bias), (sums + bias.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scales_of_any_dtype(dtype: torch.dtype) -> None:
    of = weights(replace(INT8, activations=GROUP), 40, 64, dtype)
    x = inputs(3, 64)
    assert_exact(quant.quant_logits(x, quant_pack.prepare(of, torch.float32)), x, of)


def test_zero_points_between_codes() -> None:
    of = weights(WeightFormat("int4", 1, 32, has_zeros=True), 40, 64, torch.bfloat16)
    of.zeros = torch.linspace(0, 15, 80).view(40, 2).half()
    x = inputs(3, 64)
    assert_exact(quant.quant_logits(x, quant_pack.prepare(of, torch.float32)), x, of)


@pytest.mark.parametrize("how", [None, TOKEN], ids=str)
def test_columns_in_another_order(how: Activations | None) -> None:
    of = weights(replace(INT4, activations=how), 40, 128)
    of.column_order = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    x = inputs(3, 128)
    assert_exact(quant.quant_logits(x, quant_pack.prepare(of, torch.float32)), x, of)


def test_groups_of_inputs_have_one_order() -> None:
    of = weights(replace(INT4, activations=GROUP), 40, 128)
    of.column_order = torch.arange(128)
    with pytest.raises(ValueError, match="order of their groups"):
        quant_pack.prepare(of, torch.float32)


def test_static_scales_of_inputs_clip() -> None:
    form = replace(ROW, activations=Activations("int8", is_static=True))
    of = replace(weights(form, 40, 64), input_scale=torch.tensor(0.011))
    x = inputs(3, 64)
    assert (x.abs() > 127 * 0.011).any()
    assert_exact(quant.quant_logits(x, quant_pack.prepare(of, torch.float32)), x, of)


def test_the_largest_codes_do_not_saturate() -> None:
    """Pairs of 255 * 127 exceed 16 bits, in which some processors add pairs."""
    form = replace(ROW, activations=TOKEN)
    codes = torch.tensor([[-128], [127], [-127]], dtype=torch.int8).expand(3, 128).contiguous()
    of = QuantWeights(form, codes, row_scale=torch.ones(3))
    x = torch.tensor([[127.0], [-127.0]]).expand(2, 128)
    got = quant.quant_logits(x, quant_pack.prepare(of, torch.float32))
    assert torch.equal(got.double(), x.double() @ codes.double().T)


@pytest.mark.parametrize(("size", "group"), [(1024, 0), (1536, 0), (2500, 0), (3200, 1600)])
def test_sums_of_wide_inputs_fit(size: int, group: int) -> None:
    """Long spans are cut; products of the largest codes with the largest inputs add up."""
    codes = torch.tensor([[-128], [127]], dtype=torch.int8).expand(2, size).contiguous()
    if group:
        form = with_inputs(WeightFormat("int8", 1, group), "wide")
        of = QuantWeights(form, codes, scale=torch.ones(2, size // group))
    else:
        of = QuantWeights(with_inputs(ROW, "wide"), codes, row_scale=torch.ones(2))
    packed = quant_pack.prepare(of, torch.float32)
    for rows in (1, 2, 40):
        x = torch.tensor([[1.0], [-1.0]]).repeat(rows, 1).expand(-1, size)
        got = quant.quant_logits(x, packed)
        assert_exact(got, x, of)
        assert torch.equal(got[:2], quant.quant_logits(x[:2], packed))


@pytest.mark.parametrize("name", ["int8", "int6 of 256", "int4"])
def test_few_rows_behind_a_thousand_are_rows_alone(name: str) -> None:
    """So many are packed at a time."""
    packed = quant_pack.prepare(weights(with_inputs(FORMATS[name], "wide"), 40, 256), torch.float32)
    x = inputs(1030, 256)
    everything = quant.quant_logits(x, packed)
    for row in (0, 1023, 1024, 1029):
        assert torch.equal(quant.quant_logits(x[row : row + 1], packed)[0], everything[row])


@pytest.mark.parametrize("name", ["int8", "int6 of 256", "int4", "int4 offsets"])
def test_many_rows_of_long_inputs_are_rows_alone(name: str) -> None:
    """Tiles add up a range of inputs at a time; sums of large codes and inputs are rounded."""
    form = with_inputs(FORMATS[name], "wide")
    of = weights(form, 70, 4096)
    if name == "int8":
        of = replace(of, codes=of.codes.abs().clamp(min=100))
    packed = quant_pack.prepare(of, torch.float32)
    x = inputs(130, 4096)
    x[:65] = 1 - x[:65].abs() / 50
    everything = quant.quant_logits(x, packed)
    assert_exact(everything, x, of)
    assert torch.equal(quant.quant_logits(x[17:97], packed), everything[17:97])
    for row in (0, 1, 15, 16, 64, 65, 127, 128, 129):
        alone = quant.quant_logits(x[row : row + 1], packed)
        assert torch.equal(alone[0], everything[row])


@pytest.mark.parametrize(("form", "limit"), [(INT8, 16383), (INT4, 1904)])
def test_wide_inputs_have_fifteen_or_twelve_bits(form: WeightFormat, limit: int) -> None:
    x = inputs(4, 96)
    rounded = requantise(x, wide_inputs(form))
    assert (rounded - x).abs().max() <= x.abs().max() / limit * 0.501


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("form", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("how", INPUTS)
def test_inputs_that_are_not_finite_give_no_numbers(
    how: str, form: WeightFormat, value: float
) -> None:
    packed = quant_pack.prepare(weights(with_inputs(form, how), 33, 64), torch.float32)
    x = inputs(40, 64)
    clean = quant.quant_logits(x, packed)
    x[7, 5] = value
    got = quant.quant_logits(x, packed)
    assert not got[7].isfinite().any()
    got[7] = clean[7]
    assert torch.equal(got, clean)


def test_rows_of_zeros() -> None:
    packed = quant_pack.prepare(weights(replace(INT8, activations=GROUP), 33, 64), torch.float32)
    assert not quant.quant_logits(torch.zeros(2, 64), packed).any()


@pytest.mark.parametrize("name", ["int8 rows", "int4 zeros", "int6 of 256"])
def test_experts_are_packed_as_matrices_are(name: str) -> None:
    matrices = [weights(FORMATS[name], 20, 256, seed=seed) for seed in range(2)]
    stacked = QuantWeights(
        FORMATS[name],
        **{key: torch.stack([m.tensors()[key] for m in matrices]) for key in matrices[0].tensors()},
    )
    packed = quant_pack.prepare(stacked, torch.float32)
    for expert, matrix in enumerate(matrices):
        alone = quant_pack.prepare(matrix, torch.float32)
        assert torch.equal(packed.codes[expert], alone.codes)
        assert torch.equal(packed.scale[expert], alone.scale)
        assert packed.sizes == alone.sizes


@pytest.mark.parametrize("how", ["float", "wide"])
@pytest.mark.parametrize("name", FORMATS)
def test_neighbouring_outputs_alone(name: str, how: str) -> None:
    lanes = constant("lanes")
    of = weights(with_inputs(FORMATS[name], how), 200, 256)
    packed = quant_pack.prepare(of, torch.bfloat16)
    for rows in (1, 5, 40):
        x = inputs(rows, 256, torch.bfloat16)
        whole = quant.quant_linear(x, packed, None)
        for part in (slice(2 * lanes, 200), slice(0, 4 * lanes), slice(2 * lanes, 4 * lanes)):
            alone = packed.of_rows(part)
            assert alone is not None
            assert torch.equal(quant.quant_linear(x, alone, None), whole[:, part])
    assert packed.of_rows(slice(lanes, 200)) is None
    assert packed.of_rows(slice(0, 199)) is None


def test_packed_weights_take_the_bytes_of_their_codes() -> None:
    form = replace(FORMATS["int4 of 256"], activations=GROUP)
    packed = quant_pack.prepare(weights(form, 64, 512), torch.bfloat16)
    assert packed.codes.nbytes == 64 * 512 // 2
    assert packed.scale.nbytes == 64 * 16


@pytest.mark.parametrize(
    ("form", "size", "reason"),
    [
        (WeightFormat("fp8", has_row_scale=True), 64, "not fp8"),
        (WeightFormat("int4", 1, 16), 64, "groups of 16, not 32 or a multiple of 64"),
        (WeightFormat("int8", 1, 96), 192, "groups of 96"),
        (replace(INT8, activations=Activations("fp8")), 64, "not fp8 per token"),
        (replace(INT8, activations=Activations("int16", 32)), 64, "not int16 per group 32"),
        (
            replace(INT8, activations=Activations("int12")),
            64,
            "int16 per token or stay",
        ),
        (
            replace(WeightFormat("int8", 1, 192), activations=Activations("int8", 128)),
            384,
            "of 192",
        ),
        (ROW, 1 << 17, "in_features=131072 is more than 65536"),
    ],
    ids=["fp8", "small groups", "uneven", "inputs", "wide", "bits", "across", "large"],
)
def test_what_is_refused(form: WeightFormat, size: int, reason: str) -> None:
    refusal = quant_pack.refuses(query(form, size))
    assert refusal is not None
    assert reason in refusal
    table = OpTable(cpu_platform(), OPS)
    choice = table.resolve_weights(
        "quant_linear", torch.bfloat16, form, in_features=size, out_features=64
    )
    assert choice.dequantises


@pytest.mark.parametrize("op", ["quant_linear", "quant_logits"])
def test_the_table_chooses_packed_weights(op: str) -> None:
    form = replace(ROW, activations=TOKEN)
    table = OpTable(cpu_platform(), OPS)
    choice = table.resolve_weights(op, torch.bfloat16, form, in_features=64, out_features=64)
    assert (choice.name, choice.dequantises, choice.note) == ("native", False, "")


def test_logits_in_torch_are_sums_of_rounded_inputs() -> None:
    of = weights(replace(INT8, activations=GROUP), 40, 64)
    x = inputs(3, 64)
    assert_exact(torch_quant.quant_logits(x, torch_quant.prepare_linear(of, torch.float32)), x, of)


# Every quad of extreme codes times every quad of extreme inputs.
_DOT_CHECK = """
#include <cstdio>
#include "quant/codes.h"
using namespace atom;
template <class C>
int check(int most) {
  const int codes[] = {0, 1, 127, 128, 129, 254, 255}, inputs[] = {-127, -126, -1, 0, 1, 126, 127};
  int wrong = 0;
  for (int i = 0; i < 7 * 7 * 7 * 7; ++i) {
    uint8_t w[4];
    for (int b = 0, rest = i; b < 4; ++b, rest /= 7) w[b] = codes[rest % 7] % (most + 1);
    for (int j = 0; j < 7 * 7 * 7 * 7; ++j) {
      int8_t x[4];
      int sum = 5;
      for (int b = 0, rest = j; b < 4; ++b, rest /= 7) {
        x[b] = int8_t(inputs[rest % 7]);
        sum += (w[b] - kTaken<C, true>) * x[b];
      }
      const vint got = dot4<C>(splat(5), splat(raw<int32_t>(w)), splat(raw<int32_t>(x)));
      for (int lane = 0; lane < kLanes; ++lane) wrong += got[lane] != sum;
    }
    for (int b = 0; b < 4; ++b) {
      wrong += number<C>(splat(raw<int32_t>(w)), b)[0] != w[b] - kTaken<C, false>;
    }
  }
  return wrong;
}
int main() {
  const int wrong = check<Codes<8>>(255) + check<Codes<6>>(63) + check<Codes<4>>(15);
  std::printf("%d wrong with %d lanes", wrong, kLanes);
  return wrong != 0;
}
"""
_ARCHES = [("haswell", "avx2", 8), ("skylake-avx512", "avx512bw", 16)]


def needs(feature: str) -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or feature not in cpuinfo.read_text().split():
        pytest.skip(f"this processor has no {feature}")


def run_check(program: str, arch: str, optimised: str, folder: Path) -> str:
    """What a C++ program that includes our sources prints, compiled for a processor."""
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    (folder / "check.cpp").write_text(program)
    command = [compiler, optimised, "-std=c++17", f"-march={arch}", f"-I{SOURCE_DIR}", "check.cpp"]
    subprocess.run([*command, "-o", "check"], cwd=folder, check=True)
    return subprocess.run([folder / "check"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(("arch", "feature", "lanes"), _ARCHES)
def test_products_of_bytes_on_older_processors(
    arch: str, feature: str, lanes: int, tmp_path: Path
) -> None:
    needs(feature)
    assert run_check(_DOT_CHECK, arch, "-O1", tmp_path) == f"0 wrong with {lanes} lanes"


# Products of one row beside numbers in double, and of several beside one by bits; pairs of codes.
_ROWS_CHECK = """
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>
#include "quant/product.cpp"
#include "quant/rows.cpp"
using namespace atom;
struct Format {
  int64_t bits, middle, inputs, group, span, super;
  Number scale, shift;
  bool has_shift, has_offsets;
};
const Number half = Number::kFloat16, byte = Number::kInt8, single = Number::kFloat32;
const Format formats[] = {
    {8, 128, 1152, 1152, 576, 0, single, single, false, false},  // a scale for a row
    {8, 128, 352, 32, 32, 0, half, half, false, false},
    {8, 128, 320, 64, 64, 0, half, byte, true, false},
    {6, 32, 512, 16, 16, 256, byte, byte, false, false},
    {4, 8, 1152, 1152, 576, 0, single, single, false, false},
    {4, 8, 352, 32, 32, 0, half, half, false, false},
    {4, 0, 384, 128, 128, 0, half, half, true, true},
    {4, 0, 512, 32, 32, 256, byte, byte, true, true},
};
constexpr int kMost = 11, kInfinite = 4;
int check(const Format& f, Inputs kind) {
  std::mt19937 random(1);
  std::vector<uint8_t> codes(2 * kLanes * f.inputs * f.bits / 8);
  for (auto& code : codes) code = random();
  const auto numbers = [&](Number type, int64_t count) {  // of 1/64 to 1/32, or bytes
    std::vector<uint8_t> bytes(count * bytes_of(type));
    for (int64_t i = 0; i < count; ++i) {
      const float number = (1 + random() % 1024 / 1024.0f) / 64;
      if (type == Number::kFloat32) std::memcpy(&bytes[4 * i], &number, 4);
      else bytes[i * bytes_of(type)] = random() % 256;
      if (type == Number::kFloat16) bytes[2 * i + 1] = 0x24 + random() % 4;
    }
    return bytes;
  };
  const int64_t groups = f.inputs / f.group, above = f.super == 0 ? 0 : f.inputs / f.super;
  const auto scale = numbers(f.scale, 2 * kLanes * groups);
  const auto shift = numbers(f.shift, 2 * kLanes * groups);
  const auto super = numbers(half, 2 * kLanes * above);
  const auto* factors = above == 0 ? nullptr : reinterpret_cast<const float16*>(super.data());
  const QuantMatrix w{codes.data(), scale.data(), f.has_shift ? shift.data() : nullptr, factors,
                      f.has_offsets ? factors : nullptr, f.bits, f.inputs, 2 * kLanes, f.middle,
                      f.group, groups, f.super, above, f.scale, f.shift, f.has_offsets};
  std::vector<float> x(kMost * f.inputs);
  for (auto& number : x) number = float(random() % 20001) / 10000 - 1;
  x[kInfinite * f.inputs + 7] = INFINITY;
  const QuantInputs how{x.data(), nullptr, f.inputs, f.inputs, f.inputs, f.span, kind,
                        kind == Inputs::kInt8 ? f.span : f.inputs, 0, excess_of(w, kind), 0};
  std::vector<uint8_t> packed((kMost + 1) * how.row_bytes());
  std::vector<Span> spans(kMost * how.spans());
  const QuantRows rows = how.rows(packed.data(), spans.data());
  float alone[kMost][2][kLanes], out[kMost * 2 * kLanes];
  for (int r = 0; r < kMost; ++r) {
    pack_row<float>(how, r, 0, packed.data(), spans.data());
    for (int p = 0; p < 2; ++p) multiply_panels(w, p, 1, rows, 1, alone[r][p]);
  }
  for (int r = 0; r < kMost; ++r) pack_row<float>(how, r, r, packed.data(), spans.data());
  int wrong = 0;
  const auto near = [&](auto codes_of, int r, int p, int lane) {
    using C = decltype(codes_of);
    double sum = 0, most = 0;
    for (int64_t i = 0; i < f.inputs; ++i) {
      const uint8_t* unit = w.codes + p * w.panel_bytes() + i / C::kUnit * C::kBytes;
      const int code = (C::quad(unit, i % C::kUnit / 4)[lane] >> i % 4 * 8) & 255;
      const Factors at = load_factors(w, p, i);
      const double zero = f.has_shift && !f.has_offsets ? at.shift[lane] : 0;
      const double offset = f.has_offsets ? at.shift[lane] : 0;
      const double number = (code - f.middle - zero) * at.scale[lane] + offset;
      sum += number * x[r * f.inputs + i];
      most += std::abs(number) / limit_of(kind);  // inputs are within 1, rounded by half of a step
    }
    return std::abs(sum - alone[r][p][lane]) < most;
  };
  for (int lane = 0; lane < 2 * kLanes; ++lane) {
    const auto is_near = [&](auto codes_of) {
      return near(codes_of, 0, lane / kLanes, lane % kLanes);
    };
    wrong += !(f.bits == 8   ? is_near(Codes<8>{})
               : f.bits == 6 ? is_near(Codes<6>{})
                             : is_near(Codes<4>{}));
  }
  for (int count = 1; count <= kMost; ++count) {
    for (int panels = 1; panels <= 2; ++panels) {
      for (int first = 0; first + panels <= 2; ++first) {
        multiply_panels(w, first, panels, rows, count, out);
        for (int i = 0; i < count * panels; ++i) {
          const float* one = alone[i / panels][first + i % panels];
          if (i / panels == kInfinite) {
            wrong += std::isfinite(out[i * kLanes]) || std::isfinite(*one);
          } else {
            wrong += std::memcmp(out + i * kLanes, one, sizeof alone[0][0]) != 0;
          }
        }
      }
    }
  }
  return wrong;
}
int check_pairs() {
  const int limit = limit_of(Inputs::kInt12);
  const auto wrong = [](vint part) { return part < -128 | part > 127; };
  vint all = {};
  for (int one = -limit; one <= limit; ++one) {
    // All rests by 16 at both ends, and some codes between.
    for (int other = -limit; other <= limit; other += std::abs(other) > limit - 80 ? 1 : 61) {
      const PairedCodes both = PairedCodes::of(splat(one), splat(other));
      all |= wrong(both.a) | wrong(both.b) | wrong(both.c);
      all |= both.a + 16 * both.c != one | 16 * both.b + both.c != other;
    }
  }
  return sum(all) != 0;
}
int main() {
  int wrong = check_pairs();
  for (const Format& f : formats) {
    wrong += check(f, Inputs::kInt8) + check(f, Inputs::kInt16);
    if (f.bits == 4) wrong += check(f, Inputs::kInt12);
  }
  std::printf("%d wrong", wrong);
  return wrong != 0;
}
"""


def test_rows_together_are_rows_alone_without_products_of_bytes(tmp_path: Path) -> None:
    needs("avx2")
    assert run_check(_ROWS_CHECK, "haswell", "-O0", tmp_path) == "0 wrong"
