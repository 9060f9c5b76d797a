"""A model with its weights and KV cache, run in any split of any sequences, without the engine."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from atom.batch import NewSequence, ScheduledBatch, ScheduledSequence
from atom.config import ModelOptions
from atom.distributed.parallel_state import SINGLE, ParallelGroup
from atom.graphs.runner import ForwardOp, GraphRunner
from atom.kv_cache.block_tables import BlockTables
from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.paged import PagedCache
from atom.kv_cache.state_pool import StatePool, recurrent_layers
from atom.model_engine.step.input_builder import InputBuilder
from atom.model_loader.source import resolve_model
from atom.model_loader.weights import build_model
from atom.model_ops.attention.metadata import ModelOutput
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM
from atom.models.registry import create_model
from atom.platform import Platform, cpu_platform
from atom.sampling.rows import SamplingRows
from atom.sampling.sampler import Sampler
from atom.sampling_params import SamplingParams
from atom.structured_output.cache import GrammarCache

MAX_SEQS = 64


def load_model(
    folder: Path,
    max_model_len: int,
    dtype: torch.dtype = torch.float32,
    platform: Platform | None = None,
    group: ParallelGroup = SINGLE,
    state_dtype: torch.dtype = torch.float32,
    **model_options: Any,
) -> CausalLM:
    """The model of a checkpoint folder, loaded as the engine loads it; on the CPU by default."""
    options = ModelOptions(model=str(folder), **model_options)
    source = resolve_model(options)
    context = LayerContext.create(dtype, max_model_len, platform or cpu_platform(), group)
    context = replace(context, images=options.reads_images, state_dtype=state_dtype)
    return build_model(
        partial(create_model, source.hf_config, wanted=options.model_impl), source, context, options
    )


class NoGrammars:
    """Nobody asks for one."""

    def submit(self, wanted: object) -> NoReturn:
        pytest.fail("there are no grammars here")

    def shutdown(self) -> None:
        pass


class ModelBench:
    """Runs steps over sequences named by the test; their blocks lie scattered in the pool.

    Attributes:
        runner: who runs the model's layers; eagerly unless replaced.
        inputs: brings batches to the device.
        pools: what the cache allocated, by key.
        output: of the last step.
        block_ids: of each sequence, in order.
    """

    def __init__(
        self,
        folder: Path,
        block_size: int = 4,
        num_blocks: int = 64,
        max_model_len: int = 128,
        dtype: torch.dtype = torch.float32,
        platform: Platform | None = None,
        group: ParallelGroup = SINGLE,
        most_drafts: int = 0,
        **model_options: Any,
    ) -> None:
        self.model = load_model(folder, max_model_len, dtype, platform, group, **model_options)
        self.block_size = block_size
        self.device = (platform or cpu_platform()).device
        self._max_model_len = max_model_len
        self.inputs = self.run_with(self.model.forward)
        cache = PagedCache(attention_layers(self.model), block_size, dtype, self.device)
        self.pools = cache.allocate_kv_cache_tensors(num_blocks)
        bind_kv_caches(self.model, [cache])
        StatePool(recurrent_layers(self.model), MAX_SEQS, most_drafts, self.device).allocate()
        self.output: ModelOutput | None = None
        # Its rows that are tokens.
        self.rows = torch.empty(0)
        self.block_ids: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self._new: list[NewSequence] = []
        self._free = random.Random(0).sample(range(num_blocks), num_blocks)

    def run_with(self, forward: ForwardOp, graphs: GraphRunner | None = None) -> InputBuilder:
        """Run the model's layers so from now on, or replay graphs where they fit."""
        self.forward, self.graphs = forward, graphs
        vocab_size = self.model.token_embedding.vocab_size
        grammars = GrammarCache(NoGrammars())
        rows = SamplingRows(MAX_SEQS, vocab_size, frozenset(), self.device, grammars)
        longest = 0 if graphs is None else graphs.plan.table_width
        width = max(-(-self._max_model_len // self.block_size), longest)
        self.inputs = InputBuilder(
            Sampler(self.model.compute_logits, rows, vocab_size, self.device),
            BlockTables(MAX_SEQS, width, self.device),
            graphs,
            max_num_tokens=512,
            block_size=self.block_size,
            drafts=False,
        )
        return self.inputs

    @torch.inference_mode()
    def step(self, tokens: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """Append tokens to sequences, all in one batch -> logits [n, vocab] of each."""
        parts = [self._schedule(name, ids) for name, ids in tokens.items()]
        step = self.inputs.build(ScheduledBatch(parts, self._new, []))
        self._new = []
        if self.graphs is not None and step.graph is not None:
            self.output = self.graphs.replay(step.graph, len(step.model_input.input_ids))
        else:
            self.output = self.forward(step.model_input)
        logits = self.model.compute_logits(self.output.hidden_states)
        # In a graph rows of padding follow a sequence's own.
        lens = step.model_input.attention.query_lens_cpu
        parts_of = torch.arange(len(logits)).split(lens)
        rows = [own[: len(ids)] for ids, own in zip(tokens.values(), parts_of, strict=True)]
        self.rows = torch.cat(rows)
        return {name: logits[own] for name, own in zip(tokens, rows, strict=True)}

    def run(self, tokens: list[int], sizes: list[int], name: str = "seq") -> torch.Tensor:
        """Run one sequence in steps of the given sizes, the last repeated -> [T, vocab]."""
        logits = []
        for chunk in split(tokens, sizes):
            logits.append(self.step({name: chunk})[name])
        return torch.cat(logits)

    def run_beside(self, pieces: dict[str, list[list[int]]]) -> dict[str, torch.Tensor]:
        """Run sequences beside each other, a piece of each in a step -> [T, vocab] of each."""
        found: dict[str, list[torch.Tensor]] = {name: [] for name in pieces}
        for number in range(max(map(len, pieces.values()))):
            batch = {name: cut[number] for name, cut in pieces.items() if number < len(cut)}
            for name, logits in self.step(batch).items():
                found[name].append(logits)
        return {name: torch.cat(logits) for name, logits in found.items()}

    def rewind(self, name: str, length: int) -> None:
        """Forget a sequence's tokens after the first `length`; what they wrote stays."""
        self._lengths[name] = length

    def slots(self, name: str) -> list[int]:
        """The pool's slots of the sequence's tokens, in order."""
        blocks = self.block_ids[name]
        return [
            blocks[i // self.block_size] * self.block_size + i % self.block_size
            for i in range(self._lengths[name])
        ]

    def _schedule(self, name: str, token_ids: list[int]) -> ScheduledSequence:
        start = self._lengths.get(name, 0)
        blocks = self.block_ids.setdefault(name, [])
        if name not in self._rows:
            self._rows[name] = len(self._rows)
            self._new.append(
                NewSequence(name, self._rows[name], token_ids, [], SamplingParams(), 0)
            )
        row = self._rows[name]
        self._lengths[name] = start + len(token_ids)
        known = len(blocks)
        while len(blocks) * self.block_size < self._lengths[name]:
            blocks.append(self._free.pop())
        new = blocks[known:]
        return ScheduledSequence(name, row, token_ids, start, new, len(blocks), wants_sample=True)


def split(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    """Cut `tokens` into pieces of the given sizes, the last size repeated."""
    pieces, start = [], 0
    while start < len(tokens):
        size = sizes[min(len(pieces), len(sizes) - 1)]
        pieces.append(tokens[start : start + size])
        start += size
    return pieces
