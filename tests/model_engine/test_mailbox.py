"""Deltas that wait for a slow reader."""

from __future__ import annotations

import asyncio
import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.model_engine.replicas.mailbox import Mailbox
from atom.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

DELTA = st.builds(
    CompletionOutput,
    index=st.integers(0, 2),
    text=st.text("ab", max_size=3),
    token_ids=st.lists(st.integers(0, 9), max_size=3),
    cumulative_logprob=st.floats(-5, 0),
    logprobs=st.lists(st.just({1: Logprob(-1.0, 1, "a")}), max_size=2),
)


def request_output(*completions: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [1], list(completions), finished, RequestMetrics(0.0))


@settings(max_examples=50)
@given(st.lists(DELTA, min_size=1, max_size=10), st.sets(st.integers(0, 9)))
def test_merged_deltas_lose_nothing(deltas: list[CompletionOutput], reads: set[int]) -> None:
    async def read() -> list[CompletionOutput]:
        mailbox, taken = Mailbox(), []
        for i, delta in enumerate(deltas):
            mailbox.put(request_output(copy.deepcopy(delta)))
            if i in reads or i == len(deltas) - 1:
                output = await mailbox.take()
                indices = [completion.index for completion in output.outputs]
                assert indices == sorted(set(indices))
                taken += output.outputs
        return taken

    taken = asyncio.run(read())
    for index in range(3):
        sent = [delta for delta in deltas if delta.index == index]
        got = [delta for delta in taken if delta.index == index]
        assert "".join(d.text for d in got) == "".join(d.text for d in sent)
        assert [t for d in got for t in d.token_ids] == [t for d in sent for t in d.token_ids]
        assert sum(len(d.logprobs or []) for d in got) == sum(len(d.logprobs or []) for d in sent)
        assert [d.cumulative_logprob for d in got[-1:]] == [d.cumulative_logprob for d in sent[-1:]]


async def test_the_end_survives_merging() -> None:
    mailbox = Mailbox()
    mailbox.put(request_output(CompletionOutput(0, "a")))
    mailbox.put(request_output(CompletionOutput(0, "b", finish_reason="stop", stop_reason="x")))
    last = request_output(CompletionOutput(1, "c", finish_reason="length"), finished=True)
    last.prompt_logprobs = [None]
    mailbox.put(last)
    output = await mailbox.take()
    assert output.finished
    assert output.prompt_logprobs == [None]
    assert [(c.text, c.finish_reason, c.stop_reason) for c in output.outputs] == [
        ("ab", "stop", "x"),
        ("c", "length", None),
    ]


async def test_errors_overtake_deltas_but_not_the_end() -> None:
    mailbox = Mailbox()
    mailbox.put(request_output(CompletionOutput(0, "a")))
    mailbox.fail(RuntimeError("dead"))
    with pytest.raises(RuntimeError, match="dead"):
        await mailbox.take()
    mailbox = Mailbox()
    mailbox.put(request_output(CompletionOutput(0, "a"), finished=True))
    mailbox.fail(RuntimeError("dead"))
    assert (await mailbox.take()).finished
