"""Tiny engines with and without speculation, and proposers that a test can see through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import checkpoints
from models.families import write_family
from spec_decode import block_bench, draft_bench
from spec_decode.mtp_reference import add_mtp_layers
from transformers import PreTrainedTokenizerFast

from atom import LLM, SamplingParams
from atom.model_engine import rank_parts
from atom.spec_decode.draft_policy import DraftNumbers
from atom.spec_decode.drafter import Drafter, History, LaunchedDrafts, LookupDrafts
from atom.spec_decode.grammar import GrammarDrafts
from atom.spec_decode.proposers.base import Proposer
from atom.spec_decode.suffix_index import Continuation
from atom.spec_decode.suffix_lookup import SuffixLookup

HIDDEN = 48
# Random prompts, and repetitive ones that a lookup finds matches in.
PROMPTS = [checkpoints.prompt(3 + 4 * i, seed=i) for i in range(10)] + [
    checkpoints.prompt(5, seed=20 + i) * 4 for i in range(6)
]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7, "seed": 1},
    "top-p": {"temperature": 1.0, "top_p": 0.9, "seed": 2},
    "top-k min-p": {"temperature": 1.0, "top_k": 30, "min_p": 0.05, "seed": 5},
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


def write_target(
    kind: str, folder: Path, tokenizer: PreTrainedTokenizerFast, **fields: Any
) -> Path:
    """The folder of `write_checkpoint`."""
    return write_checkpoint(kind, folder, tokenizer, **fields).folder


def write_checkpoint(
    kind: str, folder: Path, tokenizer: PreTrainedTokenizerFast, **fields: Any
) -> checkpoints.Checkpoint:
    """A `llama`, a `deepseek_v3` (latent attention, experts, prediction layers), a `kimi_k25`
    (the same in a nested config, more layers, no prediction layers), or a `deepseek_v32` or
    `glm_moe_dsa` (sparse attention, a prediction layer) checkpoint.

    Args:
        fields: of its config.
    """
    fields = {"vocab_size": len(tokenizer), "hidden_size": HIDDEN, **fields}
    if kind == "llama":
        checkpoint = checkpoints.llama(folder, **fields)
    elif kind == "kimi_k25":
        checkpoint = checkpoints.kimi_k25(folder, **{"num_hidden_layers": 8, **fields})
    elif kind == "deepseek_v3":
        checkpoint = checkpoints.deepseek_v3(folder, num_nextn_predict_layers=2, **fields)
        add_mtp_layers(folder)
    else:
        checkpoint = write_family(kind, folder, **fields)
        add_mtp_layers(folder)
    tokenizer.save_pretrained(folder)
    return checkpoint


EAGLE_DRAFTS = {
    "mha": draft_bench.MHA,
    "mla": draft_bench.MLA,
    "peagle": draft_bench.PARALLEL,
}
BLOCK_DRAFTS = {
    "dflash": "dflash sliding",
    "dflash2": "dflash2",
    "dspark": "speculators dspark",
}
# What is published for Kimi goes with the `kimi_k25` target alone.
_BLOCK_DRAFTS = {**BLOCK_DRAFTS, "kimi": "dflash kimi", "kimi k3": "dspark kimi"}
_WITHOUT_DRAFT = ("mtp", "suffix")


def method_of(draft: str) -> str:
    """The method that runs a draft of `write_draft`; `mtp` and `suffix` need none."""
    if draft in _WITHOUT_DRAFT:
        return draft
    if draft == "model":
        return "draft_model"
    name = _BLOCK_DRAFTS.get(draft)
    return "eagle3" if name is None else block_bench.DRAFTS[name].kind


def block_draft(kind: str, vocab_size: int, **fields: Any) -> block_bench.Draft:
    """A block drafter for the targets of `write_target`.

    Args:
        fields: of its config.
    """
    own: dict[str, Any] = {
        "target_layer_ids": [-1, 0, 1],
        "aux_hidden_state_layer_ids": [0, 2, 3],
    }
    if kind == "kimi":
        own = {"mask_token_id": vocab_size - 2}
    sizes = {"block_size": 8, "hidden_size": HIDDEN, "vocab_size": vocab_size}
    return block_bench.DRAFTS[_BLOCK_DRAFTS[kind]].changed(**{**own, **sizes, **fields})


def write_draft(kind: str, folder: Path, vocab_size: int, **fields: Any) -> Path:
    """A random `mha`, `mla` or `peagle` Eagle3 draft with a pruned vocabulary, a block drafter, or
    a `model` with the target's vocabulary.

    Args:
        fields: of its config.
    """
    if kind == "model":
        sizes = {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": vocab_size}
        return checkpoints.llama(folder, **{**sizes, **fields}).folder
    if kind in _BLOCK_DRAFTS:
        return block_bench.write_draft(folder, block_draft(kind, vocab_size, **fields))
    raw = EAGLE_DRAFTS[kind] | {"hidden_size": HIDDEN, "vocab_size": vocab_size, **fields}
    raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    create = draft_bench.parallel_tensors if kind == "peagle" else draft_bench.draft_tensors
    return draft_bench.write_draft(folder, raw, create(raw))


class Folders:
    """Checkpoints of `write_target` and `write_draft` by kind, each written once.

    Args:
        fields: of the configs of some kinds.
    """

    def __init__(
        self,
        root: Path,
        tokenizer: PreTrainedTokenizerFast,
        fields: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._root, self._tokenizer = root, tokenizer
        self._fields = fields or {}

    def __call__(self, kind: str) -> Path:
        folder, fields = self._root / kind, self._fields.get(kind, {})
        if folder.exists():
            return folder
        if kind in (*EAGLE_DRAFTS, *_BLOCK_DRAFTS, "model"):
            return write_draft(kind, folder, len(self._tokenizer), **fields)
        return write_target(kind, folder, self._tokenizer, **fields)

    def speculation(self, draft: str, k: int = 3) -> dict[str, Any]:
        """Engine arguments of k drafts of a kind of `method_of`."""
        options = {"method": method_of(draft), "num_speculative_tokens": k}
        if draft in _WITHOUT_DRAFT:
            return options
        return {**options, "draft_model": str(self(draft))}


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


CreateDrafter = Callable[..., Drafter]


class OracleLookup(SuffixLookup):
    """Knows every sequence's continuation, so that each of its drafts is accepted.

    With `wrong` every draft is off by one token instead, and none is.
    """

    def __init__(self, continuations: Mapping[tuple[int, ...], list[int]], k: int, wrong: bool):
        super().__init__("oracle", k)
        self._continuations = continuations
        self._shift = int(wrong)

    def find(
        self, row: int, prompt: Sequence[int], outputs: Sequence[int], more: int = 0
    ) -> Continuation:
        known = self._continuations[tuple(prompt)][len(outputs) :][: self.max_drafts + more]
        return Continuation([t + self._shift for t in known], [1.0] * len(known))


def oracle(known: Mapping[tuple[int, ...], list[int]], k: int, wrong: bool) -> CreateDrafter:
    """Creates drafters of an `OracleLookup` alone."""

    def create(_: Any, proposer: Proposer, **__: bool) -> Drafter:
        lookup = OracleLookup(known, k, wrong)
        return Drafter(proposer, "oracle", lookup, None, sync_is_free=True)

    return create


@contextmanager
def drafters_from(monkeypatch: pytest.MonkeyPatch, create: CreateDrafter) -> Iterator[None]:
    """Engines built inside make their drafts with what `create` returns."""
    with monkeypatch.context() as patch:
        patch.setattr(rank_parts, "create_drafter", create)
        yield


# Told the histories [S] of the sequences of a step whose drafts have just been made.
Tell = Callable[[Sequence[tuple[int, ...]]], None]


@contextmanager
def drafts_recorded(
    monkeypatch: pytest.MonkeyPatch, *creates: CreateDrafter, tell: Tell | None = None
) -> Iterator[list[dict[tuple[int, ...], list[int]]]]:
    """For each engine built inside, what its proposer drafts after every history.

    Args:
        creates: make the drafters of the engines, in turn; the usual ones when left out.
    """
    usual, turns = rank_parts.create_drafter, iter(creates)
    recorded: list[dict[tuple[int, ...], list[int]]] = []

    def create(*args: Any, **options: Any) -> Drafter:
        drafter = next(turns, usual)(*args, **options)
        recorded.append(_record(drafter, tell))
        return drafter

    with drafters_from(monkeypatch, create):
        yield recorded


def _record(drafter: Drafter, tell: Tell | None) -> dict[tuple[int, ...], list[int]]:
    look_up, merge, has_lookup = drafter.look_up, drafter.merge, drafter.has_lookup
    drafts: dict[tuple[int, ...], list[int]] = {}
    behind: list[tuple[int, ...]] = []

    def recorded_look_up(
        rows: Sequence[int], histories: Sequence[History], launched: LaunchedDrafts | None = None
    ) -> LookupDrafts:
        behind[:] = [(*prompt, *outputs) for prompt, outputs in histories]
        if has_lookup:
            return look_up(rows, histories, launched)
        drafter.tokens_lost_by_overlap = [0.0] * len(rows)
        return [None] * len(rows)

    def recorded_merge(
        numbers: DraftNumbers,
        rows: Sequence[int],
        found: LookupDrafts,
        made: Sequence[np.ndarray],
        allowed: GrammarDrafts | None = None,
        launched: LaunchedDrafts | None = None,
    ) -> list[tuple[list[int], str]]:
        own = made[0].tolist() if made else [[] for _ in found]
        drafts.update(zip(behind, own, strict=True))
        if tell is not None and made:
            tell(behind)
        return merge(numbers, rows, found, made, allowed, launched if has_lookup else None)

    drafter.has_lookup = True
    drafter.look_up = recorded_look_up  # type: ignore[method-assign]
    drafter.merge = recorded_merge  # type: ignore[method-assign]
    return drafts
