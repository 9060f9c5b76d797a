"""Tiny engines with and without speculation, and proposers that a test can see through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from spec_decode import draft_bench
from spec_decode.mtp_reference import add_mtp_layers
from torch import nn
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.kv_cache.base import KVCacheBuilder
from atom.model_engine import executor
from atom.sampling.verify import NO_DRAFT
from atom.spec_decode.base import Lookahead, Proposer, VerifiedStep

HIDDEN = 48
# Random prompts, and repetitive ones that an n-gram lookup finds matches in.
PROMPTS = [checkpoints.prompt(3 + 4 * i, seed=i) for i in range(10)] + [
    checkpoints.prompt(5, seed=20 + i) * 4 for i in range(6)
]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7, "seed": 1},
    "top-p": {"temperature": 1.0, "top_p": 0.9, "seed": 2},
    "penalties": {
        "temperature": 1.3,
        "seed": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
}


def params(setting: str, **overrides: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 24, "ignore_eos": True, **SETTINGS[setting], **overrides}
    )


def write_target(kind: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A `llama` or a `deepseek_v3` (latent attention, experts, prediction layers) checkpoint."""
    fields = {"vocab_size": len(tokenizer), "hidden_size": HIDDEN}
    if kind == "llama":
        checkpoints.llama(folder, **fields)
    else:
        checkpoints.deepseek_v3(folder, num_nextn_predict_layers=2, **fields)
        add_mtp_layers(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_draft(kind: str, folder: Path, vocab_size: int) -> Path:
    """A random `mha` or `mla` Eagle3 draft with a pruned vocabulary."""
    raw = dict(draft_bench.MHA if kind == "mha" else draft_bench.MLA)
    raw |= {"hidden_size": HIDDEN, "vocab_size": vocab_size}
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    return draft_bench.write_draft(folder, raw, draft_bench.draft_tensors(raw))


def create_engine(folder: Path, **overrides: Any) -> LLM:
    defaults = {
        "dtype": "float32",
        "block_size": 4,
        "max_num_seqs": 16,
        "max_model_len": 128,
        "kv_cache_memory": "16MB",
        "num_threads": 1,
    }
    return LLM(str(folder), **{**defaults, **overrides})


def generate(
    engine: LLM, sampling: SamplingParams, prompts: Sequence[list[int]] = PROMPTS
) -> list[list[int]]:
    """The tokens of every prompt; every block must have come back."""
    outputs = engine.generate(list(prompts), sampling, use_tqdm=False)
    engine.engine.core.block_pool.check_integrity()
    assert engine.engine.core.block_pool.num_used == 0
    return [output.outputs[0].token_ids for output in outputs]


class OracleProposer:
    """Knows every sequence's continuation, so that each of its drafts is accepted.

    With `wrong` every draft is off by one token instead, and none is.
    """

    draft_model: nn.Module | None = None
    aux_layer_ids: tuple[int, ...] = ()
    kv_cache_builders: Sequence[KVCacheBuilder] = ()

    def __init__(self, continuations: Mapping[tuple[int, ...], list[int]], k: int, wrong: bool):
        self.lookahead = Lookahead(k)
        self._continuations = continuations
        self._shift = int(wrong)

    def propose(self, step: VerifiedStep) -> torch.Tensor:
        k = self.lookahead.num_tokens
        rows = []
        for prompt, outputs in step.histories:
            known = self._continuations[tuple(prompt)][len(outputs) :][:k]
            rows.append([t + self._shift for t in known] + [NO_DRAFT] * (k - len(known)))
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), k)


class RecordingProposer:
    """Passes everything on, and remembers the drafts made after every history."""

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner
        self.lookahead = inner.lookahead
        self.draft_model = inner.draft_model
        self.aux_layer_ids = inner.aux_layer_ids
        self.kv_cache_builders = inner.kv_cache_builders
        self.drafts: dict[tuple[int, ...], list[int]] = {}

    def propose(self, step: VerifiedStep) -> torch.Tensor:
        drafts = self._inner.propose(step)
        for (prompt, outputs), row in zip(step.histories, drafts.tolist(), strict=True):
            self.drafts[(*prompt, *outputs)] = row
        return drafts


@contextmanager
def proposer_replaced(
    monkeypatch: pytest.MonkeyPatch, replace: Callable[[Proposer], Proposer]
) -> Iterator[None]:
    """Engines built inside use `replace(their proposer)`."""
    create = executor.create_proposer
    with monkeypatch.context() as patch:
        patch.setattr(executor, "create_proposer", lambda *args: replace(create(*args)))
        yield
