"""aiter's quantised experts against float64 references: over the fake, and over aiter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from aiter_cases import BF16, Aiter, aiters, check
from aiter_quant_cases import clone, exact_inputs, fake_of, random_weights
from fake_aiter import AITER, FakeAiter
from fake_aiter_layouts import packed_int4, paired_scale, shuffled_weight

from atom.model_ops.kernels import probe
from atom.model_ops.kernels.aiter import quant_experts
from atom.model_ops.kernels.aiter.quant import (
    FP8_BLOCKS,
    FP8_CHANNEL,
    FP8_POWER_BLOCKS,
    INT4,
    INT8_CHANNEL,
    MXFP4,
)
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.moe import FusedMoE
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.quant.formats.table import parse_quantization
from atom.model_ops.quant.weights import QuantWeights, WeightFormat, dequantise, pack_nibbles
from atom.model_ops.registry import OpTable, OpUnavailableError
from atom.platform import Platform, cpu_platform

CPU = torch.device("cpu")
CHOICES = {"num_experts": 4, "top_k": 2, "elsewhere": 0}
EXPERTS = {"blocks": FP8_BLOCKS[0], "channels": FP8_CHANNEL, "mxfp4": MXFP4, "int4": INT4}


def sum_experts(
    x: torch.Tensor, w13: QuantWeights, w2: QuantWeights, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """float64, nothing but weights rounded."""
    first, second = (dequantise(w, torch.float64) for w in (w13, w2))
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (first[expert] @ x[token].double()).chunk(2)
            out[token] += weight * (second[expert] @ (F.silu(gate) * up))
    return out


# What rounding between the products costs, of the largest result.
TOLERANCES = {"blocks": 2**-4, "channels": 2**-4, "mxfp4": 2**-2, "int4": 2**-7}


@pytest.fixture
def demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """INT4 of sizes that aiter has not measured."""
    monkeypatch.setenv("ATOM_OP_QUANT_EXPERTS", "aiter")


def expert_case(
    name: str, arch: str
) -> tuple[QuantWeights, QuantWeights, torch.Tensor, torch.Tensor, torch.Tensor]:
    form = EXPERTS[name]
    w13, w2 = random_weights(form, 4, 512, 256), random_weights(form, 4, 256, 256, seed=1)
    x = exact_inputs(w13, arch, 20)
    generator = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(20)])
    return w13, w2, x, torch.rand(20, 2, generator=generator), ids


def check_experts(aiter: Aiter, name: str) -> None:
    w13, w2, x, weights, ids = expert_case(name, aiter.ops.platform.arch)
    sizes = {**CHOICES, "hidden_size": 256, "intermediate_size": 256}
    choice = aiter.ops.resolve_weights("quant_experts", BF16, w13.format, **sizes)
    assert choice.prepare is not None
    prepared = choice.prepare(clone(w13, aiter.device), clone(w2, aiter.device), BF16)
    wanted = sum_experts(x, w13, w2, weights, ids)
    there = [each.to(aiter.device) for each in (x, weights, ids)]
    check(choice.function(there[0], *prepared, *there[1:]).cpu(), wanted, TOLERANCES[name])


@pytest.mark.parametrize(
    ("arch", "name"),
    [*(("gfx950", n) for n in EXPERTS), *(("gfx942", n) for n in EXPERTS if n != "mxfp4")],
)
@pytest.mark.usefixtures("demanded")
def test_experts(arch: str, name: str) -> None:
    with fake_of(arch) as aiter:
        check_experts(aiter, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.usefixtures("demanded")
def test_experts_on_a_device(name: str) -> None:
    for aiter in aiters("real"):
        if name == "mxfp4" and aiter.ops.platform.arch != "gfx950":
            pytest.skip("MXFP4 is gfx950's")
        check_experts(aiter, name)


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("which", [0, 1])
def test_row_major_experts_would_give_garbage(name: str, which: int) -> None:
    given = expert_case(name, "gfx950")
    wanted = sum_experts(given[2], *given[:2], *given[3:])
    with fake_of("gfx950"):
        copies = clone(given[0], CPU), clone(given[1], CPU)
        prepared = list(quant_experts.prepare_experts(*copies, BF16))
        codes = given[which].codes.view(prepared[which].codes.dtype)
        codes.is_shuffled = True
        prepared[which] = replace(prepared[which], codes=codes)
        out = quant_experts.quant_experts(given[2], *prepared, *given[3:])
    assert (out.double() - wanted).abs().max() > wanted.abs().max() / 2


# What aiter's own functions at e404860 make of these codes and scales: `shuffle_weight` with (16,
# 16), `pack_int8_to_packed_int4` and `shuffle_scale_for_int4`.
ROWS, COLUMNS = torch.arange(16)[:, None], torch.arange(64)
CODES = (5 * ROWS + 3 * COLUMNS + ROWS * COLUMNS // 7) % 16
PACKED = """
487baed1c0f326599dc0f33626599ccff225589b9ccf0236478abdf1023579acacdf135668acef13f13478bcde125689
5699dd114488ccf0bbff3377bbff3377004488dc1155a9ed65a9ed3187cb1f54ba0e4297fd3186ca1f53a8fc53a8fc31
64b80d52c91e63a7c91d62b73f84d91e2e73c81da6fb409573c81d720c51b60b487baed1c0f32659bff22558588bbee1
3679add0e014477abdf1245879acd0133578acef013578acbcf023679acd01453377abef22569adebbff3377bbff3377
2276bafe4387cb0fa9fd3276db1054982075b9fe64a8ed31a8fc3185fc3185ca2f74b80d85c91e63a6fb30851d52a7fc
2e73c81da6fb409595fa4f943e83d82d487baed1c0f32659e114477b7aadd1048bbee12525589ccf24589bcfd013478a
ce0135799ace023567abef134589bdf0014589cdf03478bbbbff3377bbff33775498dc1165a9ee22fe3276cb1054a9ed
97dc2065cb1f54a83185ca1f85ca1f53da2f74b93085ca1e74c91e63eb3085d92e73c81da6fb4095c71c61b750a5fb40
487baed1c0f3265903376a9d9dc0f336cf0336697aadd0139bcf0235478abdf1579bce0224579bde23579adef13478bc
ef2366aade115599bbff3377bbff337776bbff3388cc00543287cb0f65a9ed310e4397db3286ca1fca1f53a81f53a8fc
96db2f74ec3085da52a7fb40c91d62b72e73c81da6fb4095e93f84d973c81d72
"""


def test_int4_lies_as_aiter_packs_it() -> None:
    """The numbers -8..7 are codes 0..15 here."""
    scale = torch.arange(1, 33).view(1, 16, 2).to(BF16)
    weights = QuantWeights(INT4, pack_nibbles(CODES.to(torch.uint8))[None], scale)
    own = weights.codes.data_ptr()
    with fake_of("gfx950"):
        prepared, _ = quant_experts.prepare_experts(weights, clone(weights, CPU), BF16)
    wanted = bytes.fromhex(PACKED)
    assert bytes(prepared.codes.view(torch.uint8).flatten().tolist()) == wanted
    assert (prepared.codes.dtype, prepared.codes.shape) == (torch.int4, (1, 16, 32))
    assert prepared.codes.data_ptr() == own
    # The two groups of an output lie together.
    assert prepared.scale.tolist() == list(range(1, 33))


def test_the_fake_packs_int4_as_aiter_does() -> None:
    numbers = (CODES - 8).to(torch.int8)
    packed = packed_int4(shuffled_weight(numbers).flatten())
    assert bytes(packed.view(torch.uint8).tolist()) == bytes.fromhex(PACKED)
    pairs = paired_scale(torch.arange(1, 25).view(2, 4, 3).to(BF16))
    assert pairs.shape == (2, 2, 3, 2)
    assert pairs[0].flatten().tolist() == [1, 4, 2, 5, 3, 6, 7, 10, 8, 11, 9, 12]


def loaded_experts(ops: OpTable) -> FusedMoE:
    """A layer of FP8 blocks, filled as a checkpoint fills it."""
    config = parse_quantization({"quant_method": "fp8", "weight_block_size": [128, 128]}, {})
    context = LayerContext(torch.float32, torch.device("cpu"), ops, 8, quant=config)
    layer = FusedMoE(4, 2, 256, 128, context, "experts")
    for expert in range(4):
        for part, shape in (("gate", (128, 256)), ("up", (128, 256)), ("down", (256, 128))):
            weights = random_weights(FP8_BLOCKS[0], *shape, seed=ord(part[0]) + expert)
            assert weights.scale is not None
            stored = {"weight": weights.codes, "weight_scale_inv": weights.scale.float() / 100}
            for name, tensor in stored.items():
                place = layer.place_weight(f"{expert}.{part}_proj.{name}")
                assert place is not None
                layer.load_weight(place[0], tensor, place[1])
    layer.process_after_loading()
    return layer


def test_a_layer_of_experts_is_prepared_when_loaded() -> None:
    """On gfx950, whose FP8 is the checkpoint's: as torch computes it."""
    ids = torch.tensor([[0, 2], [3, 1], [2, 3]])
    generator = torch.Generator().manual_seed(3)
    given = torch.randn(3, 256, generator=generator), torch.rand(3, 2, generator=generator), ids
    platform, fake = Platform("rocm", "gfx950", True), FakeAiter(torch.float32, arch="gfx950")
    with probe.replaced(fake.library):
        registry = {op: tuple(e for e in OPS[op] if e.name != "triton") for op in OPS}
        out = loaded_experts(OpTable(platform, registry))(*given)
    assert {"shuffle_weight", "fused_moe"} <= fake.names
    check(out, loaded_experts(OpTable(cpu_platform(), OPS))(*given))


@pytest.mark.parametrize(
    ("arch", "form", "size", "reason"),
    [
        ("gfx942", MXFP4, 256, "gfx942 does not multiply MXFP4"),
        ("gfx950", MXFP4, 384, "intermediate_size=384 is no multiple of 256"),
        ("gfx950", FP8_BLOCKS[0], 192, "intermediate_size=192 is no multiple of 128"),
        ("gfx950", INT4, 192, "intermediate_size=192 is no multiple of 128"),
        ("gfx950", replace(INT4, has_zeros=True), 256, "not int4 group 32 with zeros weight-only"),
        ("gfx950", INT8_CHANNEL, 256, "not int8 channel x int8 per token"),
        ("gfx950", FP8_POWER_BLOCKS[0], 256, "not fp8 block 128x128 x fp8 per group 128 e8m0"),
    ],
)
def test_quantised_experts_that_aiter_has_not(
    arch: str, form: WeightFormat, size: int, reason: str
) -> None:
    sizes = {**CHOICES, "hidden_size": 256, "intermediate_size": size}
    with fake_of(arch) as aiter, pytest.raises(OpUnavailableError, match=reason):
        aiter.ops.resolve_weights("quant_experts", BF16, form, **sizes)


@pytest.mark.parametrize(
    ("arch", "experts", "inter", "reason"),
    [
        ("gfx950", 384, 256, None),
        ("gfx950", 384, 512, None),
        (
            "gfx950",
            384,
            2048,
            "5637144576 bytes of codes; its INT4 kernels reach less than 4294",
        ),
        ("gfx950", 48, 2048, "not for gfx950 and 7168 x 2048, where 16 programs would read an"),
        ("gfx942", 384, 256, "not for gfx942 and 7168 x 256, where 2 programs would read an"),
    ],
)
def test_int4_of_kimi(arch: str, experts: int, inter: int, reason: str | None) -> None:
    """Where aiter has measured kernels: for the experts that 8, 4 and 2 ranks cut."""
    sizes = {"num_experts": experts, "top_k": 8, "elsewhere": 0}
    sizes |= {"hidden_size": 7168, "intermediate_size": inter}
    with fake_of(arch) as aiter:
        if reason is None:
            assert (
                "in any order"
                in aiter.ops.resolve_weights("quant_experts", BF16, INT4, **sizes).note
            )
            return
        with pytest.raises(OpUnavailableError, match=reason):
            aiter.ops.resolve_weights("quant_experts", BF16, INT4, **sizes)


@pytest.mark.usefixtures("demanded")
def test_int4_without_its_kernels() -> None:
    """Other formats need neither flydsl nor the functions that pack INT4."""
    sizes = {**CHOICES, "hidden_size": 256, "intermediate_size": 256}
    with fake_of("gfx950") as aiter:
        assert aiter.fake is not None
        aiter.fake.packages = {}
        aiter.ops.resolve_weights("quant_experts", BF16, FP8_CHANNEL, **sizes)
        with pytest.raises(OpUnavailableError, match="flydsl's, which is not installed"):
            aiter.ops.resolve_weights("quant_experts", BF16, INT4, **sizes)
    old = FakeAiter(arch="gfx950", missing=("pack_int8_to_packed_int4",))
    with probe.replaced(old.library):
        ops = OpTable(Platform("rocm", "gfx950", True), AITER)
        ops.resolve_weights("quant_experts", BF16, FP8_CHANNEL, **sizes)
        with pytest.raises(OpUnavailableError, match=r"has no .*pack_int8_to_packed_int4"):
            ops.resolve_weights("quant_experts", BF16, INT4, **sizes)
