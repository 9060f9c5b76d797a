"""Replayed steps equal eager ones, whatever mix of batches came before."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs.graph_bench import AUX, BOUNDS, QUERY_LENS, SIZES, Pair
from hypothesis import given, settings
from hypothesis import strategies as st
from models import checkpoints
from models.checkpoints import prompt

from atom.graphs.capture import GraphKey, GraphPlan, ReexecuteBackend
from atom.graphs.runner import GraphRunner
from atom.model_ops.attention.metadata import AttentionMetadata, ModelInput, ModelOutput
from atom.model_ops.op_table.ops import OPS

Make = Callable[..., checkpoints.Checkpoint]


@pytest.fixture(scope="module", params=["llama", "deepseek_v3", "llama in torch"])
def make_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds pairs of one checkpoint; `in torch` with the ops that a GPU runs as well."""
    folder = tmp_path_factory.mktemp("target")
    make: Make = checkpoints.llama if "llama" in request.param else checkpoints.deepseek_v3
    make(folder)
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in request.param:
            for op in OPS:
                patch.setenv(f"ATOM_OP_{op.upper()}", "torch")
        yield partial(Pair, folder)


def test_capture_writes_nothing(make_pair: Callable[[], Pair]) -> None:
    pair = make_pair()
    assert not any(pool.any() for pool in pair.graphed.pools.values())
    assert len(pair.runner.plan.keys) == len(SIZES) * len(BOUNDS) * len(QUERY_LENS)


def test_buckets_chosen(make_pair: Callable[[], Pair]) -> None:
    """Each step's graph; None runs eagerly."""
    pair = make_pair()
    one, three = [7], [7, 8, 9]
    steps: list[tuple[dict[str, list[int]], GraphKey | None]] = [
        ({"a": prompt(9), "b": prompt(4)}, None),  # prefill
        ({"a": one, "b": one}, GraphKey(2, 1, 16)),
        ({"a": three, "b": three}, GraphKey(2, 3, 16)),
        ({"a": one, "b": three}, GraphKey(2, 3, 16)),  # ragged: padded
        ({"b": three}, GraphKey(1, 3, 16)),
        ({"a": [1, 2]}, GraphKey(1, 3, 48)),  # 14 tokens and three rows
        ({"a": one}, GraphKey(1, 1, 48)),  # 17 tokens
        ({"a": three, "b": three, "c": three}, GraphKey(4, 3, 48)),  # a new prompt of three
        (dict.fromkeys("abcde", one), None),  # too many sequences
        ({"d": prompt(46)}, None),
        ({"d": one, "b": one}, GraphKey(2, 1, 48)),
        ({"d": one}, None),  # 49 tokens
    ]
    for tokens, expected in steps:
        pair.backend.replays.clear()
        pair.step(tokens)
        assert pair.backend.replays == ([] if expected is None else [expected]), tokens


def test_aux_hidden_states_are_slices_of_what_the_graph_keeps(
    make_pair: Callable[[], Pair],
) -> None:
    pair = make_pair()
    kept = pair.runner.graph_aux_hidden
    assert set(kept) == {(size, length) for size in SIZES for length in QUERY_LENS}
    for (size, length), states in kept.items():
        assert [tuple(s.shape) for s in states] == [(size * length, 48)] * len(AUX)
    names = "abc"
    pair.step({name: prompt(5, seed=i) for i, name in enumerate(names)})
    output = pair.step({name: [3, 4, 5] for name in names})
    for states, buffer in zip(output.aux_hidden_states, kept[4, 3], strict=True):
        assert states.shape == (9, 48)
        assert states.data_ptr() == buffer.data_ptr()
        assert torch.equal(states, buffer[:9])


def test_a_full_bucket_gives_the_same_bits(make_pair: Callable[[], Pair]) -> None:
    """With no padding and contexts as long as the bound, both do the same arithmetic."""
    pair = make_pair()
    pair.step({"a": prompt(13), "b": prompt(13, seed=1)})
    output = pair.step({"a": [4, 5, 6], "b": [7, 8, 9]})
    assert pair.backend.replays == [GraphKey(2, 3, 16)]
    assert pair.eager.output is not None
    assert torch.equal(output.hidden_states, pair.eager.output.hidden_states)
    for key, pool in pair.eager.pools.items():
        assert torch.equal(pair.graphed.pools[key], pool)


def test_replays_read_the_batch_and_not_the_capture(make_pair: Callable[[], Pair]) -> None:
    """Two batches of one bucket, then the first again: nothing of the second is left."""
    pair = make_pair()
    pair.step({"a": prompt(6), "b": prompt(7, seed=1), "c": prompt(5, seed=2)})
    first = pair.step({"a": [5], "b": [6], "c": [7]}).hidden_states.clone()
    pair.step({"c": [9], "a": [8]})
    pair.step({"b": [3]})
    for bench in (pair.eager, pair.graphed):
        for name, length in (("a", 6), ("b", 7), ("c", 5)):
            bench.rewind(name, length)
    again = pair.step({"a": [5], "b": [6], "c": [7]}).hidden_states
    torch.testing.assert_close(again, first, atol=0, rtol=0)


# Tokens of each sequence in one step; 0 leaves a sequence out.
STEPS = st.lists(
    st.one_of(
        st.lists(st.sampled_from([0, 1]), min_size=5, max_size=5),
        st.lists(st.sampled_from([0, 3]), min_size=5, max_size=5),
        st.lists(st.integers(0, 6), min_size=5, max_size=5),
    ).filter(any),
    min_size=3,
    max_size=8,
)


@settings(max_examples=12)
@given(STEPS, st.integers(0, 99))
def test_any_mix_of_batches(
    make_pair: Callable[[], Pair], steps: list[list[int]], seed: int
) -> None:
    pair = make_pair()
    rng = random.Random(seed)
    for counts in steps:
        names = [(name, count) for name, count in zip("abcde", counts, strict=True) if count]
        rng.shuffle(names)
        pair.step({name: [rng.randrange(3, 96) for _ in range(count)] for name, count in names})


def test_more_rows_than_launches_are_worth_have_no_graph() -> None:
    sizes, lens = (64, 256, 2048), (1, 4, 16)
    plan = GraphPlan(ReexecuteBackend(), sizes, (16, 48), lens, 4, torch.device("cpu"))
    pairs = {(key.batch_size, key.query_len) for key in plan.keys}
    assert pairs == {(2048, 1), (256, 1), (256, 4), (64, 1), (64, 4), (64, 16)}
    assert plan.largest == GraphKey(2048, 1, 48)
    assert len(plan.keys) == 2 * len(pairs)


def test_padding_repeats_the_last_token(tmp_path: Path) -> None:
    """So it visits no experts of its own: within a sequence, behind the batch, kept steps."""
    checkpoints.llama(tmp_path)
    pair = Pair(tmp_path)
    seen: list[ModelInput] = []
    forward = pair.runner.forward

    def watched(model_input: ModelInput) -> ModelOutput:
        seen.append(model_input)
        return forward(model_input)

    pair.runner.forward = watched
    pair.step({name: prompt(5, seed=i) for i, name in enumerate("abc")})
    pair.step({"a": [7, 8, 9], "b": [4], "c": [5, 6]})
    assert pair.backend.replays[-1] == GraphKey(4, 3, 16)
    assert seen[-1].input_ids.tolist() == [7, 8, 9, 4, 6, 6, 5, 6, 6, 6, 6, 6]
    assert seen[-1].positions.tolist() == [5, 6, 7, 5, 6, 6, 5, 6, 6, 6, 6, 6]
    slots, lens = seen[-1].attention.slot_mapping.tolist(), seen[-1].attention.context_lens.tolist()
    assert [slot >= 0 for slot in slots] == [True] * 4 + [False] * 2 + [True] * 2 + [False] * 4
    assert lens == [8, 8, 8, 3]
    padding = seen[-1].attention.padding_lens
    assert padding is not None
    # Of a sequence behind the batch, one key is read.
    assert padding.tolist() == [0, 2, 1, 2]
    for token in (3, 11):
        pair.step({"c": [token], "a": [5], "b": [token + 1]})
        assert seen[-1].input_ids.tolist() == [token, 5, token + 1, token + 1]
        assert seen[-1].positions[3] == seen[-1].positions[2]
        assert seen[-1].attention.padding_lens is None


def test_a_capture_computes_what_is_derived_from_its_metadata() -> None:
    """What a warm-up run derived would be stale at every replay."""
    plan = GraphPlan(ReexecuteBackend(), (2,), (16,), (1,), 4, torch.device("cpu"))
    lens = torch.ones(2, dtype=torch.int32)
    attention = AttentionMetadata(
        slot_mapping=torch.zeros(2, dtype=torch.int64),
        block_tables=torch.zeros(2, 4, dtype=torch.int32),
        block_counts=torch.ones(2, dtype=torch.int32),
        context_lens=lens,
        cu_seqlens_q=torch.arange(3, dtype=torch.int32),
        max_seqlen_q=1,
        max_context_len=16,
        query_lens_cpu=(1, 1),
        context_lens_cpu=None,
    )
    ids = torch.zeros(2, dtype=torch.int64)

    def forward(model_input: ModelInput) -> ModelOutput:
        metadata = model_input.attention
        twice = metadata.derive("twice", lambda: 2 * metadata.context_lens)
        return ModelOutput(twice[:, None].float())

    runner = GraphRunner(forward, plan)
    runner.capture(lambda _: lambda: ModelInput(ids, ids, replace(attention)))
    lens.copy_(torch.tensor([7, 9]))
    key = runner.fit(2, 1, 9)
    assert key is not None
    with torch.inference_mode():
        output = runner.replay(key, 2)
    assert output.hidden_states.tolist() == [[14], [18]]
