"""Steps that are launched before the results of the last one are read give the same tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from model_engine.overlap_bench import (
    METHODS,
    PROMPTS,
    AnyDrafts,
    Checkpoints,
    KnowingProposer,
    Watched,
    check_blocks,
    check_wishes,
)
from spec_decode import engines
from spec_decode.engines import params
from transformers import PreTrainedTokenizerFast

from atom import SamplingParams
from atom.batch import ScheduledBatch
from atom.config import ConfigError
from atom.entrypoints.llm import GenerationError
from atom.graphs.capture import ReexecuteBackend
from atom.kv_cache.base import KVCachePlan
from atom.model_engine import worker
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.start_up import kv_memory
from atom.model_engine.step import planned_graphs
from atom.spec_decode import factory


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("overlap"), byte_level_tokenizer)


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("none", "greedy"),
        ("eagle3", "top-p"),
        ("peagle", "greedy"),
        ("dflash", "greedy"),
        ("mtp", "top-p"),
        ("suffix", "greedy"),
        ("lookup", "warm"),
        ("adaptive lookup", "greedy"),
    ],
)
def test_tokens_are_as_without(checkpoints: Checkpoints, method: str, setting: str) -> None:
    plain = checkpoints.plain(METHODS[method].get("method", "none"))
    expected = engines.generate(plain, params(setting), PROMPTS)
    assert engines.generate(checkpoints.ahead(method), params(setting), PROMPTS) == expected


@pytest.mark.parametrize("setting", ["greedy", "top-p"])
def test_graphs_read_what_the_last_step_left(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Its tokens and positions are written where the graphs were captured."""
    expected = engines.generate(checkpoints.plain("eagle3"), params(setting), PROMPTS)
    monkeypatch.setattr(planned_graphs, "capture_backend", lambda _: ReexecuteBackend())
    llm = checkpoints.engine("eagle3", overlap=True)
    watched = Watched(llm, monkeypatch)
    assert engines.generate(llm, params(setting), PROMPTS) == expected
    stats = llm.engine.core.stats
    assert stats.num_replayed_decode_steps == stats.num_decode_steps > stats.num_steps / 2
    assert stats.num_replayed_draft_steps == stats.num_draft_steps == stats.num_decode_steps
    assert all(s.is_ahead for s in watched.batches[-4].sequences)


@pytest.mark.parametrize("blocks", [None, 24])
def test_ragged_acceptance(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, blocks: int | None
) -> None:
    """Positions that the host guesses too high by 0 to 3 tokens, for each sequence its own."""
    expected = engines.generate(checkpoints.plain("none"), params("greedy"), PROMPTS)
    texts = [[*prompt, *outputs] for prompt, outputs in zip(PROMPTS, expected, strict=True)]
    monkeypatch.setattr(worker, "create_proposer", lambda *_: KnowingProposer(texts))
    options: dict[str, Any] = {}
    if blocks is not None:
        monkeypatch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(blocks, 0))
        options = {"max_model_len": 96, "max_num_seqs": 6}
    llm = checkpoints.engine("none", overlap=True, **options)
    watched = Watched(llm, monkeypatch)
    wishes = [params("greedy", max_tokens=24 - i) for i in range(len(PROMPTS))]
    wishes[1] = params("greedy", max_tokens=23, num_speculative_tokens=1)
    got = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, wishes, use_tqdm=False)]
    assert got == [tokens[: 24 - i] for i, tokens in enumerate(expected)]
    counts = llm.engine.core.stats.spec_decode
    assert 0.5 < counts.num_accepted_tokens / counts.num_draft_tokens < 0.9
    assert sum(s.is_ahead for batch in watched.batches for s in batch.sequences) > 40
    limited = [s.num_drafts for b in watched.batches for s in b.sequences if s.id[:2] == "1/"]
    assert max(limited) == 1
    check_blocks(llm)


@pytest.mark.parametrize("method", ["none", "eagle3", "adaptive", "suffix", "lookup"])
def test_requests_with_wishes_beside_others(checkpoints: Checkpoints, method: str) -> None:
    """Those that need the host wait for it; all give what they give without overlap."""
    plain = checkpoints.plain(METHODS[method].get("method", "none"))
    check_wishes(plain, checkpoints.ahead(method))


def test_numbers_of_drafts_are_chosen_ahead(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step verifies as many as the step before chose, and what it brings counts for that."""
    plain = checkpoints.plain("none")
    expected = engines.generate(plain, params("greedy"), PROMPTS)
    texts = [[*prompt, *outputs] for prompt, outputs in zip(PROMPTS, expected, strict=True)]
    monkeypatch.setattr(worker, "create_proposer", lambda *_: KnowingProposer(texts))
    monkeypatch.setattr(factory, "AdaptiveDrafts", AnyDrafts)
    llm = checkpoints.engine("adaptive", overlap=True)
    assert engines.generate(llm, params("greedy"), PROMPTS) == expected
    policy: Any = llm.engine.core.executor.parts.drafter._policy  # type: ignore[attr-defined]
    for number in range(len(policy.verified)):
        fit = policy.events.index(("fit", number))
        assert policy.events[fit + 1] == ("observe", number)
    middle = range(2, len(policy.verified) - 8)
    for number in middle:
        order = [policy.events.index(e) for e in (("choose", number + 1), ("fit", number))]
        assert order == sorted(order)
        # Each of the sequences that still run; none has come to its last tokens.
        sizes = {own.num_drafts for own in policy.verified[number]}
        assert sizes == {policy.chosen[number - 1].made}
    counts = llm.engine.core.stats.spec_decode
    seen = [own for verified in policy.verified for own in verified]
    assert sum(own.num_accepted for own in seen) == counts.num_accepted_tokens > 40
    assert sum(own.num_drafts for own in seen) == counts.num_draft_tokens
    check_wishes(plain, llm)


def test_a_step_takes_its_own_time(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the next one is computed before the results of the last one are read."""
    monkeypatch.setattr(factory, "AdaptiveDrafts", AnyDrafts)
    llm = checkpoints.engine("adaptive", overlap=True)
    watched = Watched(llm, monkeypatch)
    now = 0.0
    monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=lambda: now))

    def slow(_: ScheduledBatch, event: str) -> None:
        nonlocal now
        if event == "launch 5":
            now += 0.5

    watched.raises = slow
    engines.generate(llm, params("greedy", max_tokens=10), PROMPTS[:2])
    policy: Any = llm.engine.core.executor.parts.drafter._policy  # type: ignore[attr-defined]
    assert [n for n, seconds in enumerate(policy.seconds) if seconds] == [5]


def test_stop_strings_end_what_is_in_flight(checkpoints: Checkpoints) -> None:
    method = "none"
    whole = checkpoints.plain(method).generate(PROMPTS, params("warm"), use_tqdm=False)
    stops = [each.outputs[0].text[3:5] for each in whole]
    own = [params("warm", stop=[stop]) for stop in stops]
    expected, got = (
        [(o.outputs[0].text, o.outputs[0].stop_reason) for o in outputs]
        for outputs in (
            engine.generate(PROMPTS, own, use_tqdm=False)
            for engine in (checkpoints.plain(method), checkpoints.ahead(method))
        )
    )
    assert got == expected
    assert any(text != each.outputs[0].text for (text, _), each in zip(got, whole, strict=True))
    check_blocks(checkpoints.ahead(method))


def test_blocks_run_out(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preemptions and prefix hits, from a pool of blocks for three of the sequences."""
    expected = engines.generate(checkpoints.plain("eagle3"), params("warm"), PROMPTS)
    monkeypatch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(24, 0))
    llm = checkpoints.engine("eagle3", overlap=True, max_model_len=96, max_num_seqs=6)
    for _ in range(2):
        assert engines.generate(llm, params("warm"), PROMPTS) == expected
    assert llm.engine.core.stats.num_preemptions > 0


@pytest.mark.parametrize("method", ["none", "eagle3"])
def test_results_are_read_behind_the_next_launch(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Also where the sequence ends: found late, and its row is thrown away."""
    llm = checkpoints.ahead(method)
    watched = Watched(llm, monkeypatch)
    last = engines.generate(checkpoints.plain(method), params("warm"), PROMPTS[:1])[0][-9]
    ends = params("warm", ignore_eos=False, stop_token_ids=[last])
    (result,) = llm.generate(PROMPTS[:1], ends, use_tqdm=False)
    assert result.outputs[0].stop_reason == last
    events = watched.events
    assert events[:2] == ["launch 0", "launch 1"]
    for number in range(1, len(watched.batches) - 1):
        assert events.index(f"launch {number + 1}") < events.index(f"collect {number}")
    assert [s.is_ahead for batch in watched.batches for s in batch.sequences][1:] == [True] * (
        len(watched.batches) - 1
    )
    check_blocks(llm)


@pytest.mark.parametrize("when", ["launch", "collect"])
@pytest.mark.parametrize("method", ["none", "eagle3"])
def test_a_failure_blames_its_own_batch(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, method: str, when: str
) -> None:
    """Only the second prompt's own steps fail; the others lose nothing."""
    expected = engines.generate(checkpoints.plain(method), params("warm"), PROMPTS)
    llm = checkpoints.engine(method, overlap=True)
    watched = Watched(llm, monkeypatch)

    def raises(batch: ScheduledBatch, event: str) -> BaseException | None:
        # Those that compute its fifth output.
        fifth = len(PROMPTS[1]) + 4
        is_bad = any(
            s.id.startswith("1/") and s.start <= fifth < s.context_len for s in batch.sequences
        )
        return ValueError("bad") if is_bad and event.startswith(when) else None

    watched.raises = raises
    with pytest.raises(GenerationError, match="1 of 8 prompts failed; prompt 1") as caught:
        llm.generate(PROMPTS, params("warm"), use_tqdm=False)
    results = [r and r.outputs[0].token_ids for r in caught.value.results]
    assert results == [expected[0], None, *expected[2:]]
    check_blocks(llm)


@pytest.mark.parametrize("event", ["launch 4", "collect 4"])
def test_passing_trouble_and_interrupts_change_no_token(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    expected = engines.generate(checkpoints.plain("eagle3"), params("warm"), PROMPTS)
    llm = checkpoints.ahead("eagle3")
    with monkeypatch.context() as patch:
        watched = Watched(llm, patch)
        watched.raises = lambda _, at: OSError("oops") if at == event else None
        assert engines.generate(llm, params("warm"), PROMPTS) == expected
    with monkeypatch.context() as patch:
        watched = Watched(llm, patch)
        watched.raises = lambda _, at: KeyboardInterrupt() if at == event else None
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, params("warm"), use_tqdm=False)
    check_blocks(llm)
    assert engines.generate(llm, params("warm"), PROMPTS) == expected


def test_most_waiting_sequences_keep_to_one_group(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every other step a quarter of them would run; so nothing is launched ahead."""
    llm = checkpoints.ahead("none")
    watched = Watched(llm, monkeypatch)
    waits = params("greedy", bad_word_ids=[[7]], max_tokens=6)
    llm.generate(PROMPTS[:4], [waits, waits, waits, params("greedy", max_tokens=6)], use_tqdm=False)
    decoding = [len(b.sequences) for b in watched.batches if not b.new]
    assert decoding == [4] * 5
    assert not any(s.is_ahead for b in watched.batches for s in b.sequences)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "share experts"),
    ],
)
def test_what_cannot_overlap_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"overlap: .*{reason}.*; leave --overlap out"):
        engine_config(model="m", overlap=True, **options)


def test_a_cpu_does_not_overlap_by_itself(checkpoints: Checkpoints) -> None:
    assert checkpoints.plain("none").engine.core.executor.depth == 1
    assert checkpoints.engine("none", overlap=False).engine.core.executor.depth == 1
    assert checkpoints.ahead("none").engine.core.executor.depth == 2


def test_a_short_answer_beside_long_ones(checkpoints: Checkpoints) -> None:
    """Every way to end: at once, by length, by a token, while the next step runs."""
    own = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in range(1, 9)]
    plain, ahead = (
        [o.outputs[0].token_ids for o in engine.generate(PROMPTS, own, use_tqdm=False)]
        for engine in (checkpoints.plain("eagle3"), checkpoints.ahead("eagle3"))
    )
    assert ahead == plain
