"""Typed access to an Eagle3 draft's `config.json`, and which unknown keys may be ignored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atom.config import ConfigError
from atom.models.config_check import check_config
from atom.models.config_file import is_there, read_json_object

_NESTED = ("eagle_config", "dflash_config")

# Read by `Eagle3Config`, wherever they stand.
_READ = """
architectures eagle_config dflash_config use_aux_hidden_state
eagle_aux_hidden_state_layer_ids aux_hidden_state_layer_ids target_layer_ids
num_aux_hidden_states draft_vocab_size target_hidden_size norm_before_residual fc_norm
norm_output draft_temperature_scale
kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps
vocab_size max_position_embeddings attention_bias mlp_bias hidden_act tie_word_embeddings
sliding_window use_sliding_window layer_types quantization_config
rope_theta rope_scaling rope_parameters rope_interleave expected_acceptance_length
"""

# Without effect on the single dense layer. MLA drafts copy the target's MoE keys although their MLP
# is dense, and `num_hidden_layers`; tensors of a second layer would be refused as unexpected.
_HARMLESS = """
model_type torch_dtype dtype transformers_version auto_map _name_or_path
bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
initializer_range use_cache attention_dropout hidden_dropout dropout pretraining_tp
num_hidden_layers max_window_layers chunk_size_feed_forward id2label label2id problem_type
return_dict output_attentions output_hidden_states output_router_logits is_encoder_decoder
attn_implementation _attn_implementation _attn_implementation_autoset use_flash_attn
num_nextn_predict_layers first_k_dense_replace moe_intermediate_size moe_layer_freq n_group
n_routed_experts n_shared_experts num_experts num_experts_per_tok norm_topk_prob
routed_scaling_factor scoring_func topk_group topk_method aux_loss_alpha seq_aux ep_size
router_aux_loss_coef qk_head_dim target_model_type target_layer_count
eagle_decoder_type num_target_layers mask_token_id block_size num_anchors
"""

_KNOWN = frozenset((_READ + _HARMLESS).split())

# Values that have no effect, besides null, false and empty.
_NEUTRAL: Mapping[str, object] = {
    "logit_scale": 1.0,
    "partial_rotary_factor": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}

_CHANGES_THE_MATHS = re.compile(
    r"norm|rope|rotary|scal|multiplier|bias|fc|gate|residual|softcap|cap$|attn|attention|embed"
    r"|window|logit|_eps|epsilon|_act$|activation|aux|head|temperature"
)


class Fields:
    """A draft's keys: the top level first, then nested objects; null counts as absent."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._nested: list[Mapping[str, Any]] = []
        for name in _NESTED:
            nested = raw.get(name) or {}
            if not isinstance(nested, dict):
                raise ConfigError(f"{where}: {name} should be an object, got {nested!r}")
            self._nested.append(nested)
        check_config(raw, where)
        self.where = where
        self._top = raw

    def get(self, name: str) -> Any:
        """The value as JSON gives it; None when absent."""
        values = (level.get(name) for level in (self._top, *self._nested))
        return next((value for value in values if value is not None), None)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            ConfigError: for anything else, or when it is absent without a default.
        """
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise self.error(f"{name} should be a positive integer, got {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        value = self.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or value <= 0:
            raise self.error(f"{name} should be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(f"{name} should be true or false, got {value!r}")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers; None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not value or any(type(i) is not int for i in value):
            raise self.error(f"{name} should be a list of integers, got {value!r}")
        return tuple(value)

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.where}: {message}")

    def unknown(self) -> list[str]:
        """The unknown keys that may be ignored.

        Raises:
            ConfigError: naming the unknown keys that change the arithmetic: all of those in
                nested objects, and those at the top level whose names speak of it.
        """
        nested = [name for level in self._nested for name in _meaningful(level)]
        top = _meaningful(self._top)
        refused = nested + [name for name in top if _CHANGES_THE_MATHS.search(name)]
        if refused:
            raise self.error(
                f"unknown keys that may change what the draft computes: "
                f"{', '.join(f'{name}={self.get(name)!r}' for name in refused)}; ignoring them "
                f"would cost acceptance without a word. Remove them only if the draft was "
                f"trained without them"
            )
        return top


def _meaningful(level: Mapping[str, Any]) -> list[str]:
    """The unknown keys of one level that are not off."""
    return sorted(
        name
        for name, value in level.items()
        if name not in _KNOWN
        and value not in (None, False, "", [], {})
        and not (name in _NEUTRAL and value == _NEUTRAL[name])
    )


def read_draft_config(folder: Path) -> Fields:
    """The fields of `folder/config.json`.

    Raises:
        ConfigError: when there is no such file or it holds no JSON object.
    """
    path = folder / "config.json"
    if not is_there(path):
        raise ConfigError(f"{folder} holds no config.json, so it is no draft model folder")
    return Fields(read_json_object(path), str(path))
