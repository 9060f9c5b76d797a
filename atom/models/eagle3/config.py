"""The configuration of an Eagle3 draft, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.config import ConfigError
from atom.models.config.check import check_config
from atom.models.config.model_config import ModelConfig
from atom.models.draft_fields import (
    SPECULATORS_KEYS,
    Fields,
    Schema,
    mask_token,
    read_aux_layers,
    read_draft_config,
    read_draft_vocab_size,
    refuse_activations,
    rope_parameters,
    with_layer_defaults,
)
from atom.models.eagle3.aux_layers import AUX_FIELDS, BOUNDARY, AuxLayers
from atom.models.eagle3.card import expected_acceptance
from atom.stats import ExpectedAcceptance

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MHA_ARCHITECTURE = "LlamaForCausalLMEagle3"
MLA_ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
# Drafts all tokens in one pass: P-EAGLE.
PARALLEL_ARCHITECTURE = "PeagleLlamaForCausalLM"
PARALLEL_SPECULATOR = "PEagleSpeculator"
_PARALLEL = (PARALLEL_ARCHITECTURE, PARALLEL_SPECULATOR)
# The speculators library has two names for the same.
_SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel")
_ARCHITECTURES = (
    *(MHA_ARCHITECTURE, "Eagle3LlamaForCausalLM", MLA_ARCHITECTURE),
    *(*_SPECULATORS, *_PARALLEL),
)

_DEFAULT_NUM_AUX = 3
_KEYS = (
    # The second half is without effect on the single dense layer. MLA drafts copy the target's MoE
    # keys although their MLP is dense, and `num_hidden_layers`; tensors of a second layer would be
    # refused as unexpected.
    """
    architectures use_aux_hidden_state
    eagle_aux_hidden_state_layer_ids aux_hidden_state_layer_ids target_layer_ids layer_ids
    num_aux_hidden_states draft_vocab_size target_hidden_size norm_before_residual fc_norm
    norm_output draft_temperature_scale
    kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
    hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps
    vocab_size max_position_embeddings attention_bias mlp_bias hidden_act tie_word_embeddings
    sliding_window use_sliding_window layer_types quantization_config
    rope_theta rope_scaling rope_parameters rope_interleave expected_acceptance_length

    num_hidden_layers
    num_nextn_predict_layers first_k_dense_replace moe_intermediate_size moe_layer_freq n_group
    n_routed_experts n_shared_experts num_experts num_experts_per_tok norm_topk_prob
    routed_scaling_factor scoring_func topk_group topk_method aux_loss_alpha seq_aux ep_size
    router_aux_loss_coef qk_head_dim target_model_type target_layer_count
    eagle_decoder_type num_target_layers mask_token_id block_size num_anchors
    next_layer_regular parallel_draft_heads_num_layers has_lm_head reuse_target_lm_head

    use_input_layernorm_in_first_layer use_last_layernorm parallel_draft_step
    """
)
# What ModelOpt writes, and the only value that is supported.
_FIXED: dict[str, object] = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "parallel_draft_step": 1,
}
_SCHEMA = Schema.of(("eagle_config", "dflash_config"), _KEYS)
_PARALLEL_KEYS = f"{_KEYS} norm_before_fc pard_token ptd_token_id parallel_drafting"
_PARALLEL_SCHEMA = Schema.of(("eagle_config",), _PARALLEL_KEYS)
_SPECULATORS_SCHEMA = Schema.of(
    ("transformer_layer_config",), f"{_PARALLEL_KEYS} {SPECULATORS_KEYS}"
)


@dataclass(frozen=True)
class Eagle3Config:
    """An Eagle3 draft's `config.json`.

    Attributes:
        architecture: one of `_ARCHITECTURES`.
        network: sizes, biases and RoPE of the decoder layer, with the field names of transformers'
            Llama and DeepSeek-V3 configurations (not their classes, which refuse some sizes);
            `sliding_window` is None for full attention.
        draft_vocab_size: rows of the draft's output head.
        target_hidden_size: elements of one of the target's hidden states.
        aux_layers: target layers that feed `fc`, as the checkpoint names them; None leaves them
            to the target.
        num_aux_hidden_states: target layers that feed `fc`.
        norm_before_residual: the residual is the hidden state after `hidden_norm`, not before.
        fc_norm: each target hidden state has its own norm before `fc` (Eagle 3.1).
        norm_output: the next draft step reads the normalised output (Eagle 3.1).
        norm_before_fc: the hidden states, side by side, have one norm before `fc`.
        mask_token_id: of a draft that makes all drafts in one pass, with this token in the rows
            after the first; None for a draft that makes one after the other.
        temperature_scale: at how many times the requests' temperatures drafts are chosen.
        tied: the config ties the output head to the embedding.
        expected_acceptance: what its card says that it reaches, if it does.
        ignored_keys: unknown keys whose names suggest no effect on the computation.
    """

    architecture: str
    network: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: AuxLayers | None
    num_aux_hidden_states: int
    norm_before_residual: bool
    fc_norm: bool
    norm_output: bool
    norm_before_fc: bool
    mask_token_id: int | None
    temperature_scale: float
    tied: bool
    expected_acceptance: ExpectedAcceptance | None = None
    ignored_keys: tuple[str, ...] = ()

    @property
    def is_mla(self) -> bool:
        return self.architecture == MLA_ARCHITECTURE

    @property
    def hidden_size(self) -> int:
        return int(self.network.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.network.vocab_size)

    @property
    def fc_fan_in(self) -> int:
        return self.num_aux_hidden_states * self.target_hidden_size

    @classmethod
    def from_folder(cls, folder: Path) -> Eagle3Config:
        """Read `folder/config.json`.

        Raises:
            ConfigError: for what `from_dict` refuses, and for a missing or damaged file.
        """
        return cls.from_dict(*read_draft_config(folder))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "draft config") -> Eagle3Config:
        """The configuration described by `raw`; `where` names it in errors.

        Raises:
            ConfigError: for another architecture, contradictory or unsupported values, and unknown
                keys that may change the computation.
        """
        return cls._from_fields(_fields(raw, where))

    @classmethod
    def _from_fields(cls, fields: Fields) -> Eagle3Config:
        architecture = _architecture(fields)
        ignored = fields.unknown()
        _refuse_unsupported(fields)
        vocab_size = fields.integer("vocab_size")
        draft_vocab_size = read_draft_vocab_size(fields, vocab_size)
        is_mla, is_parallel = architecture == MLA_ARCHITECTURE, architecture in _PARALLEL
        if is_parallel and not fields.flag("parallel_drafting", True):
            raise fields.error(
                f"parallel_drafting=false is not supported: a {architecture} makes all drafts in "
                f"one pass"
            )
        if fields.flag("norm_before_fc") and fields.flag("fc_norm"):
            raise fields.error("norm_before_fc and fc_norm exclude each other")
        num_layers = fields.integer("num_hidden_layers") if is_parallel else 1
        is_speculator = architecture in _SPECULATORS
        if is_speculator and fields.integer("num_hidden_layers") != 1:
            raise fields.error(
                f"num_hidden_layers={fields.get('num_hidden_layers')} is not supported; an "
                f"{architecture} has one layer"
            )
        network = _mla_network(fields) if is_mla else _mha_network(fields, num_layers)
        check_config(network.to_dict(), fields.where)
        stated = None if fields.get("speculators_model_type") is None else BOUNDARY
        aux_layers = read_aux_layers(fields, AUX_FIELDS, stated)
        return cls(
            architecture=architecture,
            network=network,
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=fields.integer("target_hidden_size", fields.integer("hidden_size")),
            aux_layers=aux_layers,
            num_aux_hidden_states=_num_aux(fields, aux_layers),
            norm_before_residual=fields.flag("norm_before_residual", is_speculator),
            fc_norm=fields.flag("fc_norm"),
            norm_output=fields.flag("norm_output"),
            norm_before_fc=fields.flag("norm_before_fc"),
            mask_token_id=mask_token(fields, vocab_size) if is_parallel else None,
            temperature_scale=fields.number("draft_temperature_scale", 1.0),
            tied=fields.flag("tie_word_embeddings"),
            expected_acceptance=expected_acceptance(fields, "eagle3"),
            ignored_keys=tuple(ignored),
        )

    def check_against_target(self, target: PretrainedConfig) -> None:
        """Refuse a draft that was made for another target.

        Args:
            target: the target's text configuration.

        Raises:
            ConfigError: with the numbers of both.
        """
        if self.target_hidden_size != target.hidden_size:
            raise ConfigError(
                f"the draft reads hidden states of {self.target_hidden_size} elements "
                f"(target_hidden_size), so its fc takes {self.num_aux_hidden_states} x "
                f"{self.target_hidden_size} = {self.fc_fan_in}; the target's hidden states have "
                f"{target.hidden_size} (hidden_size), {self.num_aux_hidden_states} x "
                f"{target.hidden_size} = {self.num_aux_hidden_states * target.hidden_size}. The "
                f"draft belongs to another target"
            )
        if self.vocab_size != target.vocab_size:
            raise ConfigError(
                f"the draft's vocab_size is {self.vocab_size} and the target's is "
                f"{target.vocab_size}: token ids would not mean the same. The draft belongs to "
                f"another target"
            )


def _fields(raw: Mapping[str, Any], where: str) -> Fields:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name in (*_SPECULATORS, PARALLEL_SPECULATOR):
        return Fields(with_layer_defaults(raw, where, ("llama",)), where, _SPECULATORS_SCHEMA)
    return Fields(raw, where, _PARALLEL_SCHEMA if name == PARALLEL_ARCHITECTURE else _SCHEMA)


def _architecture(fields: Fields) -> str:
    given = fields.get("architectures")
    names = given if isinstance(given, list) else []
    supported = ", ".join(_ARCHITECTURES)
    if not names or names[0] not in _ARCHITECTURES:
        raise fields.error(
            f"architecture {names[0] if names else given!r} is no Eagle3 draft; supported are "
            f"{supported}"
        )
    architecture = str(names[0])
    rank = fields.get("kv_lora_rank")
    if (architecture == MLA_ARCHITECTURE) != bool(rank):
        raise fields.error(
            f"architecture {architecture} contradicts kv_lora_rank={rank!r}: of {supported} only "
            f"{MLA_ARCHITECTURE} has a kv_lora_rank"
        )
    return architecture


def _refuse_unsupported(fields: Fields) -> None:
    if not fields.flag("use_aux_hidden_state", True):
        raise fields.error(
            "use_aux_hidden_state=false is not supported: Eagle3 drafts read hidden states from "
            "between the target's layers"
        )
    for name, value in _FIXED.items():
        if fields.get(name) not in (None, value):
            raise fields.error(f"{name}={fields.get(name)!r} is not supported; only {value!r} is")
    refuse_activations(fields)


def _num_aux(fields: Fields, aux_layers: AuxLayers | None) -> int:
    named = _DEFAULT_NUM_AUX if aux_layers is None else len(aux_layers.ids)
    count = fields.integer("num_aux_hidden_states", named)
    if count != named:
        ids = (
            "the default ids"
            if aux_layers is None
            else f"the ids {list(aux_layers.ids)} of {aux_layers.field}"
        )
        raise fields.error(f"num_aux_hidden_states={count} contradicts {ids}, which are {named}")
    return count


def _mha_network(fields: Fields, num_layers: int) -> ModelConfig:
    heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(
            f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
        )
    if fields.get("head_dim") is None and hidden_size % heads:
        raise fields.error(
            f"hidden_size={hidden_size} does not split over num_attention_heads={heads} and "
            f"there is no head_dim"
        )
    return ModelConfig.from_dict(
        {
            "num_key_value_heads": kv_heads,
            "head_dim": fields.integer("head_dim", max(hidden_size // heads, 1)),
            "mlp_bias": fields.flag("mlp_bias"),
            "sliding_window": _sliding_window(fields),
            **_common_network(fields, num_layers),
        }
    )


def _mla_network(fields: Fields) -> ModelConfig:
    if _sliding_window(fields) is not None:
        raise fields.error(
            f"sliding_window={fields.get('sliding_window')} is not supported for an MLA draft"
        )
    if fields.flag("mlp_bias"):
        raise fields.error("mlp_bias=true is not supported for an MLA draft")
    rank = fields.get("q_lora_rank")
    return ModelConfig.from_dict(
        {
            "q_lora_rank": None if rank is None else fields.integer("q_lora_rank"),
            "kv_lora_rank": fields.integer("kv_lora_rank"),
            "qk_nope_head_dim": fields.integer("qk_nope_head_dim"),
            "qk_rope_head_dim": fields.integer("qk_rope_head_dim"),
            "head_dim": fields.integer("qk_rope_head_dim"),  # the rotary dimensions
            "v_head_dim": fields.integer("v_head_dim"),
            "rope_interleave": fields.flag("rope_interleave", True),
            "mlp_bias": False,
            **_common_network(fields, 1),
        }
    )


def _common_network(fields: Fields, num_layers: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": num_layers,
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_attention_heads": fields.integer("num_attention_heads"),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "vocab_size": fields.integer("vocab_size"),
        "max_position_embeddings": fields.integer("max_position_embeddings", 2048),
        "attention_bias": fields.flag("attention_bias"),
        "hidden_act": "silu",
        "rope_parameters": rope_parameters(fields),
    }


def _sliding_window(fields: Fields) -> int | None:
    """The window in tokens; None when off, for which configs use null, 0 or -1."""
    window = fields.get("sliding_window")
    if window is not None and type(window) is not int:
        raise fields.error(f"sliding_window should be an integer, got {window!r}")
    kinds = fields.get("layer_types") or ["sliding_attention" if window else "full_attention"]
    if not isinstance(kinds, list) or set(kinds) - {"full_attention", "sliding_attention"}:
        raise fields.error(
            f"layer_types={kinds!r} is not supported; a draft's layer is full_attention or "
            f"sliding_attention"
        )
    if window is None or window <= 0 or not fields.flag("use_sliding_window", True):
        return None
    return window if kinds[0] == "sliding_attention" else None
