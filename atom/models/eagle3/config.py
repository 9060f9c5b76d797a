"""The configuration of an Eagle3 draft, validated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from atom.config import ConfigError
from atom.models.config.aux_layers import AUX_FIELDS
from atom.models.config.draft_fields import DraftFields

MLA_ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
# Drafts all tokens in one pass: P-EAGLE.
_PARALLEL_SPECULATOR = "PEagleSpeculator"
_PARALLEL = ("PeagleLlamaForCausalLM", _PARALLEL_SPECULATOR)
# The speculators library has two names for the same.
_SERIAL_SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel")
_SPECULATORS = (*_SERIAL_SPECULATORS, _PARALLEL_SPECULATOR)
_ARCHITECTURES = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", MLA_ARCHITECTURE),
    *(*_SERIAL_SPECULATORS, *_PARALLEL),
)
_DEFAULT_NUM_AUX = 3
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class Eagle3Config(DraftFields, frozen=True, kw_only=True):
    """An Eagle3 draft's `config.json`.

    Attributes:
        norm_before_residual: the residual is the hidden state after `hidden_norm`, not before.
        fc_norm: each target hidden state has its own norm before `fc` (Eagle 3.1).
        norm_output: the next draft step reads the normalised output (Eagle 3.1); TensorRT-LLM's
            name of it is `return_hidden_post_norm`.
        norm_before_fc: the hidden states, side by side, have one norm before `fc`.
        mask_token_id: None for a draft that makes one draft after the other.
    """

    nested: ClassVar = ("eagle_config", "dflash_config")
    # MLA drafts copy the target's MoE keys although their MLP is dense; of the others, tensors say
    # it, or a draft of one layer has no place for it.
    unused: ClassVar = """
    num_nextn_predict_layers first_k_dense_replace moe_intermediate_size moe_layer_freq n_group
    n_routed_experts n_shared_experts num_experts num_experts_per_tok norm_topk_prob
    routed_scaling_factor scoring_func topk_group topk_method aux_loss_alpha seq_aux ep_size
    router_aux_loss_coef qk_head_dim block_size
    next_layer_regular parallel_draft_heads_num_layers has_lm_head reuse_target_lm_head
    return_hidden_post_norm
    """

    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    mlp_bias: bool = False
    parallel_drafting: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.architecture
        if self.is_mla != bool(self.kv_lora_rank):
            raise ValueError(
                f"architecture {name} contradicts kv_lora_rank={self.kv_lora_rank!r}: of "
                f"{', '.join(_ARCHITECTURES)} only {MLA_ARCHITECTURE} has a kv_lora_rank"
            )
        if self.aux_layers is None and self.num_aux_hidden_states != _DEFAULT_NUM_AUX:
            raise ValueError(
                f"num_aux_hidden_states={self.num_aux_hidden_states} contradicts the default ids, "
                f"which are {_DEFAULT_NUM_AUX}"
            )
        if name in _PARALLEL:
            if self.parallel_drafting is False:
                raise ValueError(
                    f"parallel_drafting=false is not supported: a {name} makes all drafts in one "
                    f"pass"
                )
            if self.mask_token_id is None:
                raise ValueError(
                    "there is no mask token: mask_token_id or a name for it is missing"
                )
        elif self.parallel_drafting:
            raise ValueError(f"parallel_drafting=True is not supported for a {name}")
        elif self.num_hidden_layers != 1:
            raise ValueError(
                f"num_hidden_layers={self.num_hidden_layers} is not supported; a {name} has one "
                f"layer"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        self._check_attention()

    def _check_attention(self) -> None:
        if set(self.layer_types or ()) - _LAYER_TYPES:
            raise ValueError(
                f"layer_types={list(self.layer_types or ())!r} is not supported; a draft's layer "
                f"is full_attention or sliding_attention"
            )
        if self.is_mla:
            if self.window is not None:
                raise ValueError(f"sliding_window={self.window} is not supported for an MLA draft")
            if self.mlp_bias:
                raise ValueError("mlp_bias=true is not supported for an MLA draft")
            self.check_latents()
            return
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} does not split over num_attention_heads={heads} "
                f"and there is no head_dim"
            )

    @classmethod
    def check_format(cls, raw: Mapping[str, Any]) -> None:
        names = raw.get("architectures")
        name = names[0] if isinstance(names, list) and names else names
        if name not in _ARCHITECTURES:
            raise ConfigError(
                f"architecture {name!r} is no Eagle3 draft; supported are "
                f"{', '.join(_ARCHITECTURES)}"
            )
        kind = raw.get("speculators_model_type")
        expected = {_PARALLEL_SPECULATOR: "peagle"}.get(name, "eagle3")
        if kind != (expected if name in _SPECULATORS else None):
            raise ConfigError(f"architecture {name} contradicts speculators_model_type={kind!r}")

    @classmethod
    def complete(cls, flat: dict[str, Any]) -> None:
        super().complete(flat)
        name = flat["architectures"][0]
        flat["(kind)"] = "eagle3"
        if "return_hidden_post_norm" in flat:
            flat.setdefault("norm_output", flat["return_hidden_post_norm"])
        if name not in _PARALLEL:
            flat.pop("mask_token_id", None)
            if name not in _SPECULATORS:
                flat["num_hidden_layers"] = 1  # tensors of a second layer are unexpected
        if name in _SERIAL_SPECULATORS:
            flat.setdefault("norm_before_residual", True)
        given = next((flat[n] for n in AUX_FIELDS if isinstance(flat.get(n), list)), None)
        flat.setdefault("num_aux_hidden_states", _DEFAULT_NUM_AUX if not given else len(given))

    @property
    def is_mla(self) -> bool:
        return self.architecture == MLA_ARCHITECTURE

    @property
    def window(self) -> int | None:
        """In tokens; None when off, for which configs use null, 0 or -1."""
        window, kinds = self.sliding_window, self.layer_types
        if window is None or window <= 0 or self.use_sliding_window is False:
            return None
        return window if kinds is None or kinds[0] == "sliding_attention" else None

    def network_fields(self) -> dict[str, Any]:
        """`sliding_window` is None for full attention."""
        fields = {**super().network_fields(), "mlp_bias": self.mlp_bias}
        if not self.is_mla:
            return {**fields, "sliding_window": self.window}
        return self.with_latents(fields)
