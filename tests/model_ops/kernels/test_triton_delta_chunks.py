"""The delta rule by chunks: the numbers of single tokens, the bits of other cuts on the grid."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from graphs.launch_count import Launches, count_triton
from model_ops.recurrent_batches import VERSIONS, Inputs, exact, join, metadata_of, pool
from op_cases import to
from work import count_lines

from atom.environment import triton_is_interpreted
from atom.model_ops.kernels.triton import delta_chunks, recurrent
from atom.model_ops.op_table.ops import OPS
from atom.model_ops.registry import OpQuery, OpTable
from atom.platform import Platform

CHUNK = recurrent.CHUNK
# Key heads, value heads, K, V and log decays of a value head.
GDN, KDA = (1, 2, 12, 20, 1), (1, 1, 16, 8, 16)
WIDE = [(2, 2, 70, 17, 70), (1, 3, 130, 40, 1)]  # a state in parts, the last of them cut
# Tokens of the steps of sequences that run together.
CUTS = [[1], [63, 2], [64], [65], [5, 59, 66], [127, 1]]


def near(stored: torch.dtype, device: torch.device) -> dict[str, float]:
    """A number between two of bfloat16 may become either; a GPU's products may round to 11 bits."""
    if stored is torch.bfloat16:
        return {"rtol": 0, "atol": 1e-2}
    return {"rtol": 1e-5, "atol": 2e-6} if device.type == "cpu" else {"rtol": 0, "atol": 2e-3}


def run_cut(
    inputs: list[Inputs], cuts: list[list[int]], states: torch.Tensor, ops: ModuleType
) -> list[torch.Tensor]:
    """The outputs of each sequence; sequence s is in row s."""
    outs: list[list[torch.Tensor]] = [[] for _ in cuts]
    for step in range(max(map(len, cuts))):
        running = [s for s, cut in enumerate(cuts) if step < len(cut)]
        parts = [(s, sum(cuts[s][:step]), cuts[s][step]) for s in running]
        given = join([inputs[s].part(start, start + count) for s, start, count in parts])
        metadata = to(metadata_of(*parts), states.device)
        out = given.to(states.device).run(ops, states, metadata)
        for (s, _, _), part in zip(parts, out.cpu().split([n for *_, n in parts]), strict=True):
            outs[s].append(part)
    return [torch.cat(parts) for parts in outs]


def compare(
    shape: tuple[int, ...], cuts: list[list[int]], stored: torch.dtype, device: torch.device
) -> None:
    """Outputs and all versions at the end with float64; nothing else is written."""
    inputs = [Inputs.random(shape, sum(cut), seed=10 * s) for s, cut in enumerate(cuts)]
    states = pool(shape, stored, rows=len(cuts) + 1).to(device)
    found = run_cut(inputs, cuts, states, delta_chunks)
    for row, (own, out) in enumerate(zip(inputs, found, strict=True)):
        wanted, after = exact(own)
        torch.testing.assert_close(out.double(), wanted, **near(stored, device))
        for p in range(max(0, len(out) - VERSIONS), len(out)):
            kept = states[row, p % VERSIONS].cpu().double()
            torch.testing.assert_close(kept, after[p], **near(stored, device))
    assert states[-1].isnan().all()


@pytest.mark.parametrize("shape", [GDN, KDA], ids=str)
def test_numbers_are_those_of_single_tokens(shape: tuple[int, ...], device: torch.device) -> None:
    compare(shape, CUTS, torch.float32, device)


def test_states_in_bfloat16(device: torch.device) -> None:
    compare(GDN, [[65, 64]], torch.bfloat16, device)


def test_states_in_parts(device: torch.device) -> None:
    compare(WIDE[0], [[64]], torch.float32, device)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [GDN, KDA, *WIDE], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_of_every_length(
    shape: tuple[int, ...], stored: torch.dtype, device: torch.device
) -> None:
    compare(shape, [[n] for n in (*range(1, 6), *range(60, 70), *range(125, 134))], stored, device)
    compare(shape, [[start, 136 - start] for start in range(1, 73, 3)], stored, device)
    compare(shape, [[37, 30, 131], [129, 3, 60, 64], [65, 64]], stored, device)


@pytest.mark.parametrize("shape", [GDN, KDA], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_cuts_on_the_grid_have_the_same_bits(
    shape: tuple[int, ...], stored: torch.dtype, device: torch.device
) -> None:
    """Chunks and the tokens behind the last of them, alone and beside decoding sequences."""
    whole, *cuts = [[134], [64, 70], [128, 2, 4]]
    inputs = [Inputs.random(shape, 134)] * len(cuts)
    alone, states = (pool(shape, stored).to(device) for _ in range(2))
    wanted = run_cut(inputs[:1], [whole], alone, delta_chunks)[0]
    for row, out in enumerate(run_cut(inputs, cuts, states, delta_chunks)):
        assert torch.equal(out, wanted)
        assert torch.equal(states[row].cpu(), alone[0].cpu())


@pytest.mark.parametrize("shape", [GDN, KDA], ids=str)
def test_decoding_has_the_bits_of_any_batch(shape: tuple[int, ...], device: torch.device) -> None:
    """Verification goes token by token, also beside a prompt that goes by chunks."""
    inputs = [Inputs.random(shape, 10), Inputs.random(shape, 70, seed=5)]
    alone, together = (pool(shape).to(device) for _ in range(2))
    wanted = run_cut(inputs[:1], [[1] * 10], alone, recurrent)[0]
    found = run_cut(inputs, [[6, 4], [70]], together, delta_chunks)[0]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("accepted", [0, VERSIONS - 2])
def test_drafts_that_end_a_chunk_may_be_rejected(accepted: int, device: torch.device) -> None:
    """The state behind each of a step's last tokens is kept, of chunks, too."""
    right, wrong = Inputs.random(KDA, 68), Inputs.random(KDA, VERSIONS, seed=9)
    states, start = pool(KDA).to(device), CHUNK - VERSIONS + 1 + accepted
    step = join((right.part(0, start), wrong.part(0, CHUNK - start)))
    step.to(device).run(delta_chunks, states, to(metadata_of((3, 0, CHUNK)), device))
    rest = right.part(start, 68).to(device)
    out = rest.run(delta_chunks, states, to(metadata_of((3, start, 68 - start)), device))
    wanted, _ = exact(right)
    torch.testing.assert_close(out.cpu().double(), wanted[start:], **near(torch.float32, device))


@pytest.mark.parametrize("shape", [GDN, KDA], ids=str)
def test_nothing_overflows_and_nothing_cancels(
    shape: tuple[int, ...], device: torch.device
) -> None:
    """Decays from none to total from token to token, and keys that are nearly the same, for which
    powers of A are large.
    """
    inputs = Inputs.random(shape, 2 * CHUNK)
    choice = torch.rand(inputs.log_decay.shape, generator=torch.Generator().manual_seed(0))
    inputs.log_decay[choice < 0.3] *= 1e-3
    inputs.log_decay[choice > 0.95] = -1e4
    inputs.log_decay[:CHUNK] = -1e-4
    inputs.k[:CHUNK] = inputs.k[:1] + 0.05 * inputs.k[:CHUNK]
    inputs.beta[:CHUNK] = 0.99
    states = pool(shape).to(device)
    out = inputs.to(device).run(delta_chunks, states, to(metadata_of((1, 0, 2 * CHUNK)), device))
    wanted, after = exact(inputs)
    limits = {"rtol": 1e-4, "atol": 2e-5} if device.type == "cpu" else {"rtol": 0, "atol": 2e-2}
    torch.testing.assert_close(out.cpu().double(), wanted, **limits)
    kept = states[1, (2 * CHUNK - 1) % VERSIONS].cpu().double()
    torch.testing.assert_close(kept, after[-1], **limits)


def test_padding_is_zeros_and_writes_nothing(device: torch.device) -> None:
    inputs = [Inputs.random(GDN, 80, seed=s) for s in (0, 1)]
    states = pool(GDN).to(device)
    metadata = to(metadata_of((2, 0, 80), (4, 0, 80), padding=(15, 80)), device)
    out = join(inputs).to(device).run(delta_chunks, states, metadata).cpu()
    wanted, _ = exact(inputs[0].part(0, 65))
    torch.testing.assert_close(out[:65].double(), wanted, **near(torch.float32, device))
    assert not out[65:].any()
    written = ~states.isnan().flatten(2).any(dim=2)
    assert written.nonzero().tolist() == [[2, version] for version in range(VERSIONS)]


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for decoding, three for prompts of any number and length."""
    seen, shape = Launches(), GDN
    for counts, names in (
        ([1, 4], ["_delta_rule"]),
        ([63], ["_delta_rule"]),
        ([64], ["_relate", "_walk_chunks", "_delta_rule"]),
        ([1, 500, 70], ["_relate", "_walk_chunks", "_delta_rule"]),
    ):
        metadata = metadata_of(*((row, 0, n) for row, n in enumerate(counts)))
        with monkeypatch.context() as patch:
            count_triton(seen, patch)
            Inputs.random(shape, sum(counts)).run(delta_chunks, pool(shape), metadata)
        assert seen.names == [f"triton {name}" for name in names]
        seen.names.clear()


@pytest.mark.skipif(not triton_is_interpreted(), reason="counts what the interpreter does")
def test_work_depends_on_new_tokens_alone() -> None:
    """Not on how many there were before."""
    shape = (1, 1, 16, 16, 1)
    inputs, states = Inputs.random(shape, CHUNK), torch.zeros_like(pool(shape))

    def lines(start: int, count: int) -> int:
        metadata, part = metadata_of((0, start, count)), inputs.part(0, count)
        return count_lines(lambda: part.run(delta_chunks, states, metadata))

    lines(0, CHUNK)  # what a first run makes
    assert lines(CHUNK, CHUNK) == lines(1000 * CHUNK, CHUNK)
    assert lines(CHUNK, 1) == lines(1000 * CHUNK, 1)


@pytest.mark.parametrize(
    ("arch", "dtype", "batch_invariant", "by_chunks"),
    [
        ("gfx942", torch.float32, False, True),
        ("gfx950", torch.bfloat16, False, True),
        ("gfx950", torch.bfloat16, True, False),
        ("sm90", torch.bfloat16, False, True),
        ("sm90", torch.float32, False, False),
    ],
)
def test_where_prompts_go_by_chunks(
    arch: str, dtype: torch.dtype, batch_invariant: bool, by_chunks: bool
) -> None:
    """Not where rows may not depend on their batch, nor where products would round much."""
    platform = Platform("cuda" if arch == "sm90" else "rocm", arch, True)
    table = OpTable(platform, OPS, batch_invariant)
    sizes = {"num_key_heads": 16, "num_heads": 32, "key_dim": 128, "value_dim": 128}
    op = delta_chunks if by_chunks else recurrent
    assert table.resolve("delta_rule", dtype, **sizes) is op.delta_rule


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="operands of delta_rule"):
        Inputs.random(GDN, 64).run(delta_chunks, pool(GDN)[:, :, :1], metadata_of((0, 0, 64)))
    query = OpQuery(Platform("rocm", "gfx942", True), torch.bfloat16, {"key_dim": 512})
    assert delta_chunks.refuses(query) == "key_dim=512 is larger than 256"
