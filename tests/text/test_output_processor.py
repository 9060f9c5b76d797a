"""The output processor on hand-made engine outputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from atom.messages import EngineRequest, FinishReason, SequenceOutput, TokenLogprobs
from atom.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from atom.sampling_params import SamplingParams
from atom.stats import SpecDecodeCounter
from atom.text.observer import FinishedRequest
from atom.text.output_processor import OutputProcessor, child_seed
from atom.text.prepared_params import PreparedParams

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.first_tokens: list[float] = []
        self.tokens: list[tuple[int, bool]] = []
        self.finished: list[tuple[str, int, int]] = []
        self.metrics: list[RequestMetrics] = []

    def on_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        del num_prompt_tokens
        self.first_tokens.append(seconds)

    def on_tokens(self, num_tokens: int, seconds: float | None) -> None:
        self.tokens.append((num_tokens, seconds is None))

    def on_request_finished(self, request: FinishedRequest) -> None:
        self.metrics.append(request.metrics)
        counts = request.num_prompt_tokens, request.num_output_tokens
        self.finished.append((request.finish_reason, *counts))


class Harness:
    """A processor, its tokenizer and short ways to talk to it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int | None = 1) -> None:
        self.tokenizer = tokenizer
        self.observer = Recorder()
        self.processor = OutputProcessor(tokenizer, seed, self.observer)

    def ids(self, text: str) -> list[int]:
        """One token per byte, so that tests know where tokens begin."""
        return [self.tokenizer.convert_tokens_to_ids(_CHAR[byte]) for byte in text.encode()]

    def add(self, stream: bool = True, request_id: str = "r", **params: object) -> list[str]:
        return [request.id for request in self.requests(stream, request_id, **params)]

    def requests(
        self, stream: bool = True, request_id: str = "r", **params: object
    ) -> list[EngineRequest]:
        return self.processor.add_request(
            request_id, "prompt", [5, 6, 7], SamplingParams(**params), stream=stream
        )

    def step(
        self, sequence_id: str, text: str = "", reason: FinishReason | None = None, **extra: object
    ) -> RequestOutput | None:
        """One engine step for one sequence; `<eos>` at the end is the end token."""
        token_ids = self.ids(text.removesuffix("<eos>"))
        if text.endswith("<eos>"):
            token_ids.append(self.tokenizer.eos_token_id)
        output = SequenceOutput(id=sequence_id, token_ids=token_ids, finish_reason=reason, **extra)
        processed = self.processor.process([output])
        self.aborts = processed.aborts
        assert len(processed.outputs) <= 1
        return processed.outputs[0] if processed.outputs else None


_CHAR = {ord(" "): "Ġ", ord("\n"): "Ċ", **{b: chr(b) for b in range(0x21, 0x7F)}}
_CHAR.update({0xC3: "Ã", 0xA9: "©", 0xF0: "ð", 0x9F: "Ł", 0x98: "ĺ", 0x80: "Ģ"})


@pytest.fixture
def harness(byte_level_tokenizer: PreTrainedTokenizerFast) -> Harness:
    return Harness(byte_level_tokenizer)


def only(output: RequestOutput | None) -> CompletionOutput:
    assert output is not None
    assert len(output.outputs) == 1
    return output.outputs[0]


def test_stream_of_deltas(harness: Harness) -> None:
    (sequence_id,) = harness.add()
    first = harness.step(sequence_id, "Hel", num_cached_tokens=2, first_scheduled_time=3.5)
    assert first is not None
    assert (first.request_id, first.prompt, first.prompt_token_ids) == ("r", "prompt", [5, 6, 7])
    assert (first.num_cached_tokens, first.finished) == (2, False)
    assert first.metrics.first_scheduled_time == 3.5
    assert only(first).text == "Hel"
    assert only(first).token_ids == harness.ids("Hel")
    assert only(first).logprobs is None
    last = harness.step(sequence_id, "lo<eos>", STOP)
    assert last is not None
    assert last.finished
    assert only(last).text == "lo"
    assert only(last).token_ids[-1] == harness.tokenizer.eos_token_id
    assert (only(last).finish_reason, only(last).stop_reason) == ("stop", None)
    assert harness.processor.num_unfinished == 0
    assert harness.step(sequence_id, "late") is None  # unknown by now


def test_whole_result(harness: Harness) -> None:
    ids = harness.add(stream=False, n=2)
    assert harness.step(ids[1], "b1") is None
    assert harness.step(ids[0], "a1") is None
    assert harness.step(ids[1], "b2", LENGTH) is None
    output = harness.step(ids[0], "a2<eos>", STOP)
    assert output is not None
    assert output.finished
    assert [c.text for c in output.outputs] == ["a1a2", "b1b2"]
    assert [c.index for c in output.outputs] == [0, 1]
    assert [c.finish_reason for c in output.outputs] == ["stop", "length"]
    assert output.outputs[1].token_ids == harness.ids("b1b2")


def test_deltas_hold_only_what_changed(harness: Harness) -> None:
    ids = harness.add(n=3)
    output = harness.step(ids[2], "x")
    assert only(output).index == 2
    both = harness.processor.process(
        [SequenceOutput(id=ids[i], token_ids=harness.ids("y")) for i in (1, 0)]
    )
    assert [[c.index for c in output.outputs] for output in both.outputs] == [[0, 1]]
    for i in (0, 1):
        output = harness.step(ids[i], "", LENGTH)
        assert only(output).finish_reason == "length"
        assert output is not None
        assert not output.finished
    output = harness.step(ids[2], "z", LENGTH)
    assert only(output).text == "z"
    assert output is not None
    assert output.finished


def test_no_empty_delta(harness: Harness) -> None:
    (sequence_id,) = harness.add()
    assert harness.step(sequence_id) is None
    # A token without text is news (usage counts it); the text follows with its last byte.
    pieces = [
        only(harness.processor.process([SequenceOutput(id=sequence_id, token_ids=[t])]).outputs[0])
        for t in harness.ids("é")
    ]
    assert [(p.text, len(p.token_ids)) for p in pieces] == [("", 1), ("é", 1)]


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_steps(harness: Harness, include: bool) -> None:
    (sequence_id,) = harness.add(stop=["END", "\n\n"], include_stop_str_in_output=include)
    first = only(harness.step(sequence_id, "one E"))
    assert first.text == ("one E" if include else "one ")
    assert first.token_ids == harness.ids("one E")
    second = harness.step(sequence_id, "NDmore")
    assert second is not None
    assert second.finished
    assert only(second).text == ("ND" if include else "")
    assert only(second).token_ids == harness.ids("ND")  # tokens after the match are dropped
    assert (only(second).finish_reason, only(second).stop_reason) == ("stop", "END")
    assert harness.aborts == [sequence_id]
    assert harness.step(sequence_id, "more", LENGTH) is None


def test_held_back_text_comes_at_the_end(harness: Harness) -> None:
    (sequence_id,) = harness.add(stop="END")
    assert only(harness.step(sequence_id, "xEN")).text == "x"
    assert only(harness.step(sequence_id, "<eos>", STOP)).text == "EN"


def test_stop_string_in_the_engines_last_tokens(harness: Harness) -> None:
    (sequence_id,) = harness.add(stop="b")
    last = only(harness.step(sequence_id, "abc", LENGTH))
    assert (last.text, last.finish_reason, last.stop_reason) == ("a", "stop", "b")
    assert last.token_ids == harness.ids("ab")
    assert harness.aborts == []  # the engine has ended it itself
    assert harness.observer.finished == [("stop", 3, 2)]


def test_stop_string_respects_min_tokens(harness: Harness) -> None:
    (sequence_id,) = harness.add(stop="ab", min_tokens=4)
    last = only(harness.step(sequence_id, "ababab"))
    assert (last.text, last.token_ids) == ("ab", harness.ids("abab"))


def test_stop_token(harness: Harness) -> None:
    (newline,) = harness.ids("\n")
    for include, text in ((False, "a"), (True, "a\n")):
        (sequence_id,) = harness.add(stop_token_ids=[newline], include_stop_str_in_output=include)
        last = only(harness.step(sequence_id, "a\n", STOP, stop_reason=newline))
        assert last.text == text
        assert last.token_ids == harness.ids("a\n")
        assert (last.finish_reason, last.stop_reason) == ("stop", newline)


@pytest.mark.parametrize(
    ("text", "stop", "expected", "reason"),
    [
        ("a\n<eos>", "\n<|im_end|>", "a", "\n<|im_end|>"),
        ("ab<eos>", "\n<|im_end|>", "ab", None),
        ("a\nb\n<eos>", "\n<|im_end|>", "a\nb", "\n<|im_end|>"),
        ("foo<eos>", "foo<|im_end|>bar", "foo", None),
        ("foo<eos>", "end|>", "foo", None),
        ("foo<eos>", "<|im_end|>", "foo", "<|im_end|>"),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_that_hold_more_than_an_end_token(
    harness: Harness, include: bool, text: str, stop: str, expected: str, reason: str | None
) -> None:
    """They match where they end with it, and its text is otherwise left out."""
    for size in range(len(text) - 4):
        (sequence_id,) = harness.add(stop=[stop], include_stop_str_in_output=include)
        first = harness.step(sequence_id, text[:size]) if size else None
        last = only(harness.step(sequence_id, text[size:], STOP))
        whole = (only(first).text if first is not None else "") + last.text
        shows_end = include and "<|im_end|>" in stop
        assert whole == (text.replace("<eos>", "<|im_end|>") if shows_end else expected)
        assert (last.finish_reason, last.stop_reason) == ("stop", reason)


def test_end_token_is_no_text_even_when_special_tokens_show(harness: Harness) -> None:
    (sequence_id,) = harness.add(skip_special_tokens=False)
    assert only(harness.step(sequence_id, "a<eos>")).text == "a<|im_end|>"  # under ignore_eos
    assert only(harness.step(sequence_id, "b<eos>", STOP)).text == "b"


def test_broken_character_at_the_end(harness: Harness) -> None:
    (sequence_id,) = harness.add(stop="\ufffd")
    token_ids = harness.ids("a😀")[:3]
    processed = harness.processor.process(
        [SequenceOutput(id=sequence_id, token_ids=token_ids, finish_reason=LENGTH)]
    )
    last = only(processed.outputs[0])
    assert (last.text, last.finish_reason, last.stop_reason) == ("a", "stop", "\ufffd")


def logprobs_of(token_ids: list[int]) -> list[TokenLogprobs]:
    """The chosen token is the second most likely, after token 9."""
    return [TokenLogprobs([t, 9], [-2.0, -0.5], [2, 1]) for t in token_ids]


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs(harness: Harness, stream: bool) -> None:
    (sequence_id,) = harness.add(stream=stream, logprobs=1, prompt_logprobs=1, stop="c")
    text = harness.processor.vocabulary.token_text
    prompt_logprobs = [None, *logprobs_of([6, 7])]
    ids = harness.ids("ab")
    first = harness.step(
        sequence_id, "ab", logprobs=logprobs_of(ids), prompt_logprobs=prompt_logprobs
    )
    last = harness.step(sequence_id, "cd", logprobs=logprobs_of(harness.ids("cd")))
    assert last is not None
    holder = first if stream else last
    assert holder is not None
    assert holder.prompt_logprobs == [
        None,
        {6: Logprob(-2.0, 2, text(6)), 9: Logprob(-0.5, 1, text(9))},
        {7: Logprob(-2.0, 2, text(7)), 9: Logprob(-0.5, 1, text(9))},
    ]
    if stream:
        assert last.prompt_logprobs is None
        assert only(first).cumulative_logprob == -4.0
        assert len(only(first).logprobs or ()) == 2
    logprobs = only(last).logprobs
    assert logprobs is not None
    assert [next(iter(position)) for position in logprobs] == only(last).token_ids
    assert logprobs[-1][harness.ids("c")[0]] == Logprob(-2.0, 2, "c")
    assert len(logprobs) == (1 if stream else 3)  # those of dropped tokens are dropped
    assert only(last).cumulative_logprob == -6.0


def test_missing_logprobs_are_an_error(harness: Harness) -> None:
    (sequence_id,) = harness.add(logprobs=0)
    with pytest.raises(ValueError, match="2 tokens with 0 logprobs"):
        harness.step(sequence_id, "ab")


def test_engine_requests(harness: Harness) -> None:
    requests = harness.requests(n=3, seed=17, prompt_logprobs=2, stop=["x", "\ud800"])
    assert len({request.id for request in requests}) == 3
    assert [request.params.prompt_logprobs for request in requests] == [2, None, None]
    assert [request.seed for request in requests] == [17, child_seed(17, 1), child_seed(17, 2)]
    assert all(request.params.stop is None for request in requests)
    assert all(request.arrival_time > 0 for request in requests)


def test_seeds(byte_level_tokenizer: PreTrainedTokenizerFast) -> None:
    assert child_seed(-5, 0) == -5
    seeds = {child_seed(seed, i) for seed in (-(2**63), 0, 1, 2**63 - 1) for i in range(128)}
    assert len(seeds) == 4 * 128
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert child_seed(0, 1) == 9221934688551543782  # documented: must never change

    def drawn(engine_seed: int | None) -> list[int]:
        harness = Harness(byte_level_tokenizer, engine_seed)
        return [r.seed for name in "ab" for r in harness.requests(request_id=name, n=4)]

    assert drawn(3) == drawn(3)
    assert drawn(None) != drawn(None)
    assert len(set(drawn(None))) == 8


def test_ids_do_not_collide(harness: Harness) -> None:
    names = ["a", "a/0", "a/1", "a/0/0"]
    ids = [i for name in names for i in harness.add(request_id=name, n=2)]
    assert len(set(ids)) == 8
    with pytest.raises(ValueError, match="unfinished"):
        harness.add(request_id="a")


def test_abort(harness: Harness) -> None:
    ids = harness.add(n=3)
    harness.step(ids[0], "done", LENGTH)
    assert harness.processor.abort("r") == [ids[1], ids[2]]
    assert harness.processor.num_unfinished == 0
    assert harness.processor.unfinished_sequence_ids == []
    assert harness.step(ids[1], "late") is None
    assert harness.processor.abort("r") == []
    assert harness.observer.finished == [("abort", 3, 4)]


def test_a_request_that_starts_again_warns_of_no_drafts(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """That is the engine's, which sees those of all requests."""
    harness.add()
    harness.processor.restart("r")
    (state,) = harness.processor._requests.values()
    state.spec_decode.count(3, 0, "eagle3", 100_000)
    assert not caplog.records
    SpecDecodeCounter().count(3, 0, "eagle3", 100_000)
    assert caplog.records


def test_engine_side_abort_flushes(harness: Harness) -> None:
    (sequence_id,) = harness.add(stop="END")
    assert only(harness.step(sequence_id, "aE")).text == "a"
    last = only(harness.step(sequence_id, "", ABORT))
    assert (last.text, last.finish_reason) == ("E", "abort")


def test_metrics_and_observer(harness: Harness) -> None:
    ids = harness.add(n=2)
    harness.step(ids[0], "ab", first_scheduled_time=7.0, num_cached_tokens=1)
    harness.step(ids[1], "c", first_scheduled_time=8.0, num_cached_tokens=3, num_preemptions=1)
    harness.step(ids[0], "d", num_preemptions=2)
    harness.step(ids[0], "e<eos>", STOP, num_preemptions=2)
    output = harness.step(ids[1], "f", LENGTH, num_preemptions=1)
    assert output is not None
    metrics = output.metrics
    assert (metrics.first_scheduled_time, metrics.num_preemptions) == (7.0, 3)
    assert output.num_cached_tokens == 1
    assert metrics.first_token_time is not None
    assert metrics.last_token_time is not None
    assert metrics.finished_time is not None
    assert (
        metrics.arrival_time
        <= metrics.first_token_time
        <= metrics.last_token_time
        <= metrics.finished_time
    )
    observer = harness.observer
    assert observer.first_tokens == [metrics.time_to_first_token]
    assert observer.tokens == [(2, True), (1, True), (1, False), (2, False), (1, False)]
    assert observer.finished == [("stop", 3, 7)]
    assert observer.metrics == [metrics]


@settings(max_examples=100)
@given(
    text=st.text("ab \né😀", max_size=40),
    stops=st.lists(st.text("ab \né", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=6),
    ended=st.booleans(),
)
def test_result_does_not_depend_on_the_steps(
    byte_level_tokenizer: PreTrainedTokenizerFast,
    text: str,
    stops: list[str],
    sizes: list[int],
    ended: bool,
) -> None:
    """Deltas in steps of any size add up to the result of one step."""
    harness = Harness(byte_level_tokenizer)
    token_ids = harness.ids(text)
    eos = [byte_level_tokenizer.eos_token_id] if ended else []

    def run(name: str, sizes: list[int], stream: bool) -> tuple[object, ...]:
        (sequence_id,) = harness.add(stream=stream, request_id=name, stop=stops)
        steps, start, deltas = itertools.cycle(sizes), 0, []
        while not deltas or deltas[-1].finish_reason is None:
            size = next(steps)
            chunk, start = token_ids[start : start + size], start + size
            done = start >= len(token_ids)
            output = SequenceOutput(
                id=sequence_id,
                token_ids=chunk + (eos if done else []),
                finish_reason=None if not done else STOP if ended else LENGTH,
            )
            deltas += [only(o) for o in harness.processor.process([output]).outputs]
        return (
            "".join(delta.text for delta in deltas),
            [t for delta in deltas for t in delta.token_ids],
            deltas[-1].finish_reason,
            deltas[-1].stop_reason,
        )

    whole = run("whole", [len(token_ids) + 1], False)
    assert run("stream", sizes, True) == whole
    assert run("late", sizes, False) == whole
    assert harness.processor.num_unfinished == 0


def test_a_text_can_be_ended_from_outside(harness: Harness) -> None:
    """As by a stop string: tokens behind the one that ends it are dropped."""

    def create_end() -> Callable[[str], bool]:
        seen = ""

        def is_end(text: str) -> bool:
            nonlocal seen
            seen += text
            return seen.count("b") == 2

        return is_end

    params = PreparedParams(SamplingParams(n=2), create_end)
    first, second = harness.processor.add_request("r", "prompt", [5], params, stream=True)
    assert only(harness.step(first.id, "ab")).finish_reason is None
    last = only(harness.step(first.id, "cbd"))
    assert (last.text, last.token_ids) == ("cb", harness.ids("cb"))
    assert (last.finish_reason, last.stop_reason) == ("stop", None)
    assert harness.aborts == [first.id]
    assert only(harness.step(second.id, "bab", LENGTH)).finish_reason == "stop"


def special(harness: Harness, token: str) -> int:
    token_id = harness.tokenizer.convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id


@pytest.mark.parametrize("stop", ["<|im_start|>", "b<|im_start|>u"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_spell_a_special_token(
    harness: Harness, stop: str, include: bool
) -> None:
    """Though special tokens are left out of texts."""
    (sequence_id,) = harness.add(stop=[stop], include_stop_str_in_output=include)
    ids = [*harness.ids("ab"), special(harness, "<|im_start|>"), *harness.ids("user")]
    output = SequenceOutput(id=sequence_id, token_ids=ids, finish_reason=None)
    processed = harness.processor.process([output])
    done = only(processed.outputs[0])
    assert (done.finish_reason, done.stop_reason) == ("stop", stop)
    assert (
        done.text == "ab<|im_start|>user"[: "ab<|im_start|>user".find(stop) + include * len(stop)]
    )
    assert processed.aborts == [sequence_id]


def test_an_end_token_may_be_a_stop_string(harness: Harness) -> None:
    end = harness.tokenizer.eos_token
    for include, text in ((False, "ab"), (True, f"ab{end}")):
        (sequence_id,) = harness.add(stop=[end], include_stop_str_in_output=include)
        done = only(harness.step(sequence_id, "ab<eos>", STOP))
        assert (done.text, done.finish_reason, done.stop_reason) == (text, "stop", end)


def test_special_tokens_that_no_stop_string_spells_stay_out(harness: Harness) -> None:
    (sequence_id,) = harness.add(stop=["x"])
    ids = [*harness.ids("a"), special(harness, "<|im_start|>"), *harness.ids("b")]
    output = SequenceOutput(id=sequence_id, token_ids=ids, finish_reason=LENGTH)
    assert only(harness.processor.process([output]).outputs[0]).text == "ab"
