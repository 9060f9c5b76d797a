"""Tiny block drafters on disk in every format, and proposers run step by step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from model_ops.batches import Part, attention_metadata
from safetensors.torch import save_file
from spec_decode.block_reference import LATENT_NAMES, Meaning, Tensors, Yarn

from atom.config import ModelOptions
from atom.kv_cache.builders import attention_layers, bind_kv_caches
from atom.kv_cache.paged import PagedCache
from atom.model_loader.drafts.block import load_block_draft
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_loader.source import ModelSource
from atom.model_ops.attention.metadata import ModelInput, ModelOutput, SamplingMetadata
from atom.model_ops.kernels.torch.speculation import place_drafts
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM
from atom.models.block_draft.draft import BlockDraft
from atom.platform import cpu_platform
from atom.spec_decode.proposers.base import Chosen, DraftSampler, Guide, VerifiedStep
from atom.spec_decode.proposers.block_draft import BlockDraftModel
from atom.spec_decode.proposers.block_proposer import BlockProposer

VOCAB, DRAFT_VOCAB, RANK, MASK = 96, 40, 8, 5
LAYER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}
_TOP = {"model_type": "qwen3", **LAYER, "block_size": 5}
_INNER = {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}
DFLASH = {"architectures": ["DFlashDraftModel"], **_TOP, "dflash_config": _INNER}
_CONV = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": RANK, "selector_top_k": 6}
DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    **_TOP,
    "dflash_config": {**_INNER, **_CONV, "final_logit_softcapping": 3.0, "output_multiplier": 0.7},
}
DSPARK = {
    "architectures": ["Qwen3DSparkModel"],
    **_TOP,
    "mask_token_id": MASK,
    "target_layer_ids": [1, 3, 5],
    "num_anchors": 512,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def _speculators(kind: str, architecture: str, **more: Any) -> dict[str, Any]:
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind, "proposal_methods": methods},
        "transformer_layer_config": {"model_type": "qwen3", **LAYER},
        "block_size": 5,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [2, 4, 6],
        **more,
    }


@dataclass(frozen=True)
class Draft:
    """A config, what it means, and what the checkpoint brings of its own."""

    raw: dict[str, Any]
    meaning: Meaning = field(default_factory=Meaning)
    own_vocabulary: bool = False

    @property
    def flat(self) -> dict[str, Any]:
        """All keys at the top."""
        nested = (self.raw.get(n, {}) for n in ("transformer_layer_config", "dflash_config"))
        return {key: value for level in (*nested, self.raw) for key, value in level.items()}

    @property
    def kind(self) -> str:
        """The method that runs it."""
        name = self.raw["architectures"][0]
        return "dflash2" if "DFlash2" in name else "dflash" if "DFlash" in name else "dspark"

    @property
    def mask_token(self) -> int:
        return int(self.flat["mask_token_id"])

    @property
    def num_aux(self) -> int:
        """Hidden states of the target that it reads."""
        names = ("target_layer_ids", "aux_hidden_state_layer_ids")
        return len(next(self.flat[name] for name in names if name in self.flat))

    @property
    def draft_vocab(self) -> int:
        return self.flat.get("draft_vocab_size", self.flat["vocab_size"])

    def changed(self, **fields: Any) -> Draft:
        """With other fields, which replace those of nested objects, too."""
        nested = {
            name: {key: fields.get(key, value) for key, value in inner.items()}
            for name, inner in self.raw.items()
            if name in ("transformer_layer_config", "dflash_config")
        }
        top = {key: value for key, value in fields.items() if key in self.raw}
        return replace(self, raw={**self.raw, **top, **nested})


_ANCHORED = Meaning(anchored=True)
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
_PRUNED = {"draft_vocab_size": DRAFT_VOCAB}
_SLIDING_LAYERS = {"model_type": "qwen3", **LAYER, **_SLIDING}
_SCALES = {"input_embedding_scale": 1.5, "attention_value_scale": 0.8}
_YARN = {
    "rope_type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# As z-lab published it for Kimi-K2.5: in the format of their other drafts, with the target's yarn,
# more hidden states than layers, and a mask token at the vocabulary's end.
DFLASH_KIMI = {
    **DFLASH,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 8,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 262144,
    "max_window_layers": 2,
    "num_target_layers": 8,
    "rope_theta": 50000.0,
    "rope_scaling": _YARN,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "dflash_config": {"mask_token_id": VOCAB - 2, "target_layer_ids": [1, 2, 4, 5]},
}
# As Inferact published it for Kimi-K3, but for its sizes; a block's is not in its config.
DSPARK_KIMI = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    **LAYER,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "block_size": 5,
    "num_target_layers": 3,
    "target_layer_ids": [1, 3, 5],
    "mask_token_id": MASK,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "rope_parameters": {
        **_YARN,
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500.0,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "_torchspec_version": "0.1.0",
}
DRAFTS = {
    "dspark kimi": Draft(
        DSPARK_KIMI,
        Meaning(
            anchored=True,
            markov="vanilla",
            interleaved=True,
            yarn=Yarn(32, 64, 32, 1),
            latents=True,
        ),
    ),
    "dflash": Draft(DFLASH),
    "dflash sliding": Draft(
        {**DFLASH, **_SLIDING, "attention_bias": True}, Meaning((6, 0), (True, False))
    ),
    "dflash swa": Draft(
        {**DFLASH, "dflash_config": {**_INNER, "use_swa": True, "swa_window_size": 6}},
        Meaning((6, 6)),
    ),
    "dflash causal": Draft(
        {**DFLASH, "is_causal": True, "is_neox_style": False},
        Meaning(causal=(True, True), interleaved=True),
    ),
    "dflash scaled": Draft(
        {**DFLASH, "dflash_config": {**_INNER, **_SCALES}}, Meaning(scales=_SCALES)
    ),
    "dflash kimi": Draft(DFLASH_KIMI, Meaning(yarn=Yarn(64, 4096, 32, 1))),
    "dflash kimi louder": Draft(
        {**DFLASH_KIMI, "rope_scaling": {**_YARN, "attention_factor": 1.416}},
        Meaning(yarn=Yarn(64, 4096, 32, 1, amplitude=1.416)),
    ),
    "dflash2": Draft(
        DFLASH2,
        Meaning(taps=2, top_k=6, scales={"final_logit_softcapping": 3.0, "output_multiplier": 0.7}),
    ),
    "dspark": Draft(DSPARK, Meaning(anchored=True, markov="vanilla"), own_vocabulary=True),
    "dspark gated": Draft(
        {**DSPARK, "markov_head_type": "gated"}, Meaning(anchored=True, markov="gated")
    ),
    "dspark rnn": Draft(
        {**DSPARK, "markov_head_type": "rnn"}, Meaning(anchored=True, markov="rnn")
    ),
    "dspark without markov": Draft(
        {**DSPARK, "markov_rank": 0, "enable_confidence_head": False}, _ANCHORED
    ),
    "speculators dflash": Draft(_speculators("dflash", "DFlashSpeculator", **_PRUNED)),
    "speculators dflash sliding": Draft(
        _speculators("dflash", "DFlashSpeculator", transformer_layer_config=_SLIDING_LAYERS),
        Meaning((6, 0)),
    ),
    "speculators dflash2": Draft(
        _speculators("dflash2", "DFlash2DraftModel", **_CONV), Meaning(taps=2, top_k=6)
    ),
    "speculators dspark": Draft(
        _speculators(
            "dspark",
            "DSparkSpeculator",
            sample_from_anchor=True,
            markov_rank=RANK,
            markov_head_type="vanilla",
            **_PRUNED,
        ),
        Meaning(anchored=True, markov="vanilla"),
    ),
}


def draft_tensors(draft: Draft, seed: int = 0) -> Tensors:
    """A random checkpoint for a config."""
    raw, meaning, vocab = draft.flat, draft.meaning, draft.flat["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    size, wide, dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    heads, kv = raw["num_attention_heads"] * dim, raw["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"hidden_norm.weight": (size,), "norm.weight": (size,)}
    shapes["fc.weight"] = (size, draft.num_aux * size)
    for i in range(raw["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (size,),
            "post_attention_layernorm": (size,),
            "self_attn.q_proj": (heads, size),
            "self_attn.k_proj": (kv, size),
            "self_attn.v_proj": (kv, size),
            "self_attn.o_proj": (size, heads),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (wide, size),
            "mlp.up_proj": (wide, size),
            "mlp.down_proj": (size, wide),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        if meaning.latents:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
                del shapes[f"layers.{i}.self_attn.{name}.weight"]
            shapes |= _latent_shapes(raw, f"layers.{i}.self_attn.")
        if raw.get("attention_bias"):
            shapes |= {
                f"layers.{i}.self_attn.{n}_proj.bias": layer[f"self_attn.{n}_proj"][:1]
                for n in "qkvo"
            }
        for conv in ("attention_conv", "mlp_conv") if meaning.taps else ():
            name, columns = f"layers.{i}.{conv}", 2 * meaning.taps * size // 8
            shapes[f"{name}.base_kernel"] = (2, meaning.taps, size)
            shapes[f"{name}.kernel_projection.weight"] = (columns, size)
    if meaning.top_k:
        shapes |= {f"candidate_selector.{n}_codebook": (vocab, RANK) for n in ("predecessor",)}
        shapes["candidate_selector.successor_codebook"] = (vocab, RANK)
        shapes["candidate_selector.hidden_projection.weight"] = (RANK, size)
    if meaning.markov:
        shapes["markov_head.markov_w1.weight"] = (vocab, RANK)
        shapes["markov_head.markov_w2.weight"] = (draft.draft_vocab, RANK)
        shapes["confidence_head.proj.weight"] = (1, size + RANK)
        shapes["confidence_head.proj.bias"] = (1,)
    joint = {"gated": ("gate_proj", RANK, size + RANK), "rnn": ("joint_proj", 3 * RANK, 0)}
    if meaning.markov in joint:
        name, rows, columns = joint[meaning.markov]
        shapes[f"markov_head.{name}.weight"] = (rows, columns or 2 * RANK + size)
        shapes[f"markov_head.{name}.bias"] = (rows,)
    if meaning.latents:
        for name, usual in LATENT_NAMES.items():
            shapes[f"{name}.weight"] = shapes.pop(f"{usual}.weight")
        shapes["embed_tokens.weight"] = (vocab, size)
    if draft.own_vocabulary:
        shapes["embed_tokens.weight"] = shapes["lm_head.weight"] = (vocab, size)
    tensors = {}
    if draft.draft_vocab != vocab:
        shapes["lm_head.weight"] = (draft.draft_vocab, size)
        chosen = torch.randperm(vocab, generator=generator)[: draft.draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(len(chosen))
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_norm = "norm" in name
        tensors[name] = noise * 0.3 + 1 if is_norm else noise * (0.5 if "markov" in name else 0.2)
    return tensors


def _latent_shapes(raw: dict[str, Any], name: str) -> dict[str, tuple[int, ...]]:
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    nope, rope, v = (raw[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
    low, rank = raw["q_lora_rank"], raw["kv_lora_rank"]
    shapes = {
        "q_a_proj": (low, size),
        "q_a_layernorm": (low,),
        "q_b_proj": (heads * (nope + rope), low),
        "kv_a_proj_with_mqa": (rank + rope, size),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (nope + v), rank),
        "o_proj": (size, heads * v),
    }
    return {f"{name}{module}.weight": shape for module, shape in shapes.items()}


def write_draft(folder: Path, draft: Draft, prefix: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft.raw), encoding="utf-8")
    tensors = draft_tensors(draft)
    save_file({prefix + name: t for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def load(
    folder: Path, target: CausalLM, source: ModelSource, kind: str, quantization: str = "auto"
) -> BlockDraft:
    context = LayerContext.create(torch.float32, 128, cpu_platform())
    loaded_for = DraftTarget(target, source, context, ModelOptions(), quantization=quantization)
    return load_block_draft(str(folder), loaded_for, kind)


def step_of(
    parts: Sequence[Part],
    aux: Sequence[torch.Tensor],
    next_tokens: Sequence[int],
    last_rows: Sequence[int],
    block_size: int,
) -> VerifiedStep:
    """A step with these rows, of which all sequences are sampled, or none if `last_rows` is empty.

    Args:
        aux: [T, hidden] each.
    """
    positions = [p.start + i for p in parts for i in range(p.num_tokens)]
    metadata = attention_metadata(parts, block_size, torch.device("cpu"))
    return VerifiedStep(
        [],
        ModelInput(torch.zeros(len(positions)).long(), torch.tensor(positions), metadata),
        ModelOutput(aux[0], tuple(aux)),
        torch.tensor(next_tokens),
        torch.tensor(last_rows, dtype=torch.int64),
        None if last_rows else torch.zeros(0, dtype=torch.int64),
        SamplingMetadata(),
    )


class RecordedChoice(DraftSampler):
    """Keeps the logits of each draft of the last proposal, [S, V] each."""

    def choose(
        self,
        logits: torch.Tensor,
        draft_sampling: SamplingMetadata | None,
        positions: torch.Tensor,
        guide: Guide | None = None,
        ahead: int = 2,
    ) -> Chosen:
        self.logits = [*getattr(self, "logits", []), logits.clone()]
        return super().choose(logits, None, positions, guide, ahead)


class BlockBench:
    """A proposer with its cache; a sequence's blocks lie scattered."""

    def __init__(self, draft: BlockDraft, *, confident: bool = False, num_blocks: int = 64) -> None:
        self.block_size = 4
        cpu = torch.device("cpu")
        layers = attention_layers(draft)
        builder = PagedCache(layers, self.block_size, torch.float32, cpu, prefix="block_draft_")
        self.choice = RecordedChoice(draft.target_ids, confident=confident)
        self.proposer = BlockProposer(
            BlockDraftModel(draft),
            builder,
            draft.config.max_drafts,
            self.block_size,
            128,
            place_drafts,
            self.choice,
        )
        builder.allocate_kv_cache_tensors(num_blocks)
        bind_kv_caches(draft, [builder])
        self._free = [(7 * i + 3) % num_blocks for i in range(num_blocks)]

    def blocks(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-num_tokens // self.block_size))]

    @torch.inference_mode()
    def step(
        self,
        parts: Sequence[Part],
        aux: Sequence[torch.Tensor],
        next_tokens: Sequence[int],
        last_rows: Sequence[int],
        num_drafts: int,
    ) -> tuple[list[list[int]], torch.Tensor, torch.Tensor | None]:
        """Run all parts as one step; all of them are sampled, or none.

        Args:
            aux: [T, hidden] each, of all rows.
            next_tokens: of all rows.
            last_rows: [S]; empty when nothing is sampled.

        Returns:
            Drafts [S][n], the scores that they were chosen from [S, n, V], and confidences.
        """
        step = step_of(parts, aux, next_tokens, last_rows, self.block_size)
        self.choice.logits = []
        proposal = self.proposer.propose(step, num_drafts)
        scores = torch.stack(self.choice.logits, 1) if self.choice.logits else aux[0]
        return proposal.token_ids.tolist(), scores, proposal.confidences
