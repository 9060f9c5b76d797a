"""`LLM`: several callers at once, and errors of single requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spec_decode.engines import PROMPTS, create_engine, params

from atom import LLM, RequestOutput, SamplingParams, StructuredOutput
from atom.entrypoints.llm import GenerationError
from atom.messages import RequestRefusedError

# Its one finite text is forbidden.
DEAD_END = StructuredOutput.ebnf('root ::= "ab" end | "~"\nend ::= end "d"')
DEAD: dict[str, Any] = {"structured_output": DEAD_END, "bad_words": ["~"], "ignore_eos": False}


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> LLM:
    return create_engine(tiny_llama_dir)


def whole(llm: LLM, prompt: list[int], **overrides: Any) -> tuple[str, list[int]]:
    [output] = llm.generate([prompt], params("warm", **overrides), use_tqdm=False)
    return output.outputs[0].text, output.outputs[0].token_ids


def joined(outputs: list[RequestOutput]) -> tuple[str, list[int]]:
    completions = [output.outputs[0] for output in outputs]
    return "".join(c.text for c in completions), [t for c in completions for t in c.token_ids]


def test_streams_read_in_turns_do_not_mix(llm: LLM) -> None:
    expected = [whole(llm, prompt) for prompt in PROMPTS[:3]]
    streams = [llm.stream(prompt, params("warm")) for prompt in PROMPTS[:3]]
    got: list[list[RequestOutput]] = [[], [], []]
    for turn in range(100):
        # The second is read half as often, the third after all others.
        for number in [0, *([1] if turn % 2 else []), *([2] if turn > 60 else [])]:
            got[number] += [o for o in [next(streams[number], None)] if o is not None]
    assert [joined(outputs) for outputs in got] == expected
    for outputs in got:
        assert len({o.request_id for o in outputs}) == 1
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_suspended_stream_gets_what_others_computed(llm: LLM) -> None:
    expected = whole(llm, PROMPTS[0], logprobs=0)
    stream = llm.stream(PROMPTS[0], params("warm", logprobs=0))
    outputs = [next(stream)]
    assert whole(llm, PROMPTS[1], max_tokens=40)[1] != []
    steps_before = llm.engine.core.stats.num_generation_tokens
    # All that came meanwhile is one delta, and nothing is left to compute.
    outputs.append(next(stream))
    assert outputs[1].finished
    assert llm.engine.core.stats.num_generation_tokens == steps_before
    assert joined(outputs) == expected
    assert len(outputs[1].outputs[0].logprobs or []) == len(expected[1]) - 1
    with pytest.raises(StopIteration):
        next(stream)


def test_nothing_is_kept_of_requests_that_ended_or_were_left(llm: LLM) -> None:
    left = llm.stream(PROMPTS[0], params("warm"))
    next(left)
    left.close()
    list(llm.stream(PROMPTS[1], params("warm")))
    with pytest.raises(RequestRefusedError):
        next(llm.stream(PROMPTS[1] * 99, params("warm")))
    with pytest.raises(RequestRefusedError):
        llm.generate([PROMPTS[0], PROMPTS[1] * 99], params("warm"), use_tqdm=False)
    assert llm._mail == {}
    assert not llm.engine.has_unfinished
    assert llm.engine._processor.num_unfinished == 0


def test_a_refused_request_costs_the_others_nothing(llm: LLM) -> None:
    expected = [whole(llm, prompt) for prompt in PROMPTS[:3]]
    stream = llm.stream(PROMPTS[2], params("warm"))
    outputs = [next(stream)]
    sampling = [params("warm", **DEAD), params("warm")]
    with pytest.raises(GenerationError, match="1 of 2 prompts failed; prompt 0: the gramm") as e:
        llm.generate(PROMPTS[:2], sampling, use_tqdm=False)
    assert isinstance(e.value.__cause__, RequestRefusedError)
    assert e.value.errors[0].param == "structured_output"
    assert e.value.results[0] is None
    assert e.value.results[1] is not None
    assert joined([e.value.results[1]]) == expected[1]
    assert joined([*outputs, *stream]) == expected[2]


def test_a_refused_stream_ends_with_its_own_error(llm: LLM) -> None:
    bad = llm.stream(PROMPTS[0], params("warm", **DEAD))
    first = next(bad)
    # The error comes while another steps, and behind what was computed before it.
    expected = whole(llm, PROMPTS[1])
    rest = []
    with pytest.raises(RequestRefusedError, match="the grammar allows no token"):
        rest += list(bad)
    assert "ab".startswith(joined([first, *rest])[0])
    assert whole(llm, PROMPTS[1]) == expected


@pytest.mark.parametrize(
    ("prompt", "given", "error", "message"),
    [
        ("\ud800", {}, RequestRefusedError, "not valid Unicode"),
        ("a", {"sampling_params": {"temperature": 0}}, TypeError, "must be SamplingParams, got"),
        ("a", {"priority": ["x"]}, ValueError, "priority must be an integer"),
        ("a", {"priority": [2**70]}, ValueError, "priority must be an integer"),
    ],
)
def test_what_is_no_request_is_refused(
    llm: LLM, prompt: str, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate(prompt, use_tqdm=False, **given)
    assert llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished
