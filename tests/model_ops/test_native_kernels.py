"""The C++ kernels against float64, against torch's, and against themselves in other batches."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from model_ops.native_numbers import one_thread, random  # noqa: F401  # a fixture
from patience import wait_until

from atom.environment import cache_dir
from atom.model_ops.kernels.native import bindings, elementwise, linear
from atom.model_ops.kernels.native import sampling as native_sampling
from atom.model_ops.kernels.native.build import (
    NativeBuild,
    NativeBuildError,
    _Compilers,
    build,
    native_build,
)
from atom.model_ops.kernels.torch import elementwise as torch_elementwise
from atom.model_ops.kernels.torch import linear as torch_linear
from atom.model_ops.kernels.torch import sampling as torch_sampling
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpQuery, OpTable
from atom.platform import Platform, current_platform

REASON = native_build().reason
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no native kernels: {REASON}")

DTYPES = [torch.float32, torch.bfloat16]
if REASON is None and bindings.constant("has_float16"):
    DTYPES.append(torch.float16)
# Twice the rounding of a result, and the errors of float32 sums.
RTOL = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
ATOL = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 2e-4}

CPU = Platform("cpu", "avx2", has_native_bf16=False)


def assert_near(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact.double(), rtol=RTOL[dtype], atol=ATOL[dtype])


# ---- linear -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 40, 96, 575])
@pytest.mark.parametrize("outs", [1, 37, 100, 515])
def test_linear_equals_the_exact_product(dtype: torch.dtype, size: int, outs: int) -> None:
    op = linear.linear
    weight, bias = random(outs, size, dtype=dtype), random(outs, dtype=dtype, seed=1)
    for rows in (0, 1, 2, 7, 17, 64, 130):
        x = random(rows, size, dtype=dtype, seed=2) / size**0.5
        exact = x.double() @ weight.double().T
        assert_near(op(x, weight, None), exact, dtype)
        assert_near(op(x, weight, bias), exact + bias.double(), dtype)
        theirs = torch_linear.linear_upcast(x, weight, bias)
        torch.testing.assert_close(op(x, weight, bias), theirs, rtol=RTOL[dtype], atol=ATOL[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outs", "size"), [(331, 40), (96, 1536)])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, outs: int, size: int) -> None:
    """Few rows and many, at either end, take other ways through the kernel."""
    weight, x = random(outs, size, dtype=dtype), random(512, size, dtype=dtype, seed=1)
    bias = random(outs, dtype=dtype, seed=2)
    sums, rounded = linear.logits(x, weight), linear.linear(x, weight, bias)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (*range(threads, 71, 3), 134, 143, 199, 512):
            assert torch.equal(linear.logits(x[:rows], weight), sums[:rows])
            assert torch.equal(linear.logits(x[-rows:], weight), sums[-rows:])
            assert torch.equal(linear.linear(x[-rows:], weight, bias), rounded[-rows:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "outs", "size"), [(300, 40, 2048), (601, 200, 4128)])
def test_blocks_of_rows_that_leave_the_cache_have_the_same_bits(
    dtype: torch.dtype, rows: int, outs: int, size: int
) -> None:
    weight, x = random(outs, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    everything = linear.logits(x, weight)
    for row in (0, 127, 128, 255, 256, 299, rows - 1):
        assert torch.equal(linear.logits(x[row : row + 1], weight)[0], everything[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outs", "size"), [(1, 32), (31, 90), (515, 576)])
def test_logits_are_float32_sums(dtype: torch.dtype, outs: int, size: int) -> None:
    """Within 1e-5 of the float64 product, also in torch and on matrix tiles (64 rows or more)."""
    weight = random(outs, size, dtype=dtype)
    for rows in (0, 1, 5, 63, 64, 81, 130):
        x = random(rows, size, dtype=dtype, seed=2)
        exact = x.double() @ weight.double().T
        for op in (linear.logits, torch_linear.logits):
            got = op(x, weight)
            assert got.dtype is torch.float32
            torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5 * size**0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_logits_have_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    weight, wide = random(331, 576, dtype=dtype), random(63, 600, dtype=dtype, seed=1)
    x = wide[:, 8:584]  # rows that lie apart
    everything = linear.logits(x, weight)
    torch.set_num_threads(2)
    for rows in (1, 2, 7, 23, 62):
        assert torch.equal(linear.logits(x[-rows:].contiguous(), weight), everything[-rows:])
    tall = wide.repeat(3, 1)[:, 8:584]
    assert torch.equal(linear.logits(tall, weight)[:63], linear.logits(tall, weight)[63:126])


def test_linear_reads_rows_that_lie_apart() -> None:
    weight, wide = random(48, 64), random(5, 200)
    op = linear.linear
    view = wide[:, 100:164]
    assert torch.equal(op(view, weight, None), op(view.contiguous(), weight, None))
    turned = random(64, 5).T
    assert torch.equal(op(turned, weight, None), op(turned.contiguous(), weight, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_writes_columns_of_a_wider_output(dtype: torch.dtype) -> None:
    weight, bias = random(37, 96, dtype=dtype), random(37, dtype=dtype, seed=1)
    for rows in (1, 2, 7, 70):
        x = random(rows, 96, dtype=dtype, seed=2)
        out = torch.full((rows, 50), 7.0, dtype=dtype)
        linear.linear_into(x, weight, bias, out[:, 5:42])
        assert torch.equal(out[:, 5:42], linear.linear(x, weight, bias))
        assert (out[:, :5] == 7.0).all()
        assert (out[:, 42:] == 7.0).all()
    turned = torch.empty(37, 70, dtype=dtype).T
    for wrong in (out[:, 5:41], out[:, 5:42].double(), out[1:, 5:42], turned):
        with pytest.raises(ValueError, match=r"linear writes \[70, 37\]"):
            linear.linear_into(x, weight, bias, wrong)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_linear_keeps_what_is_not_finite(dtype: torch.dtype, value: float) -> None:
    weight, x = torch.ones(4, 32, dtype=dtype), torch.ones(3, 32, dtype=dtype)
    x[1, 5] = value
    out = linear.linear(x, weight, None)
    torch.testing.assert_close(out, F.linear(x, weight), equal_nan=True)


def test_a_result_beyond_the_type_becomes_infinite() -> None:
    x = torch.full((1, 32), 3e38, dtype=torch.bfloat16)
    out = linear.linear(x, torch.ones(2, 32, dtype=torch.bfloat16), None)
    assert torch.equal(out, torch.full((1, 2), float("inf"), dtype=torch.bfloat16))


def test_linear_refuses_operands_that_do_not_fit() -> None:
    op = linear.linear
    x, weight = random(2, 64), random(8, 64)
    for wrong in (random(8, 32), random(8, 64).bfloat16(), random(64, 8).T):
        with pytest.raises(ValueError, match=r"linear.*\[2, 64\]"):
            op(x, wrong, None)
    with pytest.raises(ValueError, match="bias"):
        op(x, weight, random(9))
    with pytest.raises(ValueError, match="not enough values"):
        op(x[0], weight, None)


# ---- elementwise --------------------------------------------------------------------------


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 30, 64, 576, 2048])
def test_rms_norm(dtype: torch.dtype, size: int) -> None:
    weight = random(size, dtype=dtype)
    for rows in (0, 1, 5, 70):
        x = random(rows, size, dtype=dtype, seed=1)
        exact = exact_norm(x, weight, 1e-5)
        assert_near(elementwise.rms_norm(x, weight, 1e-5), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_the_heads_of_a_fused_projection(dtype: torch.dtype) -> None:
    fused, weight = random(6, 8 * 48, dtype=dtype), random(48, dtype=dtype, seed=1)
    heads = fused.view(6, 8, 48)[:, 2:5]
    op = elementwise.rms_norm
    assert torch.equal(op(heads, weight, 1e-6), op(heads.contiguous(), weight, 1e-6))
    every_other = random(6, 96, dtype=dtype)[:, ::2]
    assert torch.equal(op(every_other, weight, 1e-6), op(every_other.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 30, 576])
def test_layer_norm(dtype: torch.dtype, size: int) -> None:
    """Of rows far from 0, and of heads with a weight each."""
    op, weight = elementwise.layer_norm, random(3, size, dtype=dtype)
    for rows in (0, 1, 70):
        heads = (random(rows, 8, size, dtype=dtype, seed=1) + 5)[:, 2:5]
        centred = heads.double() - heads.double().mean(-1, keepdim=True)
        ones = torch.ones(size)
        exact = exact_norm(centred, ones, 1e-2) * weight.double()
        assert_near(op(heads, weight, 1e-2), exact, dtype)
        first = op(heads[:, 0], weight[0], 1e-2)
        assert torch.equal(first, op(heads, weight, 1e-2)[:, 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [30, 576])
def test_add_rms_norm_rounds_the_sum_first(dtype: torch.dtype, size: int) -> None:
    op, weight = elementwise.add_rms_norm, random(size, dtype=dtype)
    for rows in (0, 1, 4, 70):
        x = random(rows, size, dtype=dtype, seed=1)
        residual = random(rows, size, dtype=dtype, seed=2)
        out, total = op(x, residual, weight, 1e-5)
        assert torch.equal(total, x + residual)
        assert_near(out, exact_norm(total, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 40, 1536])
def test_silu_and_mul(dtype: torch.dtype, size: int) -> None:
    op = elementwise.silu_and_mul
    for rows in (0, 1, 3, 50):
        x = random(rows, 2 * size, dtype=dtype) * 4
        gate, up = x.double().chunk(2, dim=-1)
        assert_near(op(x), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 40, 1536])
def test_gelu_and_factors(dtype: torch.dtype, size: int) -> None:
    for rows in (0, 1, 3, 50):
        x = random(rows, 2 * size, dtype=dtype) * 4
        gate, up = x.double().chunk(2, dim=-1)
        assert_near(elementwise.gelu_and_mul(x), F.gelu(gate, approximate="tanh") * up, dtype)
        exact = x.double() * 0.3
        factors = random(rows, 1, dtype=dtype, seed=1)
        gated = x.double() * factors.double().sigmoid()
        assert_near(elementwise.mul_sigmoid(x.clone(), factors), gated, dtype)
        wide = random(rows, 2 * size, dtype=dtype, seed=2)
        gated = x.double() * wide.double().sigmoid()
        assert_near(elementwise.mul_sigmoid(x.clone(), wide), gated, dtype)
        assert elementwise.scale(x, 0.3) is x
        assert_near(x, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_factors_of_positions(dtype: torch.dtype) -> None:
    """Of a part of a wider product, whose rest stays."""
    product = random(5, 7, 24, dtype=dtype)
    x, rest = product[:, :4], product[:, 4:].clone()
    positions, factors = torch.tensor([3, 0, 9, 9, 1]), random(10, seed=1)
    exact = x.double() * factors[positions][:, None, None]
    assert elementwise.scale_by_position(x, positions, factors) is x
    assert_near(x, exact, dtype)
    assert torch.equal(product[:, 4:], rest)
    with pytest.raises(IndexError, match="position 9 has no factor; there are 9"):
        elementwise.scale_by_position(x, positions, factors[:9])
    with pytest.raises(ValueError, match=r"scale_by_position .* positions \[4\]"):
        elementwise.scale_by_position(x, positions[:4], factors)


def test_gelu_of_extreme_gates() -> None:
    gates = torch.tensor([-1e4, -90.0, -20.0, -6.0, -1e-4, 0.0, 6.0, 90.0, 1e4, float("nan")])
    x = torch.cat((gates, torch.ones_like(gates)))[None]
    exact = F.gelu(gates.double(), approximate="tanh").float()
    got = elementwise.gelu_and_mul(x)[0]
    torch.testing.assert_close(got, exact, rtol=2e-6, atol=1e-7, equal_nan=True)


def test_factors_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="scale"):
        elementwise.scale(random(4, 6)[:, :3], 2.0)
    with pytest.raises(ValueError, match=r"mul_sigmoid .* gate \[4\]"):
        elementwise.mul_sigmoid(random(4, 6), random(4))


def test_silu_of_extreme_gates() -> None:
    gates = torch.tensor([-1e4, -200.0, -90.0, -88.0, -20.0, 0.0, 20.0, 90.0, 1e4, float("nan")])
    x = torch.cat((gates, torch.ones_like(gates)))[None]
    got = elementwise.silu_and_mul(x)[0]
    torch.testing.assert_close(got, F.silu(gates), rtol=1e-6, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (96, 40), (128, 128)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(dtype: torch.dtype, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    op = elementwise.rope
    table = random(50, rotary_dim, seed=3)
    for rows in (0, 1, 5, 130):
        positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(4))
        fused = random(rows, 8, head_dim, dtype=dtype)
        q, k = fused[:, :5], fused[:, 5:7]
        for got, x in zip(op(positions, q, k, table, interleaved), (q, k), strict=True):
            wide = x.double(), x.double(), table.double()
            exact, _ = torch_elementwise.rope(positions, *wide, interleaved)
            assert got.is_contiguous()
            assert_near(got, exact, dtype)


def test_interleaved_pairs_rotate_like_the_halves_they_become() -> None:
    x, table, positions = random(5, 3, 40), random(9, 24, seed=1), torch.arange(5)
    halves = torch.cat((x[..., 0:24:2], x[..., 1:24:2], x[..., 24:]), dim=-1)
    for rope in (torch_elementwise.rope, elementwise.rope):
        for one, other in zip(
            rope(positions, x, x, table, True),
            rope(positions, halves, halves, table, False),
            strict=True,
        ):
            assert torch.equal(one, other)


def test_rope_refuses_a_position_outside_the_table() -> None:
    q = random(2, 1, 16)
    for bad in (-1, 10):
        with pytest.raises(IndexError, match=f"position {bad} .* 10"):
            elementwise.rope(torch.tensor([3, bad]), q, q, random(10, 16), False)


# ---- masks --------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 5000])
@pytest.mark.parametrize("rows", [None, [4, 0, 2], []])
def test_masked_tokens_equal_torchs(vocab: int, rows: list[int] | None) -> None:
    scores = random(5, vocab)
    scores[0, 0], scores[4, -1] = float("nan"), float("inf")
    count = 5 if rows is None else len(rows)
    generator = torch.Generator().manual_seed(vocab)
    words = torch.randint(-(2**31), 2**31, (count, -(-vocab // 32)), generator=generator).int()
    index = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    expected = scores.clone()
    torch_sampling.mask_tokens(expected, words, index)
    native_sampling.mask_tokens(scores, words, index)
    assert torch.equal(scores.view(torch.int32), expected.view(torch.int32))


def test_masks_that_fit_no_scores_are_refused() -> None:
    op, scores = native_sampling.mask_tokens, random(3, 64)
    words = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"mask_tokens .* scores \[3, 64\]"):
        op(scores, words, None)
    for bad in (-1, 3):
        with pytest.raises(IndexError, match=f"row {bad} of 3"):
            op(scores, words, torch.tensor([bad]))


def test_threads_change_no_bit() -> None:
    weight, x = random(300, 576), random(200, 576, seed=1)
    table, positions = random(200, 64, seed=2), torch.arange(200)
    norm_weight = random(576)

    def run() -> list[torch.Tensor]:
        out = linear.linear(x, weight, None)
        normed, total = elementwise.add_rms_norm(x, x, norm_weight, 1e-5)
        gated = elementwise.silu_and_mul(x)
        heads = x.view(200, 9, 64)
        rotated = elementwise.rope(positions, heads, heads, table, False)
        return [out, normed, total, gated, *rotated]

    alone = run()
    torch.set_num_threads(3)
    for one, other in zip(alone, run(), strict=True):
        assert torch.equal(one, other)


# ---- table and build ----------------------------------------------------------------------


@pytest.mark.parametrize("op", ["linear", "rms_norm", "silu_and_mul", "rope", "paged_attention"])
def test_the_table_prefers_native_kernels_on_a_cpu(op: str) -> None:
    shape = {"in_features": 64, "head_dim": 64, "size": 64}
    table = OpTable(CPU, OPS)
    table.resolve(op, torch.bfloat16, torch.bfloat16, **shape)
    assert table.describe().splitlines()[1].split() == [op, "native"]
    [native] = [candidate for candidate in OPS[op] if candidate.name == "native"]
    reason = native.supports(OpQuery(Platform("cuda", "sm90", True), torch.bfloat16, shape))
    assert reason == "runs on CPUs only"
    assert native.supports(OpQuery(CPU, torch.float64, shape)) is not None


def test_the_table_says_why_a_shape_is_refused() -> None:
    table = OpTable(CPU, OPS)
    table.resolve("kv_cache_write", torch.float32, torch.bfloat16, head_dim=64)
    assert "not native: the cache holds torch.bfloat16" in table.describe()


def test_without_a_build_torch_runs_and_the_reason_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bindings, "native_build", lambda: NativeBuild(None, "no C++ compiler"))
    table = OpTable(current_platform(), OPS)
    table.resolve("rms_norm", torch.float32, size=64)
    assert table.describe().splitlines()[1] == "rms_norm  torch  not native: no C++ compiler"


def fresh_build(environment: dict[str, str]) -> str:
    program = (
        "from atom.model_ops.kernels.native.build import native_build; print(native_build().reason)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_missing_or_failing_compiler_is_a_reason(tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path), "ATOM_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    assert fresh_build(nowhere).startswith("no C++ compiler: looked for c++, g++, clang++")
    assert "looked for nonsense++" in fresh_build(nowhere | {"CXX": "nonsense++"})
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "out of luck" >&2\nexit 1\n')
    broken.chmod(0o755)
    reason = fresh_build(nowhere | {"CXX": str(broken), "PATH": "/bin:/usr/bin"})
    assert "broken failed: out of luck" in reason


def test_a_compiler_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("CXX", str(hanging))
    monkeypatch.setattr("atom.model_ops.kernels.native.build._TIMEOUT_SECONDS", 0.01)
    with pytest.raises(NativeBuildError, match=r"took over 0\.01 s; the next start goes on"):
        build(tmp_path)


def test_a_compiler_ends_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a driver's own compiler, which goes on when the driver alone is killed."""
    driver, started = tmp_path / "driver", tmp_path / "started"
    driver.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {started}\nwait\n")
    driver.chmod(0o755)
    compilers = _Compilers()
    with ThreadPoolExecutor() as pool:
        for limit, error in ((0.3, "took over"), (60, "exit status -9")):
            monkeypatch.setattr("atom.model_ops.kernels.native.build._TIMEOUT_SECONDS", limit)
            done = pool.submit(compilers.run, [str(driver)])
            wait_until(lambda: started.exists() and started.read_text().endswith("\n"))
            child = int(started.read_text())
            if limit == 60:
                compilers.stop()
            with pytest.raises(NativeBuildError, match=error):
                done.result()
            wait_until(lambda child=child: not is_running(child))
            started.unlink()


def is_running(process: int) -> bool:
    """Whether it runs, and is not only waiting to be reaped."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_interrupting_a_build_ends_its_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, started, ended = (tmp_path / name for name in ("hanging", "started", "ended"))
    hanging.write_text(f"#!/bin/sh\ntouch {started}\nsleep 20\ntouch {ended}\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("CXX", str(hanging))

    def interrupted(*_: object, **__: object) -> object:
        wait_until(started.exists)
        raise KeyboardInterrupt

    monkeypatch.setattr("atom.model_ops.kernels.native.build.tqdm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path)
    assert not ended.exists()


def test_who_waits_for_a_compiler_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "atom.model_ops.kernels.native.build._Compilers.run",
        lambda _, command: Path(command[-1]).touch(),
    )
    caplog.set_level("INFO", "atom.model_ops.kernels.native.build")
    for _ in range(2):
        build(tmp_path)
    assert caplog.messages == ["Compiling kernels for this processor, once"]


def test_a_build_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atom.model_ops.kernels.native.build._Compilers.run", None)
    assert build(cache_dir() / "native").exists()


def test_a_caller_keeps_its_helpers() -> None:
    big = random(512, 512)
    tasks = Path("/proc/self/task")

    def call() -> None:
        torch.set_num_threads(3)
        for _ in range(20):
            linear.linear(big, big, None)

    def threads() -> set[str]:
        return {task.name for task in tasks.iterdir()}

    call()
    before = threads()
    call()
    assert threads() <= before  # those of other tests may end meanwhile
    other = threading.Thread(target=call)
    other.start()
    other.join()
    wait_until(lambda: threads() <= before)  # helpers end with their caller


def test_a_forked_process_works_without_helpers() -> None:
    code = (
        "import os, torch\n"
        "from atom.model_ops.kernels.native.linear import linear\n"
        "x = torch.ones(256, 256)\n"
        "torch.set_num_threads(3)\n"
        "linear(x, x, None)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        # numpy compares: torch's own threads may hang after a fork.
        "    os._exit(0 if bool((linear(x, x, None).numpy() == 256).all()) else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "0"
