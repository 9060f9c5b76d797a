"""Linear layers with quantised weights against float64, for every format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from aot_case import PLATFORMS

from atom.model_ops.kernels.torch import quant as torch_quant
from atom.model_ops.kernels.torch.quantise import requantise
from atom.model_ops.kernels.triton.products import quant_linear, quant_splits
from atom.model_ops.kernels.triton.products.quant_inputs import limit_within
from atom.model_ops.kernels.triton.products.quant_layout import (
    TileWeights,
    choose_way,
    prepare_tiles,
    split_halves,
)
from atom.model_ops.kernels.triton.products.quant_splits import choose_splits, choose_tiles
from atom.model_ops.kernels.triton.products.quantise import largest_code, round_rows
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.quant.weights import (
    Activations,
    QuantWeights,
    WeightFormat,
    dequantise,
    pack_nibbles,
)
from atom.model_ops.registry import OpQuery
from atom.platform import Platform, current_platform

OUT, IN = 40, 200  # neither whole tiles nor whole blocks of inputs
TOLERANCE = 1e-6  # of the largest output, in float32
# Of it, where sm90 multiplies codes of FP8. An instruction adds 32 products to a sum, each cut off
# 13 bits below the largest of the 33: computed so, random inputs of these shapes are off by 9e-5 to
# 6e-4, as they are on an H100.
SM90_TOLERANCE = 2**-10

WEIGHT_ONLY = (
    WeightFormat("int4", 1, 32),
    WeightFormat("int4", 1, 16, has_zeros=True),
    WeightFormat("int4", 1, 128, has_zeros=True, has_row_scale=True),
    WeightFormat("int4", 1, IN),
    WeightFormat("int4", has_row_scale=True),
    WeightFormat("int8", 1, 64, has_zeros=True),
    WeightFormat("int8", has_row_scale=True),
    WeightFormat("fp8", 128, 128),
    WeightFormat("fp8", 1, 32, "e8m0"),
    WeightFormat("fp4", 1, 32, "e8m0"),
    WeightFormat("fp4", 1, 16, "e4m3", has_row_scale=True),
)
MXFP4 = WeightFormat("fp4", 1, 32, "e8m0", activations=Activations("fp4", 32, "e8m0"))
IN_CODES = (
    WeightFormat("int8", has_row_scale=True, activations=Activations("int8")),
    WeightFormat("int8", 1, 128, activations=Activations("int8", 128)),
    WeightFormat("fp8", has_row_scale=True, activations=Activations("fp8")),
    WeightFormat("fp8", has_row_scale=True, activations=Activations("fp8", is_static=True)),
    WeightFormat("fp8", 128, 128, activations=Activations("fp8", 128)),
    WeightFormat("fp8", 128, 128, "e8m0", activations=Activations("fp8", 128, "e8m0")),
    WeightFormat("int4", has_row_scale=True, activations=Activations("fp8")),
    WeightFormat("int4", 1, 128, activations=Activations("int8")),
)
AS_NUMBERS = (
    MXFP4,
    WeightFormat(
        "fp4", 1, 16, "e4m3", has_row_scale=True, activations=Activations("fp4", 16, "e4m3")
    ),
    WeightFormat("fp8", 1, 32, "e8m0", activations=Activations("fp8", 32, "e8m0")),
    WeightFormat("int4", 1, 32, activations=Activations("fp8")),
    WeightFormat("int8", 1, 64, has_zeros=True, activations=Activations("int8")),
)


def platforms_on(device: torch.device) -> list[Platform]:
    """Whose tiles can run here."""
    if device.type == "cpu":
        return [PLATFORMS["sm90"], PLATFORMS["gfx950"]]
    return [current_platform()]


def turn(form: WeightFormat, device: torch.device, offset: int = 0) -> Platform:
    """One of `platforms_on`: the formats take turns."""
    platforms = platforms_on(device)
    place = [*WEIGHT_ONLY, *IN_CODES, *AS_NUMBERS].index(form) + offset
    return platforms[place % len(platforms)]


def random_weights(
    form: WeightFormat, out: int = OUT, inputs: int = IN, device: torch.device | None = None
) -> QuantWeights:
    """Codes and scales drawn at random, of all values and of each group its own."""
    generator = torch.Generator().manual_seed(out)
    groups = -(-inputs // form.columns) if form.columns else 0
    blocks = (-(-out // form.rows), groups) if groups else (0, 0)

    def integers(low: int, high: int, shape: tuple[int, int]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if form.codes == "fp8":
        codes = integers(0, 256, (out, inputs)).to(torch.uint8)
        codes = codes.masked_fill(codes & 0x7F == 0x7F, 0x80).view(torch.float8_e4m3fn)
    elif form.codes == "int8":
        codes = integers(-128, 128, (out, inputs)).to(torch.int8)
    else:
        codes = pack_nibbles(integers(0, 16, (out, inputs)).to(torch.uint8))
    scale = {
        "float": torch.rand(blocks, generator=generator) + 0.5,
        "e8m0": integers(120, 130, blocks).to(torch.uint8),
        "e4m3": (torch.rand(blocks, generator=generator) + 0.5).to(torch.float8_e4m3fn),
    }[form.scale_type]
    zeros = integers(0, 16, (out, groups)).to(torch.uint8)
    if form.codes == "int8":
        zeros = (zeros * 8).to(torch.int8) - 64
    return on(
        QuantWeights(
            form,
            codes,
            scale if groups else None,
            zeros if form.has_zeros else None,
            torch.rand(out, generator=generator) + 0.5 if form.has_row_scale else None,
            torch.tensor(0.01),
        ),
        device,
    )


def on(weights: QuantWeights, device: torch.device | None) -> QuantWeights:
    return replace(weights, **{name: t.to(device) for name, t in weights.tensors().items()})


def by_definition(
    x: torch.Tensor, weights: QuantWeights, bias: torch.Tensor | None = None
) -> torch.Tensor:
    how = weights.format.activations
    numbers = x if how is None else requantise(x, how, weights.input_scale)
    out = numbers.double().cpu() @ dequantise(weights, torch.float64).cpu().T
    return out if bias is None else out + bias.double().cpu()


def tolerance(form: WeightFormat, device: torch.device) -> float:
    how = form.activations
    if device.type == "cpu" or how is None or how.codes != "fp8":
        return TOLERANCE
    platform = current_platform()
    multiplies_codes = choose_way(form, platform)[0] == "codes"
    return SM90_TOLERANCE if platform.arch == "sm90" and multiplies_codes else TOLERANCE


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double().cpu() - expected).abs().max() / expected.abs().max()).item()


def run(
    platform: Platform, x: torch.Tensor, weights: QuantWeights, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return quant_linear.product(platform.kind, x, prepare_tiles(weights, platform), bias)


@pytest.mark.parametrize("form", [*WEIGHT_ONLY, *IN_CODES, *AS_NUMBERS], ids=str)
def test_equals_the_definition(form: WeightFormat, device: torch.device) -> None:
    """On one platform; those of each group take turns."""
    weights = random_weights(form, device=device)
    x = torch.randn(3, IN, device=device)
    bias = torch.randn(OUT, device=device)
    found = run(turn(form, device), x, weights, bias)
    assert error(found, by_definition(x, weights, bias)) < tolerance(form, device)


def test_zero_points_between_codes(device: torch.device) -> None:
    weights = random_weights(WEIGHT_ONLY[1], device=device)
    assert weights.zeros is not None
    weights.zeros = (weights.zeros.float() + 0.3).half()
    x = torch.randn(3, IN, device=device)
    for platform in platforms_on(device):
        assert error(run(platform, x, weights), by_definition(x, weights)) < TOLERANCE


@pytest.mark.parametrize("form", [MXFP4, IN_CODES[4], WEIGHT_ONLY[1]], ids=str)
def test_equals_the_definition_on_the_other_platform(
    form: WeightFormat, device: torch.device
) -> None:
    weights = random_weights(form, device=device)
    x = torch.randn(3, IN, device=device)
    found = run(turn(form, device, 1), x, weights)
    assert error(found, by_definition(x, weights)) < tolerance(form, device)


@pytest.mark.parametrize("form", [IN_CODES[0], IN_CODES[4], IN_CODES[6], MXFP4], ids=str)
def test_codes_are_multiplied_where_there_are_instructions(form: WeightFormat) -> None:
    expected = "mx" if form is MXFP4 else "codes"
    assert choose_way(form, PLATFORMS["gfx950"]) == (expected, "")


WRONG: dict[str, Callable[[QuantWeights], dict[str, torch.Tensor | None]]] = {
    "the other nibble first": lambda w: {"codes": (w.codes >> 4) | (w.codes << 4)},
    "codes of the next row": lambda w: {"codes": w.codes.roll(1, 0)},
    "scales of the next group": lambda w: {"scale": w.scale.roll(1, 1)},
    "scales of the next row": lambda w: {"scale": w.scale.roll(1, 0)},
    "scales transposed": lambda w: {"scale": w.scale.T.reshape(w.scale.shape)},
    "zero points of the next group": lambda w: {"zeros": w.zeros.roll(1, 1)},
    "row scales of the next row": lambda w: {"row_scale": w.row_scale.roll(1, 0)},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_layout_would_be_noticed(wrong: str) -> None:
    """Each part of the weights matters far beyond the tolerance."""
    weights = random_weights(WeightFormat("int4", 1, 32, has_zeros=True, has_row_scale=True))
    x = torch.randn(3, IN)
    changed = replace(weights, **WRONG[wrong](weights))
    assert error(by_definition(x, changed), by_definition(x, weights)) > 1e4 * TOLERANCE


def test_halves_of_a_span_share_bytes() -> None:
    """Input j is in the low and j + 64 in the high four bits of byte j, in each span of 128."""
    codes = torch.arange(256) % 13
    halves = split_halves(pack_nibbles(codes.to(torch.uint8))[None])[0].view(2, 64).long()
    assert torch.equal(halves & 15, codes.view(2, 2, 64)[:, 0])
    assert torch.equal(halves >> 4, codes.view(2, 2, 64)[:, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "form", [form for form in WEIGHT_ONLY if not form.has_row_scale][::3], ids=str
)
def test_weights_are_rounded_once(
    form: WeightFormat, dtype: torch.dtype, device: torch.device
) -> None:
    """Each weight alone is, bit for bit, the one that `torch.quant` multiplies."""
    weights = random_weights(form, out=20, inputs=IN, device=device)
    eye = torch.eye(IN, dtype=dtype, device=device)
    expected = torch_quant.prepare_linear(weights, dtype).weight.T
    assert torch.equal(run(platforms_on(device)[-1], eye, weights), expected)


def test_extreme_exponents(device: torch.device) -> None:
    weights = random_weights(WeightFormat("fp4", 1, 32, "e8m0"), 16, 96)
    weights.scale = torch.tensor([0, 1, 250], dtype=torch.uint8).expand(16, 3)
    x = torch.eye(96, device=device)
    out = run(platforms_on(device)[0], x, on(weights, device))
    assert torch.equal(out.T.cpu(), dequantise(weights))


@pytest.mark.parametrize(
    ("form", "dtype", "limit"),
    [
        (WEIGHT_ONLY[0], torch.bfloat16, 8e-3),
        (WEIGHT_ONLY[7], torch.float16, 1e-3),
        (IN_CODES[4], torch.bfloat16, 4e-3),
        (AS_NUMBERS[3], torch.bfloat16, 8e-3),
    ],
    ids=str,
)
def test_narrow_inputs(
    form: WeightFormat, dtype: torch.dtype, limit: float, device: torch.device
) -> None:
    weights = random_weights(form, device=device)
    x = (torch.randn(2, 3, IN, device=device) * 0.1).to(dtype)
    out = run(platforms_on(device)[0], x, weights)
    assert (out.dtype, out.shape) == (dtype, (2, 3, OUT))
    assert error(out, by_definition(x, weights)) < limit


@pytest.mark.parametrize("form", [WEIGHT_ONLY[0], IN_CODES[0]], ids=str)
def test_columns_may_have_another_order(form: WeightFormat, device: torch.device) -> None:
    weights = random_weights(form, device=device)
    weights.column_order = torch.randperm(IN, device=device)
    x = torch.randn(2, IN, device=device)
    out = run(platforms_on(device)[0], x, weights)
    assert error(out, by_definition(x, weights)) < TOLERANCE


def test_columns_of_quantised_groups_keep_their_order() -> None:
    weights = random_weights(IN_CODES[4])
    weights.column_order = torch.randperm(IN)
    with pytest.raises(ValueError, match="cannot be reordered"):
        prepare_tiles(weights, PLATFORMS["gfx950"])


def test_no_tokens_and_inputs_that_lie_apart(device: torch.device) -> None:
    platform = platforms_on(device)[0]
    weights = random_weights(WEIGHT_ONLY[0], device=device)
    assert run(platform, torch.empty(2, 0, IN, device=device), weights).shape == (2, 0, OUT)
    apart = torch.randn(2, 2 * IN, device=device)[:, ::2]
    assert torch.equal(run(platform, apart, weights), run(platform, apart.contiguous(), weights))


@pytest.mark.parametrize("form", [IN_CODES[1], IN_CODES[4]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_inputs_are_rounded_by_the_product(
    form: WeightFormat, dtype: torch.dtype, device: torch.device
) -> None:
    """Bit for bit as before it; a row of zeros, and rows that lie apart, are among them."""
    x = torch.randn(5, 512, device=device).to(dtype)[:, ::2]
    x[2] = 0
    for platform in platforms_on(device):
        weights = prepare_tiles(random_weights(form, inputs=256, device=device), platform)
        assert weights.rounding is not None
        before = round_rows(x, weights.rounding)
        assert (
            limit_within(x, weights)
            == largest_code(weights.rounding)
            > limit_within(before, weights)
        )
        got, wanted = (
            quant_linear.product(platform.kind, rows, weights, None) for rows in (x, before)
        )
        assert got.dtype == dtype
        assert torch.equal(got, wanted)


def test_what_is_rounded_before_the_product() -> None:
    """Many rows, other groups, other scales than numbers, and blocks that are not whole."""
    platform = PLATFORMS["gfx950"]

    def limit(form: WeightFormat, rows: int = 16, inputs: int = 256) -> float:
        weights = prepare_tiles(random_weights(form, inputs=inputs), platform)
        return limit_within(torch.empty(rows, inputs), weights)

    assert limit(IN_CODES[4]) == 448
    assert limit(IN_CODES[1]) == 127
    assert limit(IN_CODES[4], rows=17) == limit(IN_CODES[4], inputs=200) == 0
    assert not any(map(limit, [*IN_CODES[:1], IN_CODES[2], IN_CODES[3], *IN_CODES[5:], MXFP4]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted: the FP8 of gfx942")
@pytest.mark.parametrize(
    "how", [None, Activations("fp8"), Activations("fp8", is_static=True)], ids=str
)
def test_the_narrower_fp8(how: Activations | None) -> None:
    """On gfx942 the same bits mean half, and quantised inputs end at 240."""
    weights = random_weights(WeightFormat("fp8", has_row_scale=True, activations=how))
    weights.input_scale = torch.tensor(0.01)
    x = torch.randn(3, IN)
    expected = x
    if how is not None:
        scale = 2 * weights.input_scale if how.is_static else x.abs().amax(1, keepdim=True) / 240
        codes = (x / scale).clamp(-240, 240).to(torch.float8_e4m3fnuz)
        expected = codes.double() * scale
    prepared = prepare_tiles(weights, PLATFORMS["gfx942"])
    assert prepared.codes.dtype == torch.float8_e4m3fnuz
    out = quant_linear.product("rocm", x, prepared, None)
    wanted = expected.double() @ dequantise(weights, torch.float64).T
    assert error(out, wanted) < TOLERANCE


def one_term_a_block(weights: QuantWeights) -> QuantWeights:
    """Leaves one input in each block, so that a block's sum has one value in any order.

    The interpreter's products inside a block are numpy's, in an order of its own.
    """
    kept = torch.arange(weights.codes.shape[1], device=weights.codes.device) % 64 == 5
    codes = weights.codes.view(torch.uint8)
    if weights.format.codes == "int4":
        codes = torch.where(kept, codes & 0x0F | 0x80, 0x88)
    else:
        codes = torch.where(kept, codes, 0)
    return replace(weights, codes=codes.view(weights.codes.dtype))


@pytest.mark.parametrize("form", [WEIGHT_ONLY[0], IN_CODES[0], IN_CODES[4]], ids=str)
def test_a_row_does_not_depend_on_its_batch(
    form: WeightFormat, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: in other tiles, and with splits added in the program or by another."""
    monkeypatch.setattr(quant_splits, "_LEAST_INPUTS", 512)
    platform = platforms_on(device)[0]
    weights = random_weights(form, 20, 1024, device)
    weights = one_term_a_block(weights) if device.type == "cpu" else weights
    prepared = prepare_tiles(weights, platform)
    assert choose_splits(platform.kind, 20, 1024, prepared.block_k) == 2
    x = torch.randn(18, 1024, device=device)
    assert [choose_tiles(platform.kind, tokens, True).block_m for tokens in (1, 18)] == [16, 32]
    whole = quant_linear.product(platform.kind, x, prepared, None)
    assert error(whole, by_definition(x, weights)) < tolerance(form, device)
    monkeypatch.setattr(quant_linear, "BUSY", {})
    alone = quant_linear.product(platform.kind, x[16:17], prepared, None)
    assert torch.equal(alone, whole[16:17])


def test_tiles_share_what_decides_the_order_of_sums() -> None:
    for kind, same in (("rocm", {"matrix_instr_nonkdim": 16}), ("cuda", {})):
        for wide in (False, True):
            tiles = [choose_tiles(kind, tokens, wide) for tokens in (1, 17, 64, 65, 8192)]
            assert all(tile.options == same for tile in tiles)
            assert {tile.weights_first for tile in tiles} == {kind == "cuda"}
            # Four warps of NVIDIA's wide instruction take 64 rows at least.
            assert kind != "cuda" or all(tile.block_n == 16 * tile.num_warps for tile in tiles)


def test_splits_are_whole_and_long() -> None:
    for kind in ("cuda", "rocm"):
        for rows, inputs in ((512, 7168), (7168, 256), (4096, 14336), (28672, 4096), (64, 2000)):
            splits = choose_splits(kind, rows, inputs, 128)
            blocks = -(-inputs // 128)
            assert 1 <= splits <= 8
            assert (splits - 1) * -(-blocks // splits) < blocks  # none is empty
            assert splits == 1 or inputs / splits >= 1024
    assert choose_splits("cuda", 512, 7168, 128) == 7


@pytest.mark.gpu
@pytest.mark.parametrize("form", [*WEIGHT_ONLY, *IN_CODES], ids=str)
def test_a_row_does_not_depend_on_its_batch_on_a_gpu(form: WeightFormat) -> None:
    platform, device = current_platform(), torch.device("cuda")
    prepared = prepare_tiles(random_weights(form, 1000, 4096, device), platform)
    x = torch.randn(2000, 4096, device=device, dtype=torch.bfloat16)
    whole = quant_linear.product(platform.kind, x, prepared, None)
    for part in (slice(7, 8), slice(50, 70), slice(1000, 1200)):
        alone = quant_linear.product(platform.kind, x[part], prepared, None)
        assert torch.equal(alone, whole[part])


def query(form: WeightFormat, arch: str = "gfx942", out: int = 512, inputs: int = 7168) -> OpQuery:
    platform = PLATFORMS.get(arch) or Platform("cuda", arch, True)
    shape = {"in_features": inputs, "out_features": out}
    return OpQuery(platform, torch.bfloat16, shape, weights=form)


def test_what_is_refused() -> None:
    refuses = quant_linear.refuses
    for form in (*WEIGHT_ONLY, *IN_CODES, *AS_NUMBERS):
        wanted = query(form, inputs=IN if form.columns == IN else 7168)
        assert refuses(wanted) is None
    assert "groups of 48" in str(refuses(query(WeightFormat("int4", 1, 48))))
    assert refuses(query(WeightFormat("int4", 1, 48), inputs=48)) is None
    assert "128 rows" in str(refuses(query(WeightFormat("int8", 128, 128, has_zeros=True))))
    assert "sm80" in str(refuses(query(WEIGHT_ONLY[7], "sm80")))
    assert "sm80" in str(refuses(query(AS_NUMBERS[3], "sm80")))
    assert refuses(query(WEIGHT_ONLY[0], "sm80")) is None
    large = query(WEIGHT_ONLY[6], out=1 << 20, inputs=1 << 11)
    assert "2147483648 bytes" in str(refuses(large))
    grouped = WeightFormat("fp8", 128, 128, activations=Activations("fp8", 96))
    assert "96" in str(refuses(query(grouped)))


def test_what_gains_nothing_is_noted() -> None:
    [entry] = [e for e in OPS["quant_linear"] if e.name == "triton"]
    for form in (*WEIGHT_ONLY, *IN_CODES):
        assert entry.note(query(form)) == ""
    for form in AS_NUMBERS:
        assert "multiplied as bfloat16" in entry.note(query(form))
    assert "multiply fp4 codes on gfx950 only" in entry.note(query(MXFP4))
    assert entry.note(query(MXFP4, "gfx950")) == ""


def test_the_table_prepares_and_runs(device: torch.device) -> None:
    [entry] = [e for e in OPS["quant_linear"] if e.name == "triton"]
    assert entry.load_prepare is not None
    weights = random_weights(WEIGHT_ONLY[1], device=device)
    prepared = entry.load_prepare()(weights, torch.float32)
    assert isinstance(prepared, TileWeights)
    x = torch.randn(2, IN, device=device)
    assert error(entry.load()(x, prepared, None), by_definition(x, weights)) < TOLERANCE
