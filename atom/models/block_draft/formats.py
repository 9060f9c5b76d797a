"""The published formats of block drafters, and their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from atom.config import ConfigError
from atom.models.draft_fields import SPECULATORS_KEYS, Fields, Schema, with_layer_defaults

_LAYER_KEYS = """
hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
rms_norm_eps vocab_size max_position_embeddings attention_bias mlp_bias hidden_act
tie_word_embeddings sliding_window use_sliding_window layer_types
rope_theta rope_scaling rope_parameters
"""
_BLOCK_KEYS = f"""
{_LAYER_KEYS}
architectures quantization_config block_size draft_vocab_size target_hidden_size num_target_layers
target_layer_ids layer_ids aux_hidden_state_layer_ids num_aux_hidden_states
mask_token_id dspark_noise_token_id pard_token ptd_token_id
sample_from_anchor dspark_bonus_anchor sliding_window_non_causal
is_causal causal use_swa swa_window_size
is_neox_style rope_is_neox_style use_gemma_norm attention_sink_bias attention_value_scale
input_embedding_scale output_multiplier final_logit_softcapping logit_scale
num_anchors target_model_type draft_temperature_scale expected_acceptance_length
"""
_DSPARK_KEYS = """
markov_rank markov_head_type enable_confidence_head confidence_head_with_markov
"""
_DFLASH2_KEYS = "conv_kernel_size conv_group_size selector_rank selector_top_k selector_loss_alpha"

# What stands in `dflash_config` counts before what stands at the top.
_INNER_FIRST = ("block_size", "mask_token_id")


@dataclass(frozen=True)
class BlockFormat:
    """One format.

    Attributes:
        architecture: as configs name it.
        kind: `dflash`, `dflash2` or `dspark`.
        has_markov, has_selector: which head it may have; the selector comes with convolutions.
        plain_kind: what it is without its head, too.
        samples_anchor: what a config means that does not say it.
        speculators: whether it has the layout of the speculators library.
    """

    architecture: str
    kind: str
    has_markov: bool = False
    has_selector: bool = False
    plain_kind: str | None = None
    samples_anchor: bool = False
    speculators: bool = False


_DFLASH = BlockFormat("DFlashDraftModel", "dflash")
_DFLASH2 = BlockFormat("DFlash2DraftModel", "dflash2", has_selector=True)
_DSPARK = BlockFormat("Qwen3DSparkModel", "dspark", has_markov=True, plain_kind="dflash")
_FORMATS = (
    _DFLASH,
    _DFLASH2,
    replace(_DSPARK, samples_anchor=True),
    replace(_DFLASH, architecture="DFlashSpeculator", speculators=True),
    replace(_DFLASH2, speculators=True),
    replace(_DSPARK, architecture="DSparkSpeculator", speculators=True),
)
_KEYS = {
    "dflash": _BLOCK_KEYS,
    "dflash2": _BLOCK_KEYS + _DFLASH2_KEYS,
    "dspark": _BLOCK_KEYS + _DSPARK_KEYS,
}


def block_fields(raw: Mapping[str, Any], where: str) -> tuple[Fields, BlockFormat]:
    """The keys of a block drafter's config, and its format.

    Raises:
        ConfigError: for another architecture, or one that contradicts `speculators_model_type`.
    """
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    kind = raw.get("speculators_model_type")
    is_speculators = kind is not None
    fitting = (f for f in _FORMATS if (f.architecture, f.speculators) == (name, is_speculators))
    form = next(fitting, None)
    if form is None or kind not in (None, form.kind):
        known = ", ".join(dict.fromkeys(f.architecture for f in _FORMATS))
        stated = "" if kind is None else f" with speculators_model_type {kind!r}"
        raise ConfigError(
            f"{where}: architecture {name!r}{stated} is no block drafter that is supported; "
            f"supported are {known}"
        )
    if not form.speculators:
        merged, inner = dict(raw), raw.get("dflash_config")
        if isinstance(inner, dict):
            merged |= {name: inner[name] for name in _INNER_FIRST if inner.get(name) is not None}
        return Fields(merged, where, Schema.of(("dflash_config",), _KEYS[form.kind])), form
    schema = Schema.of(("transformer_layer_config",), _KEYS[form.kind] + SPECULATORS_KEYS)
    return Fields(with_layer_defaults(raw, where, ("qwen3", "llama")), where, schema), form
