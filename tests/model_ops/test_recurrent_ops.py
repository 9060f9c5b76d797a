"""Ops of recurrent states: transformers' numbers, and the bits of any other cut of a sequence."""

from __future__ import annotations

import re
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_ops.native_numbers import one_thread, random  # noqa: F401  # a fixture
from model_ops.recurrent_batches import (
    ROWS,
    VERSIONS,
    Inputs,
    exact,
    join,
    metadata_of,
    pool,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from atom.model_ops.kernels.native import recurrent as native_ops
from atom.model_ops.kernels.native.build import native_build
from atom.model_ops.kernels.torch import recurrent as torch_ops

TAPS = 4
OPS = [torch_ops] if native_build().reason else [torch_ops, native_ops]
# Key heads, value heads, K, V and log decays of a value head.
SHAPES = [(2, 4, 16, 8, 1), (3, 3, 32, 32, 32), (1, 3, 20, 13, 1), (2, 2, 10, 70, 10)]
names = pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.__name__.split(".")[-2])
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
STATES = [torch.float32, torch.bfloat16]
stored = pytest.mark.parametrize("stored", STATES, ids=lambda dtype: f"{dtype} states")


@names
@shapes
@dtypes
def test_delta_rule(ops: ModuleType, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, states = Inputs.random(shape, 23, dtype=dtype), pool(shape)
    out = inputs.run(ops, states, metadata_of((2, 0, 23)))
    wanted, after = exact(inputs)
    assert out.dtype is dtype
    near = {"rtol": 1e-5, "atol": 2e-6}
    rounded = near if dtype is torch.float32 else {"rtol": 2**-8, "atol": 1e-5}
    torch.testing.assert_close(out.double(), wanted, **rounded)
    for p in range(23 - VERSIONS, 23):
        torch.testing.assert_close(states[2, p % VERSIONS].double(), after[p], **near)
    assert states[[0, 1, 3, 4, 5]].isnan().all()


@names
@shapes
def test_states_are_rounded_behind_every_token(ops: ModuleType, shape: tuple[int, ...]) -> None:
    """Not only behind those that are kept; outputs come of what is not rounded."""
    inputs, states = Inputs.random(shape, 23), pool(shape, torch.bfloat16)
    out = inputs.run(ops, states, metadata_of((2, 0, 23)))
    wanted, after = exact(inputs, torch.bfloat16)
    unrounded, _ = exact(inputs)
    # A number between two of bfloat16 may become either.
    assert 5 * (out - wanted).norm() < (out - unrounded).norm()
    torch.testing.assert_close(
        states[2, 22 % VERSIONS].double(), after[22], rtol=2**-7, atol=2**-8 * float(after.std())
    )


@names
def test_delta_rule_is_that_of_transformers(ops: ModuleType) -> None:
    """One decay a head, each key head for two value heads."""
    shape = SHAPES[0]
    inputs, states = Inputs.random(shape, 9), pool(shape)
    q, k, v, decay, beta = (tensor[None] for tensor in vars(inputs).values())
    wanted, last = theirs.torch_recurrent_gated_delta_rule(
        *(q, k, v, decay[..., 0], beta),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    out = inputs.run(ops, states, metadata_of((1, 0, 9)))
    torch.testing.assert_close(out, wanted[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states[1, 8 % VERSIONS], last[0], rtol=1e-5, atol=1e-6)


def assert_same_row(ops: ModuleType, alone: torch.Tensor, among: torch.Tensor) -> None:
    """Torch's exponentials on a CPU depend on a number's place by a bit; kernels' do not."""
    if ops is torch_ops:
        torch.testing.assert_close(alone, among)
    else:
        assert torch.equal(alone, among)


CUTS = [[1] * 23, [23], [5, 1, 1, 16], [16, 7], [2, 21]]


@names
@shapes
@stored
def test_delta_rule_has_the_same_bits_however_it_is_cut(
    ops: ModuleType, shape: tuple[int, ...], stored: torch.dtype
) -> None:
    """Alone or in a batch of five, with any number of threads."""
    inputs = [Inputs.random(shape, 23, seed=10 * s) for s in range(len(CUTS))]
    wanted = [own.run(ops, pool(shape, stored), metadata_of((0, 0, 23))) for own in inputs]
    states, done = pool(shape, stored), [0] * len(CUTS)
    outs: list[list[torch.Tensor]] = [[] for _ in CUTS]
    for step in range(23):
        torch.set_num_threads(1 + step % 3)
        running = [s for s, cut in enumerate(CUTS) if step < len(cut)]
        counts = [CUTS[s][step] for s in running]
        parts = [inputs[s].part(done[s], done[s] + n) for s, n in zip(running, counts, strict=True)]
        rows = [(4 - s, done[s], n) for s, n in zip(running, counts, strict=True)]
        out = join(parts).run(ops, states, metadata_of(*rows))
        for s, part in zip(running, out.split(counts), strict=True):
            outs[s].append(part)
            done[s] += len(part)
    for parts_of_one, whole in zip(outs, wanted, strict=True):
        assert torch.equal(torch.cat(parts_of_one), whole)


@names
@shapes
@stored
def test_rejected_drafts_leave_nothing_behind(
    ops: ModuleType, shape: tuple[int, ...], stored: torch.dtype
) -> None:
    """A step of up to VERSIONS tokens, of which any number is accepted, then the next."""
    right, states = Inputs.random(shape, 40), pool(shape, stored)
    wanted = right.run(ops, pool(shape, stored), metadata_of((0, 0, 40)))
    at = 0
    for step, count in enumerate([1, 4, 2, 1, 3, 1, 1, 4, 2]):
        wrong = Inputs.random(shape, VERSIONS - count, seed=100 * (step + 1))
        given = join((right.part(at, at + count), wrong))
        out = given.run(ops, states, metadata_of((3, at, VERSIONS)))
        assert torch.equal(out[:count], wanted[at : at + count])
        at += count


@names
@shapes
def test_padding_writes_nothing(ops: ModuleType, shape: tuple[int, ...]) -> None:
    """Behind one token and behind none, in more tokens than there are versions."""
    right, states = Inputs.random(shape, 10), pool(shape)
    wanted = right.run(ops, states, metadata_of((3, 0, 10)))
    again, before = pool(shape), Inputs.random(shape, 8, seed=50)
    before.v[:] = float("nan")
    first = right.part(0, 9).run(ops, again, metadata_of((3, 0, 9)))
    assert torch.equal(first, wanted[:9])
    kept = again.clone()
    parts = metadata_of((3, 9, 8), (5, 0, 8), padding=(7, 8))
    out = join((right.part(9, 10), before.part(0, 7), before)).run(ops, again, parts)
    assert torch.equal(out[0], wanted[9])
    assert not out[1:].any()
    kept[3, 9 % VERSIONS] = states[3, 9 % VERSIONS]
    torch.testing.assert_close(again, kept, rtol=0, atol=0, equal_nan=True)


def test_work_depends_on_new_tokens_alone() -> None:
    """Of the definition: operations, and the numbers that they read and make, at any position."""
    shape = SHAPES[0]
    inputs = Inputs.random(shape, 3)
    x, weight, ring = random(3, 8), random(8, TAPS, seed=1), random(ROWS, 7, 8, seed=2)

    def work(start: int) -> list[tuple[str, int]]:
        with Work() as seen:
            inputs.run(torch_ops, torch.zeros_like(pool(shape)), metadata_of((2, start, 3)))
            torch_ops.causal_conv(x, weight, ring, metadata_of((2, start, 3)))
        return seen.done

    assert len(work(8)) > 30
    assert work(8) == work(1_000_000)


class Work(TorchDispatchMode):
    """Attributes:
    done: operations, with how many numbers each reads and makes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        parts = tree_leaves((args, kwargs, out))
        self.done.append((str(func), sum(x.numel() for x in parts if isinstance(x, torch.Tensor))))
        return out


@names
@dtypes
def test_causal_conv(ops: ModuleType, dtype: torch.dtype) -> None:
    """Weights with channels side by side, too."""
    for channels in (5, 64, 300):
        x, weight = random(11, channels, dtype=dtype), random(channels, TAPS, dtype=dtype, seed=1)
        wide, taps = F.pad(x.double().T, (TAPS - 1, 0)), weight.double()[:, None]
        wanted = F.silu(F.conv1d(wide, taps, groups=channels)).T
        near = (
            {"rtol": 1e-5, "atol": 1e-6}
            if dtype is torch.float32
            else {"rtol": 2**-7, "atol": 1e-5}
        )
        ring = torch.full((ROWS, 7, channels), float("nan"), dtype=dtype)
        out = ops.causal_conv(x, weight, ring, metadata_of((4, 0, 11)))
        torch.testing.assert_close(out.double(), wanted, **near)
        for p in range(4, 11):
            assert torch.equal(ring[4, p % 7], x[p])
        assert ring[[0, 1, 2, 3, 5]].isnan().all()
        turned = ops.causal_conv(x, weight.T.contiguous().T, ring, metadata_of((4, 0, 11)))
        assert torch.equal(turned, out)


@names
def test_causal_conv_has_the_same_bits_however_it_is_cut(ops: ModuleType) -> None:
    """With drafts that are rejected behind each step of four tokens, and padding behind them."""
    # Torch's exponentials of what does not fill a processor's vector differ in their last bit.
    channels = 64 if ops is torch_ops else 24
    x, weight = random(30, channels), random(channels, TAPS, seed=1)
    whole = torch.full((ROWS, 40, channels), float("nan"))
    wanted = ops.causal_conv(x, weight, whole, metadata_of((0, 0, 30)))
    ring, at = torch.full((ROWS, TAPS - 1 + 4, channels), float("nan")), 0
    for step, count in enumerate([1, 4, 2, 1, 3, 9, 4, 1, 5]):
        drafts = random(max(0, 4 - count), channels, seed=7 + step)
        other, padding = x[:1].repeat(2, 1), torch.full((3, channels), float("nan"))
        given = torch.cat((x[at : at + count], drafts, padding, other))
        parts = metadata_of((2, at, len(given) - 2), (1, 0, 2), padding=(3, 0))
        out = ops.causal_conv(given, weight, ring, parts)
        assert torch.equal(out[:count], wanted[at : at + count])
        assert torch.equal(out[-2], wanted[0])
        at += count


@names
@dtypes
def test_gates(ops: ModuleType, dtype: torch.dtype) -> None:
    """The two functions of decays, one and many a head, and beyond what an exponential holds."""
    for decays in (1, 20):
        decay, beta = random(7, 3, decays, dtype=dtype) * 4, random(7, 3, dtype=dtype, seed=1)
        decay[0, 0, 0], decay[1, 1, 0], decay[2, 0, 0] = 100, -200, 21
        a_log, dt_bias = random(3, seed=2), random(3, decays, seed=3)
        shifted, rates = decay.double() + dt_bias, a_log.double().exp()[:, None]
        for bound, wanted in (
            (None, -rates * (1 + shifted.exp()).log()),
            (-5.0, -5 / (1 + (-rates * shifted).exp())),
        ):
            got, betas = ops.delta_gates(decay, beta, a_log, dt_bias, bound)
            assert got.dtype is betas.dtype is torch.float32
            torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=1e-7)
            assert (got <= 0).all()
            torch.testing.assert_close(betas, beta.float().sigmoid(), rtol=1e-6, atol=1e-7)
            one = ops.delta_gates(decay[4:5], beta[4:5], a_log, dt_bias, bound)
            assert_same_row(ops, one[0], got[4:5])
            assert_same_row(ops, one[1], betas[4:5])


@names
@dtypes
@pytest.mark.parametrize("size", [8, 20, 128])
def test_gated_norm(ops: ModuleType, dtype: torch.dtype, size: int) -> None:
    x, both = random(5, 3, size, dtype=dtype), random(5, 6, size, dtype=dtype, seed=1)
    gate, weight = both[:, 3:], random(size, dtype=dtype, seed=2)
    wide, opened = x.double(), gate.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    near = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 1e-5}
    for activation, wanted in (
        ("silu", normed * F.silu(opened)),
        ("sigmoid", normed * opened.sigmoid()),
    ):
        out = ops.gated_rms_norm(x, gate, weight, 1e-6, activation)
        torch.testing.assert_close(out.double(), wanted, **near)
        one = ops.gated_rms_norm(x[2:3], gate[2:3], weight, 1e-6, activation)
        assert_same_row(ops, one, out[2:3])
    with pytest.raises(ValueError, match="silu or sigmoid, not 'tanh'"):
        ops.gated_rms_norm(x, gate, weight, 1e-6, "tanh")


def test_gated_norm_is_that_of_transformers() -> None:
    norm = theirs.Qwen3NextRMSNormGated(16, eps=1e-5)
    x, gate = random(4, 2, 16), random(4, 2, 16, seed=1)
    out = torch_ops.gated_rms_norm(x, gate, norm.weight.data, 1e-5, "silu")
    torch.testing.assert_close(out, norm(x, gate), rtol=1e-6, atol=1e-6)


BEYOND = {
    "row 6 of 6": metadata_of((6, 3, 2)),
    "context length 1 ": metadata_of((0, -1, 2)),
    "3 of them padding": metadata_of((0, 3, 2), padding=(3,)),
    "query rows [0, 3]": metadata_of((0, 3, 3)),
}


@pytest.mark.skipif(native_build().reason is not None, reason="no native kernels")
@pytest.mark.parametrize("numbers", BEYOND)
def test_sequences_that_cannot_be_are_refused(numbers: str) -> None:
    shape = SHAPES[0]
    inputs, ring = Inputs.random(shape, 2), torch.zeros(ROWS, 7, 8)
    with pytest.raises(IndexError, match=re.escape(numbers)):
        inputs.run(native_ops, pool(shape), BEYOND[numbers])
    with pytest.raises(IndexError, match=re.escape(numbers)):
        native_ops.causal_conv(random(2, 8), random(8, TAPS), ring, BEYOND[numbers])


@pytest.mark.skipif(native_build().reason is not None, reason="no native kernels")
def test_operands_that_do_not_fit_are_refused() -> None:
    shape, metadata = SHAPES[0], metadata_of((0, 0, 2))
    inputs, states = Inputs.random(shape, 2), pool(shape)
    for wrong in (states[:, :, :3], states.half(), states.transpose(3, 4)):
        with pytest.raises(ValueError, match="delta_rule"):
            inputs.run(native_ops, wrong, metadata)
    with pytest.raises(ValueError, match="states"):
        inputs.run(native_ops, states, replace(metadata, rows=metadata.rows.int()))
    with pytest.raises(ValueError, match="causal_conv"):
        native_ops.causal_conv(random(2, 8), random(8, TAPS), torch.zeros(6, 2, 8), metadata)
    with pytest.raises(ValueError, match="delta_gates"):
        native_ops.delta_gates(random(2, 4, 1), random(2, 4), random(4), random(4), None)
    with pytest.raises(ValueError, match="gated_rms_norm"):
        native_ops.gated_rms_norm(random(2, 4, 8), random(2, 4, 8), random(4), 1e-6, "silu")
