"""Grammars in the engine: obeyed at every row, the same with drafts, and compiled aside."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from spec_decode import engines
from spec_decode.engines import create_engine
from transformers import PreTrainedTokenizerFast

from atom import LLM, RequestOutput, SamplingParams, StructuredOutput
from atom.entrypoints.llm import GenerationError
from atom.kv_cache.base import KVCachePlan
from atom.messages import EngineRequest, FinishReason, RequestRefusedError
from atom.model_engine import compiled_grammars, grammar_queue
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.grammar_queue import GrammarQueue
from atom.model_engine.start_up import kv_memory
from atom.spec_decode.drafter import Drafter
from atom.spec_decode.factory import create_drafter
from atom.spec_decode.grammar import GrammarDrafts
from atom.stats import total
from atom.structured_output import state as grammar_state
from atom.structured_output.base import Grammar, GrammarError
from atom.structured_output.cache import GrammarCache
from atom.structured_output.trials.client import TrialProcess
from atom.structured_output.trials.compiler import TriedCompiler

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "color": {"enum": ["red", "green", "日本"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["ok", "color", "n"],
    "additionalProperties": False,
}
DOCUMENT = StructuredOutput.json_schema(SCHEMA)
CONSTRAINTS = [
    DOCUMENT,
    StructuredOutput.regex("[a-f]{3,9}-日本"),
    StructuredOutput.choice(["yes", "perhaps", "no"]),
    StructuredOutput.ebnf('root ::= "(" root ")" | "x"'),
    None,
]
PROMPTS = engines.PROMPTS[:10]
MAX_TOKENS = 40
# Drafts that are all made in one pass.
ONE_PASS = ["peagle", *engines.BLOCK_DRAFTS]
# Finite only with a text that its request forbids.
DEAD_END = StructuredOutput.ebnf('root ::= "abc" end | "~"\nend ::= end "d"')


LIMITS = ("_STEP_SECONDS", "_SECONDS")


@pytest.fixture(autouse=True)
def own_limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Those of a sequence's processor time, which a busy host adds to, are far away; returned."""
    limits = {name: getattr(grammar_state, name) for name in LIMITS}
    for name, seconds in limits.items():
        monkeypatch.setattr(grammar_state, name, 100 * seconds)
    return limits


def params(number: int, **overrides: Any) -> SamplingParams:
    wanted = CONSTRAINTS[number % len(CONSTRAINTS)]
    return SamplingParams(
        **{
            "temperature": 1.0,
            "seed": number,
            "max_tokens": MAX_TOKENS,
            "structured_output": wanted,
            **overrides,
        }
    )


def generate(engine: LLM, **overrides: Any) -> list[RequestOutput]:
    """One request for each prompt, the constraints in turn; every block must have come back."""
    each = [params(i, **overrides) for i in range(len(PROMPTS))]
    outputs = engine.generate(PROMPTS, each, use_tqdm=False)
    engine.engine.core.block_pool.check_integrity()
    assert engine.engine.core.block_pool.num_used == 0
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[o.token_ids for o in output.outputs] for output in outputs]


def check_obeyed(engine: LLM, outputs: list[RequestOutput]) -> None:
    """Every text is complete, or was cut and could have gone on."""
    core = engine.engine.core
    for number, output in enumerate(outputs):
        wanted = CONSTRAINTS[number % len(CONSTRAINTS)]
        if wanted is None:
            continue
        for o in output.outputs:
            matcher = core.executor.grammars.get(wanted).create_matcher()
            assert all(matcher.accept(t) for t in o.token_ids), o.text
            assert o.finish_reason in ("stop", "length")
            assert matcher.is_finished == (o.finish_reason == "stop"), o.text
            if wanted is DOCUMENT and o.finish_reason == "stop":
                assert set(json.loads(o.text)) == {"ok", "color", "n"}


class SharedTrials(TrialProcess):
    """The tests' own process, whichever engine asks."""

    def __init__(self, shared: TrialProcess) -> None:
        super().__init__(shared.limits)
        self.start = shared.start  # type: ignore[method-assign]
        self.submit = shared.submit  # type: ignore[method-assign]


@pytest.fixture(scope="module", autouse=True)
def shared_trials(trials: TrialProcess) -> Iterator[None]:
    """All engines here have one vocabulary; a process for each would take minutes in all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_grammars, "TrialProcess", partial(SharedTrials, trials))
        yield


class Targets:
    """Checkpoints and what they say without speculation, each made once."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        size = len(tokenizer) - 8
        drafts = (*engines.EAGLE_DRAFTS, *engines.BLOCK_DRAFTS)
        self.folder = engines.Folders(
            folder, tokenizer, {kind: {"draft_vocab_size": size} for kind in drafts}
        )
        self.speculation = self.folder.speculation
        self.expected = cache(self._expected)

    def _expected(self, kind: str) -> list[list[list[int]]]:
        engine = create_engine(self.folder(kind))
        outputs = generate(engine)
        check_obeyed(engine, outputs)
        return tokens(outputs)


@pytest.fixture(scope="module")
def targets(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Targets:
    return Targets(tmp_path_factory.mktemp("structured"), byte_level_tokenizer)


@pytest.fixture(scope="module")
def engine(targets: Targets) -> LLM:
    return create_engine(targets.folder("llama"))


@pytest.mark.parametrize(
    ("target", "draft", "k"),
    [
        *(("llama", "mha", k) for k in (1, 3, 7)),
        *(("llama", draft, 3) for draft in ONE_PASS),
        ("llama", "peagle", 1),
        ("llama", "suffix", 7),
        ("deepseek_v3", "mtp", 3),
    ],
)
def test_tokens_equal_those_without_speculation(
    targets: Targets, target: str, draft: str, k: int
) -> None:
    fast = create_engine(targets.folder(target), **targets.speculation(draft, k))
    assert tokens(generate(fast)) == targets.expected(target)
    stats = fast.engine.core.stats.spec_decode
    assert stats is not None
    assert stats.by_source["grammar"].tokens_per_forward > 2


@pytest.mark.parametrize("opens", ["<a", None])
def test_free_text_before_a_document_is_the_same_with_drafts(
    targets: Targets,
    engine: LLM,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    opens: str | None,
) -> None:
    """Between markers of several tokens, which the answer may begin itself, or the prompt has."""
    wanted = msgspec.structs.replace(DOCUMENT, starts_after="b.", opens_with=opens)
    likely, brace = (byte_level_tokenizer.convert_tokens_to_ids(list(t)) for t in ("b.", "{"))
    bias = {**dict.fromkeys(likely, 6.0), brace[0]: -100.0}
    sampled = [
        SamplingParams(seed=i, max_tokens=90, logit_bias=bias, structured_output=wanted)
        for i in range(4)
    ]
    expected = engine.generate(PROMPTS[:4], sampled, use_tqdm=False)
    texts = [output.outputs[0].text for output in expected]
    begun = [text for text in texts if opens is None or text.startswith(opens)]
    answers = [rest for text in begun for _, closed, rest in [text.partition("b.")] if closed]
    assert answers, texts
    assert all(rest.lstrip("\n").startswith("{") for rest in answers)
    assert any('"ok"' in rest for rest in answers)
    for k in (1, 3, 7):
        fast = create_engine(targets.folder("llama"), **targets.speculation("mha", k))
        assert tokens(fast.generate(PROMPTS[:4], sampled, use_tqdm=False)) == tokens(expected)


@pytest.mark.parametrize(
    ("target", "draft"), [("llama", "mha"), ("llama", "suffix"), ("deepseek_v3", "mtp")]
)
def test_drafts_made_before_the_tokens_are_known(
    targets: Targets, target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: grammars then see the drafts when these are made."""
    speculation = targets.speculation(draft, 3)

    def create(*args: Any, **options: Any) -> Drafter:
        return create_drafter(*args, **{**options, "sync_is_free": False})

    with engines.drafters_from(monkeypatch, create):
        fast = create_engine(targets.folder(target), **speculation)
    assert tokens(generate(fast)) == targets.expected(target)
    stats = fast.engine.core.stats.spec_decode
    assert stats is not None
    assert stats.by_source["grammar"].tokens_per_forward > 2


def test_grammars_bring_more_accepted_drafts(
    targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a random draft, of which nothing else can be accepted."""
    speculation = targets.speculation("mha", 3)
    gains = []
    for grammars in (False, True):
        with engines.drafters_from(monkeypatch, partial(create_drafter, grammars=grammars)):
            fast = create_engine(targets.folder("llama"), **speculation)
        constrained = [i for i in range(len(PROMPTS)) if CONSTRAINTS[i % len(CONSTRAINTS)]]
        sampled = [params(i) for i in constrained]
        outputs = fast.generate([PROMPTS[i] for i in constrained], sampled, use_tqdm=False)
        stats = total(o.spec_decode for o in outputs if o.spec_decode is not None)
        gains.append(stats.tokens_per_forward)
    assert gains[1] > 1.3 * gains[0]


@pytest.mark.parametrize("draft", ["mha", *ONE_PASS])
def test_drafts_within_the_grammar_are_accepted_more_often(
    targets: Targets, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random draft is right now and then where the grammar leaves few tokens, and else never."""
    accepted = []
    for guided in (True, False):
        with monkeypatch.context() as patch:
            if not guided:
                patch.setattr(GrammarDrafts, "guide", lambda *_: None)
            fast = create_engine(targets.folder("llama"), **targets.speculation(draft, 3))
            assert tokens(generate(fast)) == targets.expected("llama")
        stats = fast.engine.core.stats.spec_decode
        assert stats is not None
        accepted.append(stats.by_source[engines.method_of(draft)].num_accepted_tokens)
    assert accepted[0] >= accepted[1] + 5


@pytest.mark.parametrize("wrong", [False, True], ids=["oracle", "never"])
def test_drafts_that_all_count_or_none(
    targets: Targets, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole documents with their end tokens are accepted in steps of eight."""
    expected = targets.expected("llama")
    known = {tuple(p): t[0] for p, t in zip(PROMPTS, expected, strict=True)}
    with engines.drafters_from(monkeypatch, engines.oracle(known, 7, wrong)):
        fast = create_engine(targets.folder("llama"), method="suffix", num_speculative_tokens=7)
    assert tokens(generate(fast)) == expected
    stats = fast.engine.core.stats.spec_decode
    assert stats is not None
    assert (stats.num_accepted_tokens == 0) == wrong


def test_preempted_sequences_go_on(targets: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(24, 0))
    small = create_engine(
        targets.folder("llama"), max_model_len=96, method="suffix", num_speculative_tokens=3
    )
    assert tokens(generate(small)) == targets.expected("llama")
    assert small.engine.core.stats.num_preemptions > 0


def test_several_completions_and_cached_prefixes(targets: Targets, engine: LLM) -> None:
    for _ in range(2):
        outputs = generate(engine, n=3)
        check_obeyed(engine, outputs)
        assert [t[:1] for t in tokens(outputs)] == targets.expected("llama")
    assert any(len({tuple(t) for t in several}) > 1 for several in tokens(outputs))
    assert engine.engine.core.stats.prefix_cache_hits > 0


def test_penalties_and_greedy(engine: LLM) -> None:
    check_obeyed(engine, generate(engine, temperature=0.0, repetition_penalty=1.5))
    check_obeyed(engine, generate(engine, top_p=0.5, presence_penalty=1.0, logit_bias={7: 100}))


def test_min_tokens_yield_to_the_grammar(engine: LLM) -> None:
    """A complete text ends even then; one that may grow does."""
    short = SamplingParams(structured_output=StructuredOutput.choice(["a"]), min_tokens=8)
    grown = SamplingParams(structured_output=StructuredOutput.regex("a+"), min_tokens=8)
    first, second = engine.generate([PROMPTS[0]] * 2, [short, grown], use_tqdm=False)
    assert (first.outputs[0].text, first.outputs[0].finish_reason) == ("a", "stop")
    assert len(second.outputs[0].token_ids) >= 8


def test_stop_strings_end_a_text(engine: LLM) -> None:
    sampling = params(0, stop=['"color"'])
    [output] = engine.generate([PROMPTS[0]], sampling, use_tqdm=False)
    assert output.outputs[0].stop_reason == '"color"'
    assert '"ok"' in output.outputs[0].text


@pytest.mark.parametrize(
    "wanted", [StructuredOutput.ebnf("root ::= other"), StructuredOutput.ebnf('root ::= root "a"')]
)
def test_wrong_grammars_are_refused_at_once(engine: LLM, wanted: StructuredOutput) -> None:
    each = [SamplingParams(), SamplingParams(structured_output=wanted)]
    with pytest.raises(RequestRefusedError, match="structured_output") as error:
        engine.generate(PROMPTS[:2], each, use_tqdm=False)
    assert error.value.param == "structured_output"
    assert not engine.engine.has_unfinished


@pytest.mark.parametrize("k", [0, 3])
def test_dead_ends_end_their_request_alone(targets: Targets, k: int) -> None:
    speculation = {"method": "suffix", "num_speculative_tokens": k} if k else {}
    llm = create_engine(targets.folder("llama"), **speculation)
    core, forbidden = llm.engine.core, llm.engine.tokenizer.convert_tokens_to_ids("~")
    add(core, "dead", DEAD_END, bad_word_ids=[[forbidden]])
    add(core, "good", DOCUMENT)
    add(core, "free", None)
    ends, refused = run(core)
    assert refused.keys() == {"dead"}
    assert "allows no token of this model after" in refused["dead"]
    assert ends.keys() == {"good", "free"}
    assert core.block_pool.num_used == 0


def add(core: EngineCore, name: str, wanted: StructuredOutput | None, **more: Any) -> None:
    sampling = SamplingParams(max_tokens=16, seed=1, structured_output=wanted, **more)
    core.add_request(EngineRequest(id=name, prompt_token_ids=PROMPTS[0], params=sampling, seed=1))


def run(core: EngineCore) -> tuple[dict[str, FinishReason], dict[str, str]]:
    """Step until nothing is left: how sequences ended, and why others were refused."""
    ends, refused = {}, {}
    while core.has_work:
        report = core.step()
        ends |= {o.id: o.finish_reason for o in report.outputs if o.finish_reason is not None}
        refused |= {sequence.id: sequence.message for sequence in report.refused}
    return ends, refused


class GatedBackend:
    """Compiles when it is let to; grammars of choices fail."""

    def __init__(self, inner: Any) -> None:
        self.gate = threading.Event()
        self.compiled: list[StructuredOutput] = []
        self._inner = inner
        self.vocabulary = inner.vocabulary

    def compile(self, wanted: StructuredOutput) -> Grammar:
        assert self.gate.wait(60)
        self.compiled.append(wanted)
        if wanted.kind == "choice":
            raise GrammarError("no choices today")
        grammar: Grammar = self._inner.compile(wanted)
        return grammar


def compiler_of(core: EngineCore) -> TriedCompiler:
    compiler = core.executor.grammars._compiler
    assert isinstance(compiler, TriedCompiler)
    return compiler


def test_compilation_holds_up_nobody_else(engine: LLM) -> None:
    core = engine.engine.core
    core.executor.grammars.get(DOCUMENT)
    compiler = compiler_of(core)
    gated = GatedBackend(compiler._backend)
    compiler._backend = gated
    try:
        slow = StructuredOutput.regex("[xyz]{4}")
        for name in ("slow-1", "slow-2", "aborted"):
            add(core, name, slow)
        add(core, "failing", StructuredOutput.choice(["a", "b"]))
        add(core, "free", None)
        with pytest.raises(ValueError, match="already in use"):
            add(core, "slow-1", DOCUMENT)
        ended: set[str] = set()
        while "free" not in ended:
            report = core.step()
            ended |= {o.id for o in report.outputs if o.finish_reason is not None}
        assert ended == {"free"}
        assert core.has_work
        assert core.stats.num_waiting == 4
        assert core.step().outputs == []
        [aborted] = core.abort(["aborted"])
        assert (aborted.id, aborted.finish_reason) == ("aborted", FinishReason.ABORT)
        gated.gate.set()
        ends, refused = run(core)
        assert ends == dict.fromkeys(("slow-1", "slow-2"), FinishReason.STOP)
        assert refused == {"failing": "structured_output: no choices today"}
        assert gated.compiled.count(slow) == 1
        add(core, "failing", StructuredOutput.choice(["a", "b"]))
        assert run(core)[1].keys() == {"failing"}
        assert len(gated.compiled) == 2
    finally:
        compiler._backend = gated._inner


def test_a_grammar_that_takes_too_long_refuses_its_requests(
    engine: LLM, trials: TrialProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(grammar_queue, "time", SimpleNamespace(monotonic=lambda: now))
    gated = GatedBackend(compiler_of(engine.engine.core)._get_backend())
    grammars = GrammarCache(TriedCompiler(lambda: gated, trials))
    queue = GrammarQueue(grammars, compile_seconds=5)
    params = SamplingParams(structured_output=StructuredOutput.regex("a"))

    def waiting(name: str) -> EngineRequest:
        return EngineRequest(id=name, prompt_token_ids=[1], params=params, seed=0)

    queue.add(waiting("late"))
    now += 4.9
    assert queue.release(lambda request: pytest.fail(request.id)) == []
    now += 0.1
    [refused] = queue.release(lambda request: pytest.fail(request.id))
    assert (refused.id, refused.param) == ("late", "structured_output")
    assert "takes too long" in refused.message
    assert not queue.waiting
    gated.gate.set()
    admitted: list[str] = []
    queue.add(waiting("again"))
    grammars.get(StructuredOutput.regex("a"))
    queue.forget(["late"])
    assert queue.release(lambda request: admitted.append(request.id)) == []
    assert admitted == ["again"]


def test_a_grammar_that_gets_ever_slower_ends_its_own_sequence(
    targets: Targets, own_limits: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token of it takes about a third longer than the one before."""
    engine = create_engine(targets.folder("llama"))
    (letter,) = engine.engine.tokenizer.encode("a", add_special_tokens=False)
    for name, seconds in own_limits.items():
        monkeypatch.setattr(grammar_state, name, seconds)
    slow = SamplingParams(
        max_tokens=40,
        temperature=0,
        logit_bias={letter: 100},
        structured_output=StructuredOutput.regex("(a{0,300}){0,300}b"),
    )
    plain = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with pytest.raises(GenerationError, match="prompt 0: the grammar takes too long") as caught:
        engine.generate(["x", "y"], [slow, plain], use_tqdm=False)
    (expected,) = engine.generate(["y"], plain, use_tqdm=False)
    neighbour = caught.value.results[1]
    assert neighbour is not None
    assert neighbour.outputs[0].token_ids == expected.outputs[0].token_ids
