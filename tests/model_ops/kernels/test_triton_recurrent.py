"""Triton's ops of recurrent states: torch's numbers, and bits of any other cut of a sequence."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from model_ops.recurrent_batches import ROWS, VERSIONS, Inputs, join, metadata_of, pool
from op_cases import random, tensors, to

from atom.model_ops.kernels.torch import recurrent as torch_ops
from atom.model_ops.kernels.triton import recurrent as triton_ops
from atom.model_ops.registry import OpQuery
from atom.platform import Platform

# Key heads, value heads, K, V and log decays of a value head; K and V that fill no tile.
SHAPES = [(1, 2, 12, 20, 1), (1, 1, 16, 8, 16)]


def run(
    ops: ModuleType, inputs: Inputs, states: torch.Tensor, *parts: tuple[int, int, int]
) -> torch.Tensor:
    """On the device of the states."""
    device = states.device
    return inputs.to(device).run(ops, states, to(metadata_of(*parts), device))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_verification_has_the_bits_of_single_steps(
    shape: tuple[int, ...], stored: torch.dtype, device: torch.device
) -> None:
    """Behind a longer prompt than there are versions, with drafts of which some are rejected."""
    right = Inputs.random(shape, 12)
    alone, states = (pool(shape, stored).to(device) for _ in range(2))
    steps = [run(triton_ops, right.part(p, p + 1), alone, (0, p, 1)) for p in range(12)]
    wanted, at = torch.cat(steps), 0
    for count, drafts in ((6, 0), (1, 3), (3, 1), (2, 2)):
        given = join((right.part(at, at + count), Inputs.random(shape, drafts, seed=at)))
        other = right.part(0, 2)
        out = run(triton_ops, join((other, given)), states, (1, 0, 2), (5, at, count + drafts))
        assert torch.equal(out[2 : 2 + count], wanted[at : at + count])
        assert torch.equal(out[:2], wanted[:2])
        at += count
    check = run(torch_ops, right, pool(shape, stored), (0, 0, 12))
    # A number between two of bfloat16 may become either.
    near = {"rtol": 1e-5, "atol": 1e-6} if stored is torch.float32 else {"rtol": 0, "atol": 5e-3}
    torch.testing.assert_close(wanted.cpu(), check, **near)


@pytest.mark.parametrize("tokens", [2, 20], ids=["few tokens", "more than a ring"])
def test_convolution_of_steps_and_prompts(tokens: int, device: torch.device) -> None:
    """With padding, of which nothing is kept."""
    metadata = metadata_of((4, 9, tokens), (2, 0, 3), (0, 1, 3), padding=(1, 3, 0))
    x, weight = random(tokens + 6, 70), random(70, 4, seed=1)
    results = []
    for ops, where in ((torch_ops, torch.device("cpu")), (triton_ops, device)):
        ring = random(ROWS, 7, 70, seed=2)
        given = to(x, where), to(weight, where), to(ring, where), to(metadata, where)
        results.append(list(tensors((ops.causal_conv(*given), given[2]))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-8)


def test_padding_writes_nothing(device: torch.device) -> None:
    shape = SHAPES[0]
    states = pool(shape).to(device)
    inputs = Inputs.random(shape, 3 + 2 * VERSIONS).to(device)
    metadata = metadata_of((3, 0, 3), (1, 0, 2 * VERSIONS), padding=(1, 2 * VERSIONS))
    out = inputs.run(triton_ops, states, to(metadata, device))
    assert out[:2].any(dim=-1).all()
    assert not out[2:].any()
    written = ~states.isnan().flatten(2).any(dim=2)
    assert written.nonzero().tolist() == [[3, 0], [3, 1]]


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    shape = SHAPES[0]
    with pytest.raises(ValueError, match="operands of delta_rule"):
        run(triton_ops, Inputs.random(shape, 2), pool(shape)[:, :, :1].to(device), (0, 0, 2))
    x, ring = random(2, 8), random(6, 2, 8)
    with pytest.raises(ValueError, match="operands of causal_conv"):
        triton_ops.causal_conv(x, random(8, 4), ring, metadata_of((0, 0, 2)))
    query = OpQuery(Platform("rocm", "gfx942", True), torch.bfloat16, {"key_dim": 512})
    assert triton_ops.refuses_delta(query) == "key_dim=512 is larger than 256"
