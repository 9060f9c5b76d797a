"""Engines that see, and what all of their towers are held to: transformers' greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from multimodal.vision_checkpoints import VisionCheckpoint
from ranks import engines_of_threads
from spec_decode import engines

from atom import LLM, SamplingParams
from atom.kv_cache.base import KVCachePlan
from atom.messages import ImageInput, RequestRefusedError
from atom.model_engine.start_up import kv_memory
from atom.multimodal.items import expand

NEW_TOKENS = 8
Prompt = tuple[list[int], list[Any]]


def create(checkpoint: VisionCheckpoint, **overrides: Any) -> LLM:
    options = {
        "dtype": "float32",
        "block_size": 4,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "max_model_len": 160,
        "kv_cache_memory": "8MB",
        "num_threads": 1,
        **overrides,
    }
    return LLM(str(checkpoint.folder), **options)


def expanded(llm: LLM, prompt: Prompt) -> tuple[list[int], tuple[ImageInput, ...]]:
    processor = llm.engine.image_processor
    assert processor is not None
    items = [processor.process(image) for image in prompt[1]]
    return expand(prompt[0], items, processor.placeholder_id)


def generate(llm: LLM, given: list[Prompt], **params: Any) -> list[list[int]]:
    """The first output of each."""
    return [outputs[0] for outputs in generate_all(llm, given, **params)]


def generate_all(llm: LLM, given: list[Prompt], **params: Any) -> list[list[list[int]]]:
    sampling = SamplingParams(
        **{"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **params}
    )
    asked = [
        {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}
        for tokens, images in given
    ]
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    llm.engine.core.block_pool.check_integrity()
    return [[each.token_ids for each in output.outputs] for output in outputs]


class TowerInEngine:
    """Of a module with `tower`, `given` (prompts by name) and `draft` as fixtures.

    Attributes:
        plan: blocks that are too few for the prompts, and the longest sequence then.
    """

    plan: ClassVar[tuple[int, int]]

    @pytest.mark.parametrize("most", [1, 2, 5])
    def test_prompts_are_cut_anywhere(
        self,
        tower: VisionCheckpoint,
        given: dict[str, Prompt],
        answers: dict[str, list[int]],
        most: int,
    ) -> None:
        """Also where nothing of an image is kept from one step to the next."""
        options = {"max_num_batched_tokens": most, "max_num_seqs": 1}
        kept = {"mm_cache_memory": 0} if most == 2 else {}
        names = ["three between texts", "last"]
        with create(tower, **options, **kept, enable_prefix_caching=False) as llm:
            made = generate(llm, [given[name] for name in names])
            assert made == [answers[name] for name in names]
            stats = llm.engine.core.stats
            assert (stats.mm_cache_queries, stats.mm_cache_hits) == (4, 0)
            assert stats.num_replayed_decode_steps > 0

    def test_preempted_sequences(
        self,
        tower: VisionCheckpoint,
        given: dict[str, Prompt],
        answers: dict[str, list[int]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        blocks, max_model_len = self.plan
        monkeypatch.setattr(kv_memory, "plan_kv_cache", lambda *_: KVCachePlan(blocks, 0))
        names = ["one", "last", "three between texts", "none"]
        with create(tower, max_model_len=max_model_len, enable_prefix_caching=False) as llm:
            made = generate(llm, [given[name] for name in names])
            assert made == [answers[name] for name in names]
            assert llm.engine.core.stats.num_preemptions > 0

    @pytest.mark.parametrize("overlap", [False, True])
    def test_drafts_change_no_token(
        self,
        tower: VisionCheckpoint,
        given: dict[str, Prompt],
        answers: dict[str, list[int]],
        draft: str,
        overlap: bool,
        tmp_path: Path,
    ) -> None:
        speculation: dict[str, Any] = {"num_speculative_tokens": 3, "method": "suffix"}
        if draft != "suffix":
            speculation["method"] = engines.method_of(draft)
            vocab_size = tower.reference.config.text_config.vocab_size
            speculation["draft_model"] = str(engines.write_draft(draft, tmp_path, vocab_size))
        options = {"max_num_batched_tokens": 12, "max_num_seqs": 8, "overlap": overlap}
        with create(tower, **options, **speculation) as llm:
            for _ in range(2):
                assert generate(llm, list(given.values())) == list(answers.values())
            assert generate_all(llm, [given["one"]], n=2) == [[answers["one"]] * 2]

    def test_two_ranks(
        self, tower: VisionCheckpoint, given: dict[str, Prompt], answers: dict[str, list[int]]
    ) -> None:
        with engines_of_threads(), create(tower, tensor_parallel_size=2) as llm:
            assert generate(llm, list(given.values())) == list(answers.values())

    def test_without_a_tower(
        self, tower: VisionCheckpoint, given: dict[str, Prompt], answers: dict[str, list[int]]
    ) -> None:
        with create(tower, limit_mm_per_prompt={"image": 0}) as llm:
            names = [name for name, _ in llm.engine.core.executor.parts.model.named_parameters()]
            assert not any(name.startswith("vis") for name in names)
            assert generate(llm, [given["none"]]) == [answers["none"]]
            with pytest.raises(RequestRefusedError, match="loaded to read none"):
                generate(llm, [given["one"]])
