"""Engines whose ranks hold whole experts generate what one of a single rank does."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.coupled import add, coupled_config, on_coupled, serve
from models import checkpoints
from patience import PATIENCE_SECONDS
from quantised import test_fp8
from quantised.compressed import FORMATS
from quantised.packing import Packed, quantised
from ranks import Ranks, engines_of_threads
from spec_decode.engines import (
    HIDDEN,
    PROMPTS,
    create_engine,
    generate,
    params,
    write_draft,
    write_target,
)
from transformers import PreTrainedTokenizerFast

from atom import LLM
from atom.config import ConfigError
from atom.distributed.parallel_state import ParallelGroup, ParallelGroups
from atom.messages import EngineDeadError
from atom.model_engine.engine_core import EngineCore
from atom.model_engine.expert_ranks import check_experts
from atom.model_engine.step.input_builder import InputBuilder
from atom.model_engine.worker import Worker
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.moe import FusedMoE
from atom.platform import Platform

MTP = {"method": "mtp", "num_speculative_tokens": 3}
# Prompts are longer than a step, and two have the same first blocks.
CHUNKED = {"max_num_batched_tokens": 16, "enable_prefix_caching": True}
SHARED = [PROMPTS[9][:13] + PROMPTS[i][:3] for i in range(2)]
REQUESTS = [PROMPTS[9], PROMPTS[4], PROMPTS[12], *SHARED]


@dataclass(frozen=True)
class Target:
    """A checkpoint, how to draft for it, and what one rank generates."""

    folder: Path
    speculation: dict[str, Any]
    alone: dict[str, list[list[int]]]


def of_experts(pack: Any) -> Any:
    def packed(module: str, out: int, columns: int) -> Packed | None:
        return pack(module, out, columns) if ".experts." in module else None

    return packed


def write(name: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> tuple[Path, dict]:
    family, _, form = name.partition(" ")
    plain = folder / "plain"
    if family == "deepseek":
        write_target("deepseek_v3", plain, tokenizer)
        speculation: dict[str, Any] = MTP
        plain_parts = ("self_attn", "mlp.shared_experts", "eh_proj", "shared_head.head")
        kept = [f"model.layers.{i}.{part}" for i in range(5) for part in plain_parts]
        settings = test_fp8.BLOCKS | {"modules_to_not_convert": ["model.layers.0.mlp", *kept]}
        pack = test_fp8.pack_blocks()
    else:
        checkpoints.kimi_k2(plain, vocab_size=len(tokenizer), hidden_size=HIDDEN + 16 * bool(form))
        tokenizer.save_pretrained(plain)
        draft = write_draft("mla", folder / "draft", len(tokenizer)) if not form else None
        eagle = {"method": "eagle3", "draft_model": str(draft), "num_speculative_tokens": 3}
        speculation = eagle if draft else {}
        settings, pack = FORMATS["int4 channel"]
        settings = settings | {"ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "lm_head"]}
        settings["ignore"].append(r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")
    if form:
        return quantised(plain, settings, of_experts(pack))[0], speculation
    return plain, speculation


def cases(layouts: list[Any], fast: dict[str, Any]) -> list[Any]:
    """Every target in every layout; `fast` has those that always run."""
    return [
        pytest.param(
            name,
            layout,
            marks=() if fast.get(name) == layout else pytest.mark.slow,
            id=f"{name} {layout}",
        )
        for name in ("deepseek", "kimi", "deepseek fp8", "kimi int4")
        for layout in layouts
    ]


@pytest.fixture(scope="module")
def target(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> Target:
    root = tmp_path_factory.mktemp("target")
    folder, speculation = write(request.param, root, byte_level_tokenizer)
    with create_engine(folder) as engine:
        alone = {setting: run(engine, setting) for setting in ("greedy", "top-p")}
    return Target(folder, speculation, alone)


def run(engine: LLM, setting: str) -> list[list[int]]:
    return generate(engine, params(setting, max_tokens=12), REQUESTS)


@pytest.mark.parametrize(
    ("target", "size"),
    cases([2, 4], {"deepseek": 2, "kimi": 4, "kimi int4": 2}),
    indirect=["target"],
)
def test_ranks_of_one_engine(target: Target, size: int) -> None:
    options = {"tensor_parallel_size": size, "enable_expert_parallel": True}
    with (
        engines_of_threads(),
        create_engine(target.folder, **options, **target.speculation, **CHUNKED) as engine,
    ):
        for setting in target.alone if size == 2 else ("greedy",):
            assert run(engine, setting) == target.alone[setting]


@pytest.mark.parametrize(
    ("target", "layout"),
    cases([(2, 1), (2, 2), (4, 1)], {"deepseek": (2, 1), "kimi": (2, 2), "deepseek fp8": (2, 1)}),
    indirect=["target"],
)
def test_engines_share_experts(target: Target, layout: tuple[int, int]) -> None:
    """They end at different times; the last one has nothing at first, then all."""
    engines, size = layout
    config = coupled_config(
        target.folder, engines, tensor_parallel_size=size, **target.speculation, **CHUNKED
    )

    def use(index: int, core: EngineCore) -> list[list[int]]:
        if index < engines - 1:
            add(core, REQUESTS[index:], params("greedy", max_tokens=12))
        first = serve(core)
        if index == engines - 1:
            add(core, REQUESTS, params("top-p", max_tokens=12))
        return first + serve(core)

    *others, last = on_coupled(config, use)
    for index, tokens in enumerate(others):
        assert tokens == target.alone["greedy"][index:]
    assert last == target.alone["top-p"]


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> Path:
    return write_target("deepseek_v3", tmp_path_factory.mktemp("target"), byte_level_tokenizer)


def test_failures_stay_with_their_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While inputs are built and while a token is chosen; the other engine goes on."""
    build = InputBuilder.build
    fails = threading.local()

    def failing(self: InputBuilder, batch: Any) -> Any:
        if getattr(fails, "now", False) and len(batch.sequences):
            raise ValueError("no such input")
        return build(self, batch)

    def broken(*_: Any) -> Any:
        raise ValueError("no such token")

    monkeypatch.setattr(InputBuilder, "build", failing)

    def use(index: int, core: EngineCore) -> tuple[list[str], list[list[int]]]:
        refused = []
        if index == 0:
            fails.now = True
            add(core, REQUESTS[:1], params("greedy"))
            while not refused:
                refused += [r.message for r in core.step().refused]
            fails.now = False
            add(core, REQUESTS[1:2], params("greedy", logits_processors=[broken]))
            while not refused[1:]:
                refused += [r.message for r in core.step().refused]
        add(core, REQUESTS[:2], params("greedy", max_tokens=60 if index else 12))
        return refused, serve(core)

    config = coupled_config(folder, 2, **MTP)
    (refused, first), (_, second) = on_coupled(config, use)
    assert "no such input" in refused[0]
    assert "no such token" in refused[1]
    assert first == [tokens[:12] for tokens in second]


def test_an_engine_ends_with_the_others(folder: Path) -> None:
    """One that ends says so; one that stays away is missed."""
    config = coupled_config(folder, 2)

    def leave(index: int, core: EngineCore) -> None:
        if index == 0:
            return
        add(core, REQUESTS[:1], params("greedy"))
        with pytest.raises(EngineDeadError, match="another engine that shares the experts"):
            serve(core)

    on_coupled(config, leave)
    done = threading.Event()

    def stay_away(index: int, core: EngineCore) -> None:
        if index == 0:
            assert done.wait(PATIENCE_SECONDS)
            return
        with pytest.raises(EngineDeadError, match="engine 1 shares experts with 1 other"):
            core.step()
        done.set()

    on_coupled(config, stay_away, Ranks(timedelta(seconds=2)))


def test_idle_engines_exchange_less_often(folder: Path) -> None:
    def use(_: int, core: EngineCore) -> list[int | None]:
        patience = [core.max_idle_ms]
        for _ in range(6):
            core.step()
            patience.append(core.max_idle_ms)
        return patience

    assert on_coupled(coupled_config(folder, 2), use) == [[0, 2, 4, 8, 16, 20, 20]] * 2


def test_a_model_without_experts_is_refused(
    tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast
) -> None:
    llama = write_target("llama", tmp_path, byte_level_tokenizer)
    config = coupled_config(llama, 1, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="which has no experts"):
        Worker(config, ParallelGroups(ParallelGroup(0, 2)))


def test_graphs_of_engines_that_share_experts_are_refused(folder: Path) -> None:
    config, gpu = coupled_config(folder, 2), Platform("cuda", "sm90", True)
    groups = ParallelGroups(ep=ParallelGroup(0, 2))
    context = replace(LayerContext.create(torch.float32, 8), experts=groups.ep)
    experts = FusedMoE(4, 2, 8, 8, context, "experts")
    with pytest.raises(ConfigError, match="add --enforce-eager"):
        check_experts(config, groups, gpu, "it", experts)
    check_experts(coupled_config(folder, 2, enforce_eager=True), groups, gpu, "it", experts)
    check_experts(config, ParallelGroups(ParallelGroup(0, 2)), gpu, "it", experts)
