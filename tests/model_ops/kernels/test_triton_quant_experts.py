"""Quantised experts against the reference in torch, in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom.model_ops.gates import SituGate
from atom.model_ops.kernels.torch import quant as reference
from atom.model_ops.kernels.torch.elementwise import silu_and_mul
from atom.model_ops.kernels.triton.products import moe_experts, quant_experts
from atom.model_ops.kernels.triton.products.quant_layout import PART, note, prepare_tiles
from atom.model_ops.kernels.triton.products.quantise import round_rows
from atom.model_ops.quant.weights import Activations, QuantWeights, WeightFormat
from atom.model_ops.registry import OpQuery
from atom.platform import Platform, cpu_platform, current_platform

EXPERTS, TOP_K = 2, 2
HIDDEN, INTER = 160, 32  # neither is a multiple of a span
BF16, FP16 = torch.bfloat16, torch.float16
WEIGHT_ONLY = {
    "int4 group 32": (WeightFormat("int4", 1, 32), BF16),
    "int4 group 128": (WeightFormat("int4", 1, 128), FP16),
    "int4 channel": (WeightFormat("int4", has_row_scale=True), None),
    "int4 zeros": (WeightFormat("int4", 1, 32, has_zeros=True), FP16),
    "int8 channel": (WeightFormat("int8", has_row_scale=True), None),
    "fp8 channel": (WeightFormat("fp8", has_row_scale=True), None),
    "fp8 blocks": (WeightFormat("fp8", 128, 128), torch.float32),
    "mxfp4": (WeightFormat("fp4", 1, 32, "e8m0"), torch.uint8),
    "nvfp4": (WeightFormat("fp4", 1, 16, "e4m3", has_row_scale=True), torch.float8_e4m3fn),
}
QUANTISED_INPUTS = {
    "fp8 blocks x fp8 groups": (
        WeightFormat("fp8", 128, 128, activations=Activations("fp8", 128)),
        torch.float32,
    ),
    "fp8 channel x fp8 token": (
        WeightFormat("fp8", has_row_scale=True, activations=Activations("fp8")),
        None,
    ),
    "int8 channel x int8 token": (
        WeightFormat("int8", has_row_scale=True, activations=Activations("int8")),
        None,
    ),
    "int4 group 128 x fp8 token": (
        WeightFormat("int4", 1, 128, activations=Activations("fp8")),
        BF16,
    ),
    "mxfp4 x mxfp4": (
        WeightFormat("fp4", 1, 32, "e8m0", activations=Activations("fp4", 32, "e8m0")),
        torch.uint8,
    ),
}


def random_weights(
    form: WeightFormat, scales: torch.dtype | None, rows: int, inputs: int, seed: int
) -> QuantWeights:
    """Codes of every value, and scales that differ by group and by row."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (EXPERTS, *shape), generator=generator)

    if form.codes == "int8":
        codes, size = draw(-128, 128, rows, inputs).to(torch.int8), 64.0
    elif form.codes == "fp8":
        codes = (draw(-64, 65, rows, inputs) / 16.0).to(torch.float8_e4m3fn)
        size = 2.0
    else:
        codes, size = draw(0, 256, rows, inputs // 2).to(torch.uint8), 4.0
    unit = inputs**-0.5 / size
    scale = zeros = row_scale = None
    if form.columns:
        groups = -(-inputs // form.columns)
        blocks = -(-rows // form.rows), groups
        if scales is torch.uint8:
            scale = draw(120, 124, *blocks).to(torch.uint8)
        else:
            factors = (draw(8, 16, *blocks) / 8.0) * (1.0 if form.has_row_scale else unit)
            scale = factors.to(scales)
        if form.has_zeros:
            zeros = draw(0, 16, rows, groups).to(torch.uint8)
    if form.has_row_scale:
        row_scale = draw(8, 16, rows) / 8.0 * unit
    return QuantWeights(form, codes, scale, zeros, row_scale)


def on(device: torch.device, weights: QuantWeights) -> QuantWeights:
    moved = {name: tensor.to(device) for name, tensor in weights.tensors().items()}
    return QuantWeights(weights.format, **moved)


def check(
    name: str,
    device: torch.device,
    kind: str,
    num_tokens: int = 3,
    platform: Platform | None = None,
    column_order: torch.Tensor | None = None,
) -> None:
    """The result is that of the reference up to the order of sums.

    On a GPU, inputs of the second product may be rounded to the other neighbour.
    """
    form, scales = (WEIGHT_ONLY | QUANTISED_INPUTS)[name]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(device)
    weights = torch.rand(num_tokens, TOP_K, generator=generator).to(device)
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].to(device)
    ids[0, 0] = EXPERTS  # one of another rank's
    w13 = on(device, random_weights(form, scales, 2 * INTER, HIDDEN, 1))
    w2 = on(device, random_weights(form, scales, HIDDEN, INTER, 2))
    w13.column_order = column_order
    expected = reference.quant_experts(
        x, *reference.prepare_experts(w13, w2, x.dtype), weights, ids, 1
    )
    assert expected.abs().max() > 0.1
    if platform is None:
        platform = cpu_platform() if device.type == "cpu" else current_platform()
    tiles = [prepare_tiles(matrix, platform) for matrix in (w13, w2)]
    kind, given = kind if device.type == "cpu" else platform.kind, torch.empty_like(x)
    out = quant_experts.mixture(kind, x, *tiles, weights, ids, 1, out=given)
    assert out is given
    error = (out - expected).abs().max() / expected.abs().max()
    assert error < (2e-6 if form.activations is None or device.type == "cpu" else 2e-2)


def test_another_gate(device: torch.device) -> None:
    form, scales = WEIGHT_ONLY["mxfp4"]
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(3, HIDDEN, generator=generator) * 4).to(device)
    weights, ids = torch.rand(3, 1, generator=generator).to(device), torch.tensor([[0], [1], [2]])
    w13 = on(device, random_weights(form, scales, 2 * INTER, HIDDEN, 1))
    w2 = on(device, random_weights(form, scales, HIDDEN, INTER, 2))
    routed = weights, ids.to(device), 1
    dense = reference.prepare_experts(w13, w2, x.dtype)
    expected = reference.quant_experts(x, *dense, *routed, SituGate(2.0, 3.0))
    platform = cpu_platform() if device.type == "cpu" else current_platform()
    tiles = [prepare_tiles(matrix, platform) for matrix in (w13, w2)]
    out = quant_experts.quant_experts(x, *tiles, *routed, SituGate(2.0, 3.0))
    assert (out - expected).abs().max() < 2e-6 * expected.abs().max()
    silu = reference.quant_experts(x, *dense, *routed)
    assert (out - silu).abs().max() > 1e-2 * expected.abs().max()


# Each format on the tiles of one vendor, which differ in what is multiplied by what.
KINDS = ("rocm", "cuda")


@pytest.mark.parametrize(
    ("name", "kind"), [(name, KINDS[i % 2]) for i, name in enumerate(WEIGHT_ONLY)]
)
def test_weight_only(name: str, kind: str, device: torch.device) -> None:
    check(name, device, kind)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, KINDS[i % 2]) for i, name in enumerate(QUANTISED_INPUTS)]
)
def test_quantised_inputs(name: str, kind: str, device: torch.device) -> None:
    check(name, device, kind)


@pytest.mark.parametrize(
    ("name", "kind"), [("int4 channel", "cuda"), ("int8 channel x int8 token", "rocm")]
)
def test_inputs_in_splits(
    name: str, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quant_experts, "choose_splits", lambda *_: 2)
    check(name, device, kind)


@pytest.mark.parametrize(
    ("name", "kind", "num_tokens", "splits"),
    [
        ("int4 group 32", "rocm", 3, 2),
        ("int4 group 32", "cuda", 40, 1),
        ("fp8 blocks x fp8 groups", "cuda", 3, 2),
        ("fp8 blocks x fp8 groups", "rocm", 40, 1),
    ],
)
def test_one_expert_that_is_not_quantised(
    name: str,
    kind: str,
    num_tokens: int,
    splits: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last one adds what its own weights make of the rows as they are."""
    monkeypatch.setattr(quant_experts, "choose_splits", lambda *_: splits)
    form, scales = (WEIGHT_ONLY | QUANTISED_INPUTS)[name]
    platform = cpu_platform() if device.type == "cpu" else current_platform()
    generator = torch.Generator().manual_seed(3)
    shapes = (2 * INTER, HIDDEN), (HIDDEN, INTER)
    stored = [on(device, random_weights(form, scales, *shape, i)) for i, shape in enumerate(shapes)]
    plain = [torch.randn(shape, generator=generator).to(device) * 0.1 for shape in shapes]
    x = torch.randn(num_tokens, 2 * HIDDEN, generator=generator).to(device)[:, ::2]
    ids = torch.randint(0, EXPERTS + 1, (num_tokens, 3), generator=generator).to(device)
    weights = torch.rand(num_tokens, 3, generator=generator).to(device)
    tiles = [prepare_tiles(matrix, platform) for matrix in stored]
    joined = [replace(each, plain=own) for each, own in zip(tiles, plain, strict=True)]
    kind = kind if device.type == "cpu" else platform.kind
    out = quant_experts.mixture(kind, x, *joined, weights, ids)
    is_plain = ids == EXPERTS
    routed = torch.where(is_plain, 0.0, weights), ids.masked_fill(is_plain, 0)
    own = silu_and_mul(x @ plain[0].T) @ plain[1].T
    wanted = quant_experts.mixture(kind, x.contiguous(), *tiles, *routed)
    wanted += (weights * is_plain).sum(1, keepdim=True) * own
    assert own.abs().max() > 0.1
    assert ((out - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_rows_that_a_norm_quantised(device: torch.device) -> None:
    """The norm's codes for the experts that are quantised, its rows for the one that is not."""
    form, scales = QUANTISED_INPUTS["fp8 blocks x fp8 groups"]
    platform = cpu_platform() if device.type == "cpu" else current_platform()
    shapes = (2 * INTER, HIDDEN), (HIDDEN, INTER)
    tiles = [
        replace(
            prepare_tiles(on(device, random_weights(form, scales, *shape, i)), platform),
            plain=torch.randn(shape, device=device) * 0.1,
        )
        for i, shape in enumerate(shapes)
    ]
    rounding = tiles[0].rounding
    assert rounding is not None
    x = torch.randn(3, HIDDEN, device=device)
    ids = torch.tensor([[0, EXPERTS], [1, 0], [EXPERTS, 1]], device=device)
    weights = torch.rand(3, 2, device=device)
    made = replace(round_rows(x, rounding), rows=x)
    out, wanted = (
        quant_experts.mixture(platform.kind, rows, *tiles, weights, ids) for rows in (made, x)
    )
    assert torch.equal(out, wanted)


def interpreted(device: torch.device) -> torch.device:
    if device.type != "cpu":
        pytest.skip("weights of another platform")
    return device


def test_fp8_of_gfx942(device: torch.device) -> None:
    check("fp8 blocks", interpreted(device), "rocm", platform=Platform("rocm", "gfx942", True))


def test_mxfp4_of_gfx950(device: torch.device) -> None:
    """By products of codes with their scales."""
    check("mxfp4 x mxfp4", interpreted(device), "rocm", platform=Platform("rocm", "gfx950", True))


def test_ordered_columns(device: torch.device) -> None:
    order = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(1)).to(device)
    check("int4 group 32", device, "rocm", column_order=order)


def test_many_tokens_in_slices_of_the_hidden_dimension(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_experts, "_VISITS_BYTES", 1)
    monkeypatch.setattr(moe_experts, "_SLICE", 128)
    check("fp8 blocks", device, "cuda", num_tokens=20)


@pytest.mark.parametrize("name", ["int8 channel", "int8 channel x int8 token"])
def test_a_token_does_not_depend_on_its_batch(name: str, device: torch.device) -> None:
    """Bit for bit, through three sizes of tiles."""
    form, scales = (WEIGHT_ONLY | QUANTISED_INPUTS)[name]
    generator = torch.Generator().manual_seed(3)
    x, weights = torch.randn(70, HIDDEN, generator=generator), torch.rand(70, 2)
    ids = torch.rand(70, EXPERTS, generator=generator).argsort(1)
    x, weights, ids = (tensor.to(device) for tensor in (x, weights, ids))
    tiles = []
    for rows, inputs in ((2 * INTER, HIDDEN), (HIDDEN, INTER)):
        stored = random_weights(form, scales, rows, inputs, rows)
        # The interpreter's products inside a block are numpy's, in an order of its own.
        stored.codes[..., torch.arange(inputs) % PART != 5] = 0
        tiles.append(prepare_tiles(on(device, stored), current_platform()))
    kind = "cuda" if device.type == "cpu" else current_platform().kind
    whole = quant_experts.mixture(kind, x, *tiles, weights, ids)
    assert whole.abs().max() > 0.01
    for part in (slice(69, 70), slice(40, 66)):
        alone = quant_experts.mixture(kind, x[part], *tiles, weights[part], ids[part])
        assert torch.equal(alone, whole[part])


def query(form: WeightFormat | None, arch: str = "gfx942", **shape: int) -> OpQuery:
    sizes = {"num_experts": 384, "hidden_size": 7168, "intermediate_size": 256, **shape}
    kind = "cuda" if arch.startswith("sm") else "rocm"
    return OpQuery(Platform(kind, arch, True), BF16, sizes, weights=form)


def test_what_is_refused() -> None:
    kimi, nvfp4 = WEIGHT_ONLY["int4 group 32"][0], WEIGHT_ONLY["nvfp4"][0]
    refuses = quant_experts.refuses
    assert refuses(query(kimi)) is None
    assert refuses(query(None)) == "needs a format of weights"
    assert "1025 experts" in str(refuses(query(kimi, num_experts=1025)))
    assert "groups of 96 inputs" in str(refuses(query(WeightFormat("int4", 1, 96))))
    # One group of all inputs of the second product, and several of the first.
    assert "groups of 40 inputs" in str(
        refuses(query(WeightFormat("int4", 1, 40), intermediate_size=40))
    )
    assert "sm80 does not convert" in str(refuses(query(nvfp4, "sm80")))
    assert f"{2 * 2**20 * 7168 // 2} bytes" in str(refuses(query(kimi, intermediate_size=2**20)))


def test_the_table_says_when_quantised_inputs_gain_nothing() -> None:
    mxfp4, deepseek = (
        QUANTISED_INPUTS[name][0] for name in ("mxfp4 x mxfp4", "fp8 blocks x fp8 groups")
    )
    assert note(query(mxfp4, "gfx950")) == note(query(deepseek)) == ""
    assert note(query(mxfp4, "sm90")) == (
        "inputs are rounded, but multiplied as bfloat16: these kernels multiply fp4 "
        "codes on gfx950 only"
    )
    assert note(query(WEIGHT_ONLY["int8 channel"][0])) == ""
