"""`LLM` as users of vLLM write it."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import logging
import math
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spec_decode.engines import PROMPTS, create_engine, params

from atom import LLM, SamplingParams, StructuredOutput, StructuredOutputsParams
from atom.entrypoints import llm as llm_module
from atom.messages import EngineLimits, RequestRefusedError, check_request
from atom.model_engine.llm_engine import EngineAsleepError
from atom.structured_output.base import GrammarError
from atom.structured_output.xgrammar_import import import_xgrammar

DEFAULTS = {"temperature": 0.5, "top_p": 0.9}
USER = [{"role": "user", "content": "the quick fox"}]


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    with create_engine(tiny_llama_dir, override_generation_config=DEFAULTS) as made:
        yield made


def tokens(llm: LLM, prompt: list[int], **overrides: Any) -> list[int]:
    [output] = llm.generate([prompt], params("warm", **overrides), False)
    return output.outputs[0].token_ids


def test_parts_of_text_are_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "the quick "}, {"type": "text", "text": "fox"}]
    greedy = SamplingParams(temperature=0, max_tokens=4)
    [whole] = llm.chat(USER, greedy, False)
    [split] = llm.chat([{"role": "user", "content": parts}], greedy, False)
    assert split.prompt_token_ids == whole.prompt_token_ids
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(ValueError, match=r"messages\[0\].content\[1\] is of type 'image_url'"):
        llm.chat([{"role": "user", "content": [parts[0], image]}], greedy, False)


def test_templates_get_tools_and_variables(llm: LLM) -> None:
    template = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ mood }}"
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    one = SamplingParams(max_tokens=1)
    [output] = llm.chat(
        USER, one, False, None, template, tools=[tool], chat_template_kwargs={"mood": "up"}
    )
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == "lookup"


def test_defaults_are_the_models(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(**DEFAULTS)
    [output] = llm.generate([PROMPTS[0]], None, False)
    assert len(output.outputs[0].token_ids) <= 16
    endless = [llm.chat(USER, use_tqdm=False)[0].outputs[0] for _ in range(4)]
    assert max(len(completion.token_ids) for completion in endless) > 16


def test_prompts_in_either_way(llm: LLM) -> None:
    greedy = params("greedy")
    by_ids = llm.generate(prompt_token_ids=PROMPTS[:2], sampling_params=greedy, use_tqdm=False)
    by_prompt = llm.generate(PROMPTS[:2], greedy, False, None)
    assert [o.outputs[0].token_ids for o in by_ids] == [o.outputs[0].token_ids for o in by_prompt]
    assert all(o.outputs[0].finished() for o in by_ids)
    assert not next(llm.stream(PROMPTS[0], greedy)).outputs[0].finished()
    for wrong in ({}, {"prompts": ["a"], "prompt_token_ids": [[1]]}):
        with pytest.raises(TypeError, match="either prompts or prompt_token_ids"):
            llm.generate(**wrong)
    with pytest.raises(ValueError, match="adapters are not supported"):
        llm.generate(PROMPTS[:1], greedy, False, object())  # type: ignore[arg-type]


def test_another_progress_bar(llm: LLM) -> None:
    made: list[dict[str, Any]] = []

    def bar(**options: Any) -> Any:
        made.append(options)
        return llm_module.tqdm(**{**options, "disable": True})

    llm.generate(PROMPTS[:2], params("greedy"), bar)
    assert made[0]["total"] == 2


def test_parameters_by_place_and_changed_later(llm: LLM) -> None:
    given = SamplingParams(2, 0.1, 0.2, 1.1, 0.7, 0.9, 5, 0.05, 3, "x", [9], True, 7, 1, 4, 5)
    names = "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p"
    names += " seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs"
    wanted = [2, 0.1, 0.2, 1.1, 0.7, 0.9, 5, 0.05, 3, "x", [9], True, 7, 1, 4, 5]
    assert [getattr(given, name) for name in names.split()] == wanted
    changed = params("greedy")
    stream = llm.stream(PROMPTS[0], changed)
    next(stream)
    changed.max_tokens = 3
    assert sum(len(o.outputs[0].token_ids) for o in stream) == 23
    assert len(llm.generate([PROMPTS[0]], changed, False)[0].outputs[0].token_ids) == 3
    changed.temperature = -1.0
    with pytest.raises(ValueError, match=r"num_speculative_tokens must be a number, got 1\.5"):
        SamplingParams(num_speculative_tokens=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"temperature must be in \[0"):
        llm.generate([PROMPTS[0]], changed, False)


def test_structured_outputs(llm: LLM) -> None:
    wanted = StructuredOutputsParams(regex="[ab]{3}")
    made = SamplingParams(structured_outputs=wanted, temperature=0)
    assert made.structured_output == StructuredOutput.regex("[ab]{3}")
    text = llm.generate([PROMPTS[0]], made, False)[0].outputs[0].text
    assert len(text) == 3
    assert set(text) <= set("ab")
    schema = {"type": "object"}
    assert StructuredOutputsParams(schema).constraint() == StructuredOutput.json_schema(schema)
    assert StructuredOutputsParams(json_object=True).constraint() == StructuredOutput.json_object()
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
    for given in (tag, json.dumps(tag), tag["format"]):
        made = StructuredOutputsParams(structural_tag=given)
        assert made.constraint() == StructuredOutput.structural_tag(tag["format"])
    anything = StructuredOutputsParams(json={}, json_object=False)
    assert anything.constraint() == StructuredOutput.json_schema({})
    for wrong in ({}, {"regex": "a", "grammar": 'root ::= "a"'}, {"json": {}, "regex": "a"}):
        with pytest.raises(ValueError, match="takes exactly one of"):
            StructuredOutputsParams(**wrong)


def test_logprobs_of_the_whole_vocabulary(llm: LLM) -> None:
    size = llm.engine.core.limits.vocab_size
    asked = params("greedy", logprobs=-1, prompt_logprobs=-1, max_tokens=2)
    [output] = llm.generate([PROMPTS[0]], asked, False)
    positions = [*(output.outputs[0].logprobs or []), *(output.prompt_logprobs or [])[1:]]
    assert len(positions) == 2 + len(PROMPTS[0]) - 1
    for position in positions:
        assert position is not None
        assert len(position) == size
        assert sum(math.exp(p.logprob) for p in position.values()) == pytest.approx(1, abs=1e-4)
    limits = EngineLimits(
        max_model_len=64, num_blocks=9, block_size=16, vocab_size=size, max_logprobs=20
    )
    with pytest.raises(RequestRefusedError, match="logprobs=-1 exceeds the engine's max_logprobs"):
        check_request([1], SamplingParams(logprobs=-1), limits)


def test_the_prefix_cache_is_forgotten(llm: LLM) -> None:
    prompt = list(range(40, 70))
    tokens(llm, prompt)
    assert llm.generate([prompt], params("warm"), False)[0].num_cached_tokens > 0
    stream = llm.stream(prompt, params("warm"))
    next(stream)
    assert not llm.reset_prefix_cache()
    stream.close()
    assert llm.reset_prefix_cache()
    llm.engine.core.block_pool.check_integrity()
    assert llm.generate([prompt], params("warm"), False)[0].num_cached_tokens == 0


def test_metrics_count(llm: LLM) -> None:
    def generated() -> float:
        return {m.name: m.value for m in llm.get_metrics()}["atom:generation_tokens"]

    before = generated()
    tokens(llm, PROMPTS[0])
    assert generated() == before + 24
    assert {m.kind for m in llm.get_metrics()} == {"gauge", "counter"}


def test_sleeping_releases_the_weights(tiny_llama_dir: Path) -> None:
    llm = create_engine(tiny_llama_dir)
    expected = tokens(llm, PROMPTS[3])
    stream = llm.stream(PROMPTS[0], params("warm"))
    next(stream)
    with pytest.raises(RuntimeError, match="requests are unfinished"):
        llm.sleep()
    stream.close()
    weight = weakref.ref(next(llm.engine.core.executor.parts.model.parameters()))  # type: ignore[attr-defined]
    llm.sleep(level=2)
    gc.collect()
    assert weight() is None
    llm.sleep()
    for asleep in (lambda: tokens(llm, PROMPTS[3]), llm.get_metrics, llm.reset_prefix_cache):
        with pytest.raises(EngineAsleepError, match="call wake_up"):
            asleep()
    assert llm._mail == {}
    llm.wake_up()
    assert tokens(llm, PROMPTS[3]) == expected
    llm.wake_up()
    with pytest.raises(ValueError, match="level must be 1 or 2"):
        llm.sleep(3)


def test_the_embedded_model_speculates_like_the_server(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    monkeypatch.setattr(llm_module, "LLMEngine", built.append)
    LLM()
    LLM(no_speculation=True)
    LLM(method="suffix", num_speculative_tokens=2)
    LLM(str(tiny_llama_dir))
    methods = [None if c.speculative is None else c.speculative.method for c in built]
    assert methods == ["eagle3", None, "suffix", None]
    assert built[0].speculative.lookup
    assert built[0].speculative.adaptive


def test_a_release_that_is_known_to_be_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.9")
    with pytest.raises(GrammarError, match=r"xgrammar 0\.2\.9 is wrong .*; run: pip install"):
        import_xgrammar()


def test_missing_packages_are_said_at_the_start(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with caplog.at_level(logging.WARNING), create_engine(tiny_llama_dir) as llm:
        assert "structured output will be refused: xgrammar not installed" in caplog.text
        asked = params("greedy", ignore_eos=False, structured_output=StructuredOutput.json_object())
        with pytest.raises(RequestRefusedError, match="needs the xgrammar package"):
            llm.generate([PROMPTS[0]], asked, False)
