"""aiter's kernels are chosen where all that they need at run time is there.

The fake fails where aiter does: it starts what its tables name without asking whether that is
installed, and compiles a step of its Gluon decode at the first call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiter_cases import BF16, MI300X, Aiter, all_slots, attention, batch, check, random
from aiter_quant_cases import clone, exact_inputs, random_weights
from fake_aiter import REQUIREMENTS, REQUIREMENTS_COMMIT, FakeAiter
from test_aiter_quant_experts import TOLERANCES, sum_experts

from atom.model_ops.attention.metadata import KVCacheTensor
from atom.model_ops.kernels import probe
from atom.model_ops.kernels.aiter.moe import prepare_experts
from atom.model_ops.kernels.aiter.quant import FP8_CHANNEL, MXFP4
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.quant.weights import dequantise
from atom.model_ops.registry import OpTable
from atom.platform import Platform

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
MI355X = Platform("rocm", "gfx950", True)

# Names of kernels as aiter's table has them: of the port of MXFP4, of FlyDSL's other ones, and of
# Composable Kernel, which adds experts' results with atomics as those with `atomic` do.
PORT = "flydsl_mxmoe_g1_a4w4_32x256x256_nt", "flydsl_mxmoe_g2_a4w4_32x256x256_atomic_nt"
PORT_IN_ORDER = "flydsl_mxmoe_g1_a4w4_32x256x256", "flydsl_mxmoe_g2_a4w4_32x256x256"
FLYDSL = "flydsl_moe1_afp4_wfp4_bf16_t32x128x256_w2", "flydsl_moe2_afp4_wfp4_bf16_t32x128x256"
CK = "moe_ck2stages_gemm1_256x32x128x64", "moe_ck2stages_gemm2_256x32x128x64"
TOKENS = 4


@contextmanager
def table(fake: FakeAiter, platform: Platform = MI355X, **options: bool) -> Iterator[OpTable]:
    """aiter's implementations and torch's."""
    names = ("aiter", "torch")
    registry = {op: tuple(e for e in entries if e.name in names) for op, entries in OPS.items()}
    with probe.replaced(fake.library):
        yield OpTable(platform, registry, **options)


def tuned(names: tuple[str, str], tokens: Sequence[int] = (TOKENS,), **options: Any) -> FakeAiter:
    """Of 4 experts of 256 x 256, two a token."""
    fake = FakeAiter(arch="gfx950", **options)
    fake.tuned_experts = dict.fromkeys(((n, 256, 256, 4, 2) for n in tokens), names)
    return fake


def layer_sizes(elsewhere: int = 0) -> dict[str, int]:
    return {
        "num_experts": 4,
        "top_k": 2,
        "elsewhere": elsewhere,
        "hidden_size": 256,
        "intermediate_size": 256,
    }


def run_mxfp4(ops: OpTable, elsewhere: int = 0) -> str:
    """Which implementation was chosen; it computed what it should. Ids of experts elsewhere: 4."""
    w13, w2 = random_weights(MXFP4, 4, 512, 256), random_weights(MXFP4, 4, 256, 256, seed=1)
    x = exact_inputs(w13, "gfx950", TOKENS)
    ids = torch.tensor([[0, 3], [2, 1], [1, 0], [3, 2]])
    weights = torch.rand(TOKENS, 2, generator=torch.Generator().manual_seed(2))
    choice = ops.resolve_weights("quant_experts", BF16, MXFP4, **layer_sizes(elsewhere))
    assert choice.prepare is not None
    prepared = choice.prepare(clone(w13, CPU), clone(w2, CPU), BF16)
    wanted = sum_experts(x, w13, w2, weights, ids)
    if elsewhere:
        ids[0, 1], weights[1, 1] = 4, 0
        wanted = sum_experts(x, w13, w2, weights * (ids < 4), ids.clamp(max=3))
    out = choice.function(x, *prepared, weights, ids, elsewhere)
    check(out, wanted, TOLERANCES["mxfp4"])
    return choice.name


@pytest.mark.parametrize("names", [PORT, FLYDSL])
@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ({}, "flydsl is not installed: pip install flydsl==0.3.1"),
        (
            {"flydsl": "0.3.0"},
            "flydsl 0.3.0 is installed, and aiter demands another: pip install flydsl==0.3.1",
        ),
    ],
)
def test_without_flydsl_no_kernel_of_it_is_chosen(
    names: tuple[str, str], packages: dict[str, str], reason: str
) -> None:
    with table(tuned(names, packages=packages)) as ops:
        assert run_mxfp4(ops) == "torch"
        assert f"not aiter: its kernels for 4 tokens are FlyDSL's, and {reason}" in ops.describe()


def test_with_flydsl_its_kernels_run() -> None:
    for version in ("0.3.1", "0.3.1+rocm7"):
        fake = tuned(PORT, packages={"flydsl": version})
        with table(fake) as ops:
            assert run_mxfp4(ops) == "aiter"
        assert fake.seen_experts == [PORT]


def test_other_kernels_need_no_flydsl() -> None:
    for fake in (tuned(CK, packages={}), FakeAiter(arch="gfx950", packages={})):
        with table(fake) as ops:
            assert run_mxfp4(ops) == "aiter"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"programs": ()}, "no hipcc and no hipconfig and no make on PATH"),
        ({"programs": ("hipcc", "hipconfig")}, "no make on PATH"),
        ({"has_compiled_reduce": False}, "its sources cannot be imported"),
        ({"has_compiled_reduce": False, "packages": {}}, "its sources cannot be imported"),
    ],
)
def test_a_draft_decodes_without_what_aiter_compiles(options: dict[str, Any], reason: str) -> None:
    """On a plain cache, which aiter writes and reads."""
    fake = FakeAiter(**options)
    shape = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 128, "block_size": 16}
    shape |= {"num_blocks": 9, "sliding_window": 0}
    with table(fake, MI300X) as ops:
        aiter = Aiter(ops, CPU, fake)
        write, decode, _ = ops.resolve_together(
            ("kv_cache_write", "paged_attention", "prefill_attention"), BF16, BF16, **shape
        )
        pools = torch.zeros(2, 9, 16, 4, 128, dtype=BF16)
        cache = KVCacheTensor(pools[0], pools[1])
        metadata = batch(aiter, [1], [40], 16, 3)
        [slots] = all_slots(metadata, 16)
        key, value = random(aiter, 40, 4, 128, seed=1), random(aiter, 40, 4, 128, seed=2)
        write(key, value, cache, slots)
        q = random(aiter, 1, 4, 128)
        check(decode(q, cache, metadata, 0.1, None), attention(q, [(key, value)], metadata, 0.1))
        assert reason in ops.describe()
    aiter.called("reshape_and_cache_flash")


def test_an_aiter_that_takes_the_gpu_for_another_is_refused() -> None:
    """Weights of FP8 stay those of a checkpoint on one arch, and are converted on the other."""
    weights = random_weights(FP8_CHANNEL, 64, 256)
    x = exact_inputs(weights, "gfx942", 5)
    with table(FakeAiter(gpu_archs="gfx942;gfx950"), MI300X) as ops:
        sizes = {"in_features": 256, "out_features": 64}
        choice = ops.resolve_weights("quant_linear", BF16, FP8_CHANNEL, **sizes)
        assert choice.prepare is not None
        out = choice.function(x, choice.prepare(clone(weights, CPU), BF16), None)
        check(out, x.double() @ dequantise(weights, torch.float64).T, 2**-4)
        assert choice.name == "torch"
        assert (
            "not aiter: it picks kernels for gfx950, and this GPU is gfx942: it takes the last of "
            "$GPU_ARCHS, which is for building it; unset that, or set it to gfx942"
        ) in ops.describe()


def test_a_list_of_architectures_that_ends_with_the_gpu_s_is_none() -> None:
    with table(FakeAiter(arch="gfx950", gpu_archs="gfx942;gfx950")) as ops:
        ops.resolve("rms_norm", BF16, size=64)
        assert "not aiter" not in ops.describe()


def test_an_aiter_that_does_not_know_the_gpu_is_refused() -> None:
    def get_gfx() -> str:
        raise KeyError("Unknown GPU architecture: gfx12")

    fake = FakeAiter()
    fake.library.load("aiter.jit.utils.chip_info")["get_gfx"] = get_gfx  # type: ignore[index]
    with table(fake, MI300X) as ops:
        ops.resolve("rms_norm", BF16, size=64)
        assert "not aiter: it cannot tell the GPU's architecture: KeyError" in ops.describe()


def test_experts_of_other_ranks_do_not_keep_aiter_from_its_tuned_kernels() -> None:
    fake = tuned(CK)
    with table(fake) as ops:
        assert run_mxfp4(ops, elsewhere=12) == "aiter"
        w13, w2 = torch.randn(4, 512, 256).to(BF16) / 16, torch.randn(4, 256, 256).to(BF16) / 16
        experts = ops.resolve("moe_experts", BF16, **layer_sizes(12))
        prepared = prepare_experts(w13, w2)
        x, ids = torch.randn(TOKENS, 256).to(BF16), torch.tensor([[0, 4]] * TOKENS)
        out = experts(x, *prepared, torch.ones(TOKENS, 2), ids, 12)
        alone = experts(x, *prepared, torch.ones(TOKENS, 1), ids[:, :1])
        check(out, alone.double(), 2**-8)
    assert fake.seen_experts == [CK, CK, None]


def test_the_port_that_takes_no_experts_of_other_ranks_is_refused_with_them() -> None:
    with table(tuned(PORT)) as ops:
        assert run_mxfp4(ops, elsewhere=12) == "torch"
        assert (
            "not aiter: its kernels for 4 tokens take no experts that other ranks hold"
        ) in ops.describe()


POWERS = [2**n for n in range(16)]


@pytest.mark.parametrize(
    ("names", "tokens", "told"),
    [
        (PORT, POWERS[:12], "any number of tokens"),
        (PORT_IN_ORDER, POWERS, None),
        (PORT_IN_ORDER, POWERS[12:], "up to 2048 tokens"),
        ((FLYDSL[0], f"{FLYDSL[1]}_atomic"), POWERS, "any number of tokens"),
        ((FLYDSL[0], f"{FLYDSL[1]}_reduce"), POWERS[2:], "up to 2 tokens"),
        (CK, POWERS, "any number of tokens"),
    ],
)
def test_the_table_says_which_experts_are_added_in_any_order(
    names: tuple[str, str], tokens: list[int], told: str | None
) -> None:
    """Those of no tuned kernel are, too."""
    with table(tuned(names, tokens)) as ops:
        choice = ops.resolve_weights("quant_experts", BF16, MXFP4, **layer_sizes())
    assert choice.name == "aiter"
    wanted = "" if told is None else f"{told}: adds experts' results in any order (atomics), "
    assert choice.note.startswith(wanted)
    assert bool(choice.note) == (told is not None)


def test_an_engine_of_equal_bits_has_none_of_them() -> None:
    pytest.importorskip("triton")
    for op, weights in (("quant_experts", MXFP4), ("moe_experts", None)):
        with probe.replaced(tuned(PORT).library):
            ops = OpTable(MI355X, OPS, batch_invariant=True)
            choice = ops.resolve_weights(op, BF16, weights, **layer_sizes())
        assert choice.name == "triton"
        assert choice.passed_over[0] == ("aiter", "not batch-invariant")


def test_the_table_says_which_products_aiter_has_not_tuned() -> None:
    fake = FakeAiter()
    fake.tuned.add((64, 2112, 7168))
    with table(fake, MI300X) as ops:
        for outputs in (2112, 1536):
            ops.resolve("linear", BF16, in_features=7168, out_features=outputs)
        tuned_line, other = ops.describe().splitlines()[1:]
    told = "aiter has tuned none of 8, 64, 512, 4096 rows: torch's product"
    assert "out_features=2112" in tuned_line
    assert told not in tuned_line
    assert "out_features=1536" in other
    assert told in other


def packages(text: str) -> set[str]:
    """Names without versions."""
    return {re.split(r"[<>=;\s]", line.strip())[0] for line in text.splitlines() if line.strip()}


def test_what_aiter_demands_is_in_the_recipe_and_in_the_image() -> None:
    """Also the commit of which that is known: that of the image."""
    images = ROOT / "deploy" / "images"
    assert f"AITER_COMMIT={REQUIREMENTS_COMMIT}" in (images / "Dockerfile").read_text("utf-8")
    wanted = packages("\n".join(REQUIREMENTS))
    listed = (images / "aiter.in").read_text("utf-8").splitlines()
    listed = [line for line in listed if not line.startswith("#")]
    assert wanted <= packages("\n".join(listed))
    exact = {line for line in REQUIREMENTS if "==" in line}
    assert exact <= set(listed)
    recipe = (ROOT / "recipes" / "ROCm.md").read_text("utf-8")
    assert "\npip install -r deploy/images/aiter.in\n" in recipe
