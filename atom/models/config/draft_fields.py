"""The keys of drafts' `config.json`: their types, which others are refused and why, and which have
no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from atom.config import ConfigError
from atom.model_ops.rotary import SUPPORTED_ROPE_TYPES
from atom.models.config.aux_layers import AUX_FIELDS, BOUNDARY, AuxLayers
from atom.models.config.check import check_config
from atom.models.config.file import is_there, read_json_object
from atom.models.config.hf_configs import built_in_config
from atom.models.config.model_config import ModelConfig, PretrainedConfig
from atom.stats import ExpectedAcceptance

F = TypeVar("F", bound="DraftFields")

Count = Annotated[int, msgspec.Meta(ge=1)]
Factor = Annotated[float, msgspec.Meta(gt=0)]
Ids = Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]

# Keys that are refused, except with these values, and what others mean. A format that computes one
# of them has it as a field.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "use_aux_hidden_state": ((True,), "drafts read hidden states from between the target's layers"),
    "hidden_act": (("silu", "swish"), "only silu is computed"),
    "mlp_bias": ((False,), "its MLP has no biases here"),
    "norm_before_fc": ((False,), "what it means is known of Eagle3 drafts alone"),
    "additional_fc": ((False,), "there is one fc"),
    "use_gemma_norm": ((False,), "norms multiply by their weights, not by 1 + weight"),
    "attention_sink_bias": ((False,), "attention has no sinks"),
    "use_input_layernorm_in_first_layer": ((True,), "the embedding is normed"),
    "use_last_layernorm": ((True,), "the head reads normed states"),
    "use_mtp_layernorm": ((False,), "hidden states have the norms of Eagle3"),
    "eh_proj_before_attn": ((False,), "attention reads embedding and hidden state side by side"),
    "parallel_draft_step": ((1,), "heads beside the layer (Medusa) are not computed"),
    "parallel_drafting": ((False,), "it makes one draft after the other"),
    "logit_scale": ((1,), "logits are not scaled"),
    "logits_scaling": ((1,), "logits are not scaled"),
    "partial_rotary_factor": ((1,), "whole heads are rotated"),
    "embedding_multiplier": ((1,), "embeddings are not scaled"),
    "residual_multiplier": ((1,), "layers' outputs are not scaled"),
}
# Other keys that no format has: with such a name they may change what is computed.
_CHANGES_THE_MATHS = re.compile(
    r"norm|rope|rotary|scal|multiplier|bias|fc|gate|residual|softcap|cap$|attn|attention|embed"
    r"|window|logit|_eps|epsilon|_act$|activation|aux|head|temperature"
)
# Without effect on what a draft computes.
_HARMLESS = """
model_type torch_dtype dtype transformers_version auto_map _name_or_path quantization_config
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
eagle_decoder_type num_target_layers num_anchors target_model_type target_layer_count
speculators_version speculators_config embed_requires_grad
"""
# Names of the mask token; the first that is given counts.
_MASK_TOKENS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_ROPE_KEYS = """
rope_type rope_theta factor original_max_position_embeddings low_freq_factor
high_freq_factor beta_fast beta_slow mscale mscale_all_dim attention_factor truncate
"""
# How drafts of models that see rotate by time, row and column: here they do by positions, which in
# text is the same.
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")
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
# What transformers leaves out of a saved config because it is the default of the model type.
_LEFT_OUT = """
hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
rms_norm_eps vocab_size max_position_embeddings attention_bias hidden_act
"""
# Types of speculators' layers, and what follows from the other sizes if it is left out.
_LAYER_TYPES: Mapping[str, tuple[str, ...]] = {
    "qwen3": (),
    "llama": ("head_dim", "num_key_value_heads"),
}
_LAYER_CONFIG = "transformer_layer_config"


class Card(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The acceptance length that a draft reached, bonus token included, and on what.

    Attributes:
        data: that it was measured on.
    """

    tokens_per_forward: Annotated[float, msgspec.Meta(ge=1)]
    num_speculative_tokens: Count
    data: Annotated[str, msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        most = self.num_speculative_tokens
        if self.tokens_per_forward > most + 1:
            raise ValueError(
                f"tokens_per_forward should be 1 to {most + 1} with {most} drafts, got "
                f"{self.tokens_per_forward!r}"
            )


class DraftFields(msgspec.Struct, frozen=True, kw_only=True):
    """What the configs of all drafts say: fields have the names and defaults of keys, if nothing
    else is said.

    Attributes:
        draft_vocab_size: rows of the draft's output head.
        target_hidden_size: elements of one of the target's hidden states.
        num_aux_hidden_states: target layers that feed `fc`.
        mask_token_id: stands in the rows of a pass that no token is known for.
        temperature_scale: at how many times the requests' temperatures drafts are chosen.
        tied: the config ties the output head to the embedding.
        card: what the draft's card says that it reaches, if it does.
        kind: as which it drafts; its name in the statistics.
        ignored_keys: unknown keys whose names suggest no effect on the computation.
    """

    # Objects whose keys count as if they stood at the top, and keys without effect.
    nested: ClassVar[tuple[str, ...]] = ()
    # Keys that count there before those at the top.
    inner_first: ClassVar[tuple[str, ...]] = ()
    unused: ClassVar[str] = ""
    # Of transformer_layer_config.
    layer_types_known: ClassVar[tuple[str, ...]] = ("llama",)

    architectures: tuple[str, ...]
    speculators_model_type: str | None = None
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count | None = None
    vocab_size: Count
    draft_vocab_size: Count
    target_hidden_size: Count
    max_position_embeddings: Count = 2048
    rms_norm_eps: Factor = 1e-6
    attention_bias: bool = False
    q_lora_rank: Count | None = None
    kv_lora_rank: Count | None = None
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Count | None = None
    v_head_dim: Count | None = None
    rope_interleave: bool = True
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    layer_types: tuple[str, ...] | None = None
    rope_theta: Factor = 10000.0
    rope_scaling: dict[str, Any] = {}
    rope_parameters: dict[str, Any] = {}
    eagle_aux_hidden_state_layer_ids: Ids | None = None
    aux_hidden_state_layer_ids: Ids | None = None
    target_layer_ids: Ids | None = None
    layer_ids: Ids | None = None
    num_aux_hidden_states: Count
    mask_token_id: int | None = None
    temperature_scale: Factor = msgspec.field(default=1.0, name="draft_temperature_scale")
    tied: bool = msgspec.field(default=False, name="tie_word_embeddings")
    card: Card | None = msgspec.field(default=None, name="expected_acceptance_length")
    kind: str = msgspec.field(default="", name="(kind)")
    ignored_keys: tuple[str, ...] = msgspec.field(default=(), name="(ignored)")

    def __post_init__(self) -> None:
        """Refuse what contradicts itself; msgspec reports a ValueError as any wrong type."""
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} is larger than vocab_size="
                f"{self.vocab_size}; a draft's vocabulary is a part of its target's"
            )
        token = self.mask_token_id
        if token is not None and not 0 <= token < self.vocab_size:
            raise ValueError(
                f"mask_token_id should be a token of 0..{self.vocab_size - 1}, got {token}"
            )
        aux, count = self.aux_layers, self.num_aux_hidden_states
        if aux is not None and count != len(aux.ids):
            raise ValueError(
                f"num_aux_hidden_states={count} contradicts the ids {list(aux.ids)} of "
                f"{aux.field}, which are {len(aux.ids)}"
            )

    @classmethod
    def from_folder(cls: type[F], folder: Path) -> F:
        """Read `folder/config.json`.

        Raises:
            ConfigError: for what `from_dict` refuses, and for a missing or damaged file.
        """
        path = folder / "config.json"
        if not is_there(path):
            raise ConfigError(f"{folder} holds no config.json, so it is no draft model folder")
        return cls.from_dict(read_json_object(path), str(path))

    @classmethod
    def from_dict(cls: type[F], raw: Mapping[str, Any], where: str = "draft config") -> F:
        """The configuration described by `raw`; `where` names it in errors.

        Raises:
            ConfigError: for another format, contradictory or unsupported values, and unknown keys
                that may change the computation.
        """
        try:
            cls.check_format(raw)
            if raw.get("speculators_model_type") is not None:
                raw = {**raw, _LAYER_CONFIG: _layer_config(raw, cls.layer_types_known)}
            check_config(raw, where)
            flat = _flatten(cls, raw)
            ignored = _refuse(cls, flat, raw)
            cls.complete(flat)
            known = {*cls._keys(), "(kind)"}
            read = {name: value for name, value in flat.items() if name in known}
            config = msgspec.convert({**read, "(ignored)": ignored}, cls)
            check_config(config.network.to_dict(), where)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {_explained(str(error), raw, cls.nested)}") from None
        except ConfigError as error:
            told = str(error)
            raise ConfigError(told if told.startswith(where) else f"{where}: {told}") from None
        return config

    @classmethod
    def _keys(cls) -> frozenset[str]:
        names = (field.encode_name for field in msgspec.structs.fields(cls))
        return frozenset(name for name in names if not name.startswith("("))

    @classmethod
    def check_format(cls, raw: Mapping[str, Any]) -> None:
        """Raises ConfigError for another format."""

    @classmethod
    def complete(cls, flat: dict[str, Any]) -> None:
        """Fill in what follows from other keys."""
        hidden, heads = flat.get("hidden_size"), flat.get("num_attention_heads")
        flat.setdefault("draft_vocab_size", flat.get("vocab_size"))
        flat.setdefault("target_hidden_size", hidden)
        flat.setdefault("num_key_value_heads", heads)
        for name in _MASK_TOKENS:
            if name in flat:
                flat.setdefault("mask_token_id", flat[name])
        for name in ("draft_vocab_size", "target_hidden_size", "num_key_value_heads"):
            if flat[name] is None:  # so what it follows from is reported
                del flat[name]

    @property
    def network(self) -> ModelConfig:
        """Sizes, biases and RoPE of the layers, with transformers' field names."""
        return ModelConfig.from_dict(self.network_fields())

    def network_fields(self) -> dict[str, Any]:
        return {
            "num_hidden_layers": self.num_hidden_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim or max(self.hidden_size // self.num_attention_heads, 1),
            "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": self.attention_bias,
            "hidden_act": "silu",
            "rope_parameters": self._rope(),
        }

    def check_latents(self) -> None:
        """Refuse latent attention without all of its sizes."""
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing, got None")

    def with_latents(self, fields: dict[str, Any]) -> dict[str, Any]:
        """`network_fields` of a network with latent attention."""
        return {
            **{k: v for k, v in fields.items() if k != "num_key_value_heads"},
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "head_dim": self.qk_rope_head_dim,  # the rotary dimensions
            "v_head_dim": self.v_head_dim,
            "rope_interleave": self.rope_interleave,
        }

    def _rope(self) -> dict[str, Any]:
        parameters = {**self.rope_scaling, **self.rope_parameters}
        kind = parameters.pop("type", None)
        rope_type = parameters.get("rope_type") or kind or "default"
        sections, _ = (parameters.pop(name, None) for name in _MROPE_KEYS)
        if sections and rope_type == "mrope":
            rope_type = "default"
        unknown = {
            k: v for k, v in parameters.items() if k not in _ROPE_KEYS.split() and v is not None
        }
        if unknown.get("partial_rotary_factor") == 1:
            unknown.pop("partial_rotary_factor")
        if unknown:
            told = ", ".join(f"{name}={value!r}" for name, value in sorted(unknown.items()))
            raise ConfigError(f"unknown rope parameters: {told}")
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise ConfigError(
                f"rope type {rope_type!r} is not supported; supported are "
                f"{', '.join(SUPPORTED_ROPE_TYPES)}"
            )
        needed = _NEEDED_ROPE_KEYS.get(rope_type, ())
        if missing := [name for name in needed if parameters.get(name) is None]:
            raise ConfigError(f"rope type {rope_type} needs {', '.join(missing)}")
        return {"rope_theta": self.rope_theta, **parameters, "rope_type": rope_type}

    @property
    def architecture(self) -> str:
        return self.architectures[0]

    @property
    def aux_layers(self) -> AuxLayers | None:
        """Target layers that feed `fc`, as the checkpoint names them; None if it does not.

        Raises:
            ValueError: when it names them twice.
        """
        stated = None if self.speculators_model_type is None else BOUNDARY
        given = [
            AuxLayers(name, ids, stated) for name in AUX_FIELDS if (ids := getattr(self, name))
        ]
        if len(given) > 1:
            both = " and ".join(f"{aux.field}={list(aux.ids)}" for aux in given)
            raise ValueError(f"{both} say the same thing in two ways; leave one of them")
        return given[0] if given else None

    @property
    def shares_vocabulary(self) -> bool:
        """Whether embedding and head are the target's, although the checkpoint has copies."""
        return False

    @property
    def fc_fan_in(self) -> int:
        return self.num_aux_hidden_states * self.target_hidden_size

    @property
    def expected_acceptance(self) -> ExpectedAcceptance | None:
        """What its card says that it reaches, if it does."""
        if self.card is None:
            return None
        return ExpectedAcceptance(source=self.kind, **msgspec.structs.asdict(self.card))

    def check_against_target(self, target: PretrainedConfig) -> None:
        """Refuse a draft that was made for another target.

        Args:
            target: the target's text configuration.

        Raises:
            ConfigError: with the numbers of both.
        """
        for name, ours, field in self.shared_with_target():
            if (theirs := getattr(target, field)) != ours:
                raise ConfigError(
                    f"the draft's {name} is {ours} and the target's {field} is {theirs}: the "
                    f"draft belongs to another target"
                )

    def shared_with_target(self) -> list[tuple[str, int, str]]:
        """Names and values that a target's fields of these names have, too."""
        return [
            ("target_hidden_size", self.target_hidden_size, "hidden_size"),
            ("vocab_size", self.vocab_size, "vocab_size"),
        ]


def _flatten(cls: type[DraftFields], raw: Mapping[str, Any]) -> dict[str, Any]:
    """All keys that are not null, those at the top first."""
    levels = [raw]
    for name in (*cls.nested, _LAYER_CONFIG):
        level = raw.get(name) or {}
        if not isinstance(level, dict):
            raise ConfigError(f"{name} should be an object, got {level!r}")
        levels.append(level)
    inner = [level for level in levels[1:] for name in cls.inner_first if name in level]
    flat = {n: level[n] for level in inner for n in cls.inner_first if level.get(n) is not None}
    for level in levels:
        for name, value in level.items():
            if value is not None and name not in (*cls.nested, _LAYER_CONFIG):
                flat.setdefault(name, value)
    return flat


def _layer_config(raw: Mapping[str, Any], model_types: tuple[str, ...]) -> Mapping[str, Any]:
    """The layers' config of the layout of speculators, with what is left out of it."""
    layer = raw.get(_LAYER_CONFIG)
    if not isinstance(layer, dict):
        raise ConfigError(f"{_LAYER_CONFIG} should be an object, got {layer!r}")
    model_type = layer.get("model_type")
    if model_type not in model_types:
        raise ConfigError(
            f"{_LAYER_CONFIG} has model_type {model_type!r}; supported are "
            f"{' and '.join(model_types)}"
        )
    defaults = built_in_config({"model_type": model_type})
    names = [n for n in _LEFT_OUT.split() if n not in _LAYER_TYPES[model_type]]
    return {**{name: getattr(defaults, name) for name in names}, **layer}


def _refuse(
    cls: type[DraftFields], flat: Mapping[str, Any], top: Mapping[str, Any]
) -> tuple[str, ...]:
    """The keys that may be ignored.

    Raises:
        ConfigError: naming the others: those of `_REFUSED`, all unknown ones in nested objects, and
            those at the top whose names speak of the computation.
    """
    known = cls._keys() | {*_MASK_TOKENS, *_HARMLESS.split(), *cls.unused.split()}
    refused, ignored = [], []
    for name in sorted(flat):
        value = flat[name]
        if name in known:
            continue
        if name in _REFUSED:
            allowed, reason = _REFUSED[name]
            if value not in allowed:
                refused.append(f"{name}={value!r} ({reason})")
        elif value in (False, "", [], {}):
            continue
        elif name not in top or _CHANGES_THE_MATHS.search(name):
            refused.append(f"{name}={value!r}")
        else:
            ignored.append(name)
    if refused:
        raise ConfigError(
            f"keys that are not supported and may change what the draft computes: "
            f"{', '.join(refused)}; ignoring them would cost acceptance without a word. Remove "
            f"them only if the draft was trained without them"
        )
    return tuple(ignored)


_PLACE = re.compile(r"(.*) - at `\$\.(\w+)(.*)`", re.DOTALL)


def _explained(message: str, raw: Mapping[str, Any], nested: tuple[str, ...]) -> str:
    """msgspec's message with the key first, and the value."""
    if (match := _PLACE.fullmatch(message)) is None:
        return message
    told, name, place = match.groups()
    levels = [raw, *(raw.get(n) or {} for n in (*nested, _LAYER_CONFIG))]
    value = next((level[name] for level in levels if level.get(name) is not None), None)
    return f"{name}={value!r}{f' ({place.lstrip(chr(46))})' if place else ''}: {told}"
