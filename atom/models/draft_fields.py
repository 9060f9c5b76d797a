"""Typed access to a draft's `config.json`, and which unknown keys may be ignored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom.config import ConfigError
from atom.model_ops.rotary import SUPPORTED_ROPE_TYPES
from atom.models.config.check import check_config
from atom.models.config.file import is_there, read_json_object
from atom.models.config.hf_configs import built_in_config
from atom.models.eagle3.aux_layers import AuxLayers

# Without effect on what a draft computes.
_HARMLESS = """
model_type torch_dtype dtype transformers_version auto_map _name_or_path
bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
initializer_range use_cache attention_dropout hidden_dropout dropout pretraining_tp
max_window_layers chunk_size_feed_forward id2label label2id problem_type
return_dict output_attentions output_hidden_states output_router_logits is_encoder_decoder
attn_implementation _attn_implementation _attn_implementation_autoset use_flash_attn
add_cross_attention bad_words_ids begin_suppress_tokens cross_attention_hidden_size
diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size finetuning_task
forced_bos_token_id forced_eos_token_id is_decoder length_penalty max_length min_length
no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix
pruned_heads remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens
task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p
torchscript typical_p use_bfloat16
"""

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

# Names of the mask token; the first that is given counts.
_MASK_TOKENS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")

_ROPE_KEYS = """
rope_type type rope_theta factor original_max_position_embeddings low_freq_factor
high_freq_factor beta_fast beta_slow mscale mscale_all_dim attention_factor truncate
"""
_NEEDED_ROPE_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


# The layout of the speculators library, whose layers have a config of their own.
SPECULATORS_KEYS = """
speculators_model_type speculators_version speculators_config embed_requires_grad
"""
# What transformers leaves out of a saved config because it is the default of the model type.
_LEFT_OUT = """
hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
rms_norm_eps vocab_size max_position_embeddings attention_bias hidden_act
"""
# Model types, and what follows from the other sizes if it is left out.
_LAYER_TYPES: Mapping[str, tuple[str, ...]] = {
    "qwen3": (),
    "llama": ("head_dim", "num_key_value_heads"),
}


@dataclass(frozen=True)
class Schema:
    """The keys of a format.

    Attributes:
        nested: objects whose keys count as if they stood at the top.
        known: keys that are read, or have no effect.
    """

    nested: tuple[str, ...]
    known: frozenset[str]

    @classmethod
    def of(cls, nested: tuple[str, ...], keys: str) -> Schema:
        """Args:
        keys: known ones, separated by white space.
        """
        return cls(nested, frozenset((*nested, *keys.split(), *_HARMLESS.split())))


class Fields:
    """A draft's keys: the top level first, then nested objects; null counts as absent."""

    def __init__(self, raw: Mapping[str, Any], where: str, schema: Schema) -> None:
        self._schema = schema
        self._nested: list[Mapping[str, Any]] = []
        for name in schema.nested:
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
        nested = [name for level in self._nested for name in self._meaningful(level)]
        top = self._meaningful(self._top)
        refused = nested + [name for name in top if _CHANGES_THE_MATHS.search(name)]
        if refused:
            raise self.error(
                f"unknown keys that may change what the draft computes: "
                f"{', '.join(f'{name}={self.get(name)!r}' for name in refused)}; ignoring them "
                f"would cost acceptance without a word. Remove them only if the draft was "
                f"trained without them"
            )
        return top

    def _meaningful(self, level: Mapping[str, Any]) -> list[str]:
        """The unknown keys of one level that are not off."""
        return sorted(
            name
            for name, value in level.items()
            if name not in self._schema.known
            and value not in (None, False, "", [], {})
            and not (name in _NEUTRAL and value == _NEUTRAL[name])
        )


def read_draft_config(folder: Path) -> tuple[dict[str, Any], str]:
    """What `folder/config.json` holds, and its path.

    Raises:
        ConfigError: when there is no such file or it holds no JSON object.
    """
    path = folder / "config.json"
    if not is_there(path):
        raise ConfigError(f"{folder} holds no config.json, so it is no draft model folder")
    return read_json_object(path), str(path)


def refuse_activations(fields: Fields) -> None:
    """Raises ConfigError for any but SiLU."""
    activation = fields.get("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise fields.error(f"hidden_act={activation!r} is not supported; only silu is")


def read_draft_vocab_size(fields: Fields, vocab_size: int) -> int:
    """Rows of the draft's head, which are not more than `vocab_size`."""
    size = fields.integer("draft_vocab_size", vocab_size)
    if size > vocab_size:
        raise fields.error(
            f"draft_vocab_size={size} is larger than vocab_size={vocab_size}; a draft's "
            f"vocabulary is a part of its target's"
        )
    return size


def read_aux_layers(
    fields: Fields, names: Iterable[str], stated: str | None = None
) -> AuxLayers | None:
    """The target layers that feed `fc`; None if the config leaves them open.

    Args:
        names: of the fields that may hold them, one at most.
        stated: what they name, where the config's layout says it.
    """
    given = [
        AuxLayers(name, ids, stated) for name in names if (ids := fields.integers(name)) is not None
    ]
    if len(given) > 1:
        both = " and ".join(f"{aux.field}={list(aux.ids)}" for aux in given)
        raise fields.error(f"{both} say the same thing in two ways; leave one of them")
    return given[0] if given else None


def mask_token(fields: Fields, vocab_size: int) -> int:
    """The token in the rows of a pass that no token is known for."""
    for name in _MASK_TOKENS:
        token = fields.get(name)
        if token is None:
            continue
        if type(token) is not int or not 0 <= token < vocab_size:
            raise fields.error(f"{name} should be a token of 0..{vocab_size - 1}, got {token!r}")
        return token
    raise fields.error(f"there is no mask token: none of {', '.join(_MASK_TOKENS)} is given")


def rope_parameters(fields: Fields) -> dict[str, Any]:
    """The draft's RoPE: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    parameters: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = fields.get(name) or {}
        if not isinstance(given, dict):
            raise fields.error(f"{name} should be an object, got {given!r}")
        parameters |= given
    if unknown := _unknown_rope_keys(parameters):
        raise fields.error(f"unknown rope parameters: {', '.join(unknown)}")
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise fields.error(
            f"rope type {rope_type!r} is not supported; supported are "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    needed = _NEEDED_ROPE_KEYS.get(rope_type, ())
    if missing := [name for name in needed if parameters.get(name) is None]:
        raise fields.error(f"rope type {rope_type} needs {', '.join(missing)}")
    parameters.pop("type", None)
    parameters.setdefault("rope_theta", fields.number("rope_theta", 10000.0))
    return {**parameters, "rope_type": rope_type}


def _unknown_rope_keys(parameters: Mapping[str, Any]) -> list[str]:
    return sorted(
        f"{name}={value!r}"
        for name, value in parameters.items()
        if name not in _ROPE_KEYS.split()
        and value is not None
        and not (name == "partial_rotary_factor" and value == 1)
    )


def with_layer_defaults(
    raw: Mapping[str, Any], where: str, model_types: tuple[str, ...]
) -> dict[str, Any]:
    """A config in the layout of the speculators library, with what its `transformer_layer_config`
    leaves out.

    Args:
        model_types: of the layers that are supported.

    Raises:
        ConfigError: for a layer config of another type.
    """
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ConfigError(f"{where}: transformer_layer_config should be an object, got {layer!r}")
    model_type = layer.get("model_type")
    if model_type not in model_types:
        raise ConfigError(
            f"{where}: transformer_layer_config has model_type {model_type!r}; supported are "
            f"{' and '.join(model_types)}"
        )
    defaults = built_in_config({"model_type": model_type})
    names = [n for n in _LEFT_OUT.split() if n not in _LAYER_TYPES[model_type]]
    left_out = {name: getattr(defaults, name) for name in names}
    return {**raw, "transformer_layer_config": {**left_out, **layer}}
