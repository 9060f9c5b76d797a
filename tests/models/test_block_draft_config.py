"""The configs of block drafters: what they mean, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from spec_decode.block_bench import DFLASH, DFLASH2, DRAFTS, DSPARK, LAYER
from transformers import LlamaConfig

from atom.config import ConfigError
from atom.models.block_draft.config import (
    BlockConv,
    BlockDraftConfig,
    Confidence,
    LayerMask,
    Markov,
    Selector,
)
from atom.stats import ExpectedAcceptance

FULL, CAUSAL = LayerMask(None, False), LayerMask(None, True)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2048}


def read(raw: dict[str, Any], **changes: Any) -> BlockDraftConfig:
    return BlockDraftConfig.from_dict({**raw, **changes})


def inner(raw: dict[str, Any], **changes: Any) -> BlockDraftConfig:
    """Changed within `dflash_config`."""
    return read(raw, dflash_config={**raw["dflash_config"], **changes})


def test_published_formats() -> None:
    dflash, dflash2, dspark = read(DFLASH), read(DFLASH2), read(DSPARK)
    assert (dflash.kinds, dflash.samples_anchor, dflash.max_drafts) == (("dflash",), False, 4)
    assert dflash.mask_token_id == 5
    assert (dflash.markov, dflash.selector, dflash.conv, dflash.confidence) == (None,) * 4
    assert (dflash2.selector, dflash2.conv) == (Selector(8, 6), BlockConv(2, 8))
    assert (dflash2.softcap, dflash2.logit_scale) == (3.0, 0.7)
    assert (dspark.kinds, dspark.samples_anchor, dspark.max_drafts) == (("dspark",), True, 5)
    assert (dspark.markov, dspark.confidence) == (Markov(8, "vanilla"), Confidence(True))
    plain = read(DSPARK, markov_rank=0, enable_confidence_head=False)
    assert (plain.kinds, plain.markov, plain.max_drafts) == (("dspark", "dflash"), None, 5)


def test_the_draft_of_kimi_k3() -> None:
    """Its number of target layers is that of hidden states; the target's has another name."""
    raw = {k: v for k, v in DRAFTS["dspark kimi"].raw.items() if k != "block_size"}
    config = read(raw, target_num_hidden_layers=93)
    assert (config.kinds, config.samples_anchor, config.max_drafts) == (("dspark",), True, 7)
    assert config.masks == (FULL, FULL)
    assert (config.interleaved, config.shares_vocabulary) == (True, True)
    assert ("num_target_layers", 93, "num_hidden_layers") in config.shared_with_target()
    assert config.network.rope_parameters["factor"] == 32
    for changes, message in (
        ({"num_target_layers": 5}, "num_aux_hidden_states=5 contradicts the ids"),
        ({"kv_lora_rank": None}, "K3DSparkModel contradicts kv_lora_rank=None"),
        ({"v_head_dim": None}, "v_head_dim is missing"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate=True"),
        ({"is_causal": True}, "see all of the context and themselves"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(raw, **changes)
    with pytest.raises(ConfigError, match="Qwen3DSparkModel contradicts kv_lora_rank=8"):
        read(DSPARK, kv_lora_rank=8)


CARD = {"tokens_per_forward": 2.5, "num_speculative_tokens": 3, "data": "GSM8K, greedy"}


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark", "speculators dspark"])
def test_a_card_may_state_its_acceptance_length(name: str) -> None:
    draft = DRAFTS[name]
    assert read(draft.raw).expected_acceptance is None
    config = read(draft.raw, expected_acceptance_length=CARD)
    assert config.expected_acceptance == ExpectedAcceptance(source=draft.kind, **CARD)
    assert config.ignored_keys == ()
    with pytest.raises(ConfigError, match="should be 1 to 4 with 3 drafts, got 9"):
        read(draft.raw, expected_acceptance_length={**CARD, "tokens_per_forward": 9})


def test_the_speculators_layout() -> None:
    raw = DRAFTS["speculators dspark"].raw
    config = read(raw)
    assert (config.draft_vocab_size, config.vocab_size) == (40, 96)
    assert config.samples_anchor
    assert not read({k: v for k, v in raw.items() if k != "sample_from_anchor"}).samples_anchor
    old = {k: v for k, v in raw.items() if k != "sample_from_anchor"}
    assert read(old, dspark_bonus_anchor=False).samples_anchor
    # What a layer config leaves out is the default of its model type.
    layer = {k: v for k, v in LAYER.items() if k not in ("head_dim", "num_key_value_heads")}
    wide = {"model_type": "qwen3", **layer, "num_attention_heads": 32}
    network = read(raw, transformer_layer_config=wide).network
    assert (network.head_dim, network.num_key_value_heads) == (128, 32)
    network = read(raw, transformer_layer_config={"model_type": "llama", **layer}).network
    assert (network.head_dim, network.num_key_value_heads) == (8, 4)


@pytest.mark.parametrize(
    ("raw", "changes", "masks"),
    [
        (DFLASH, {}, (FULL, FULL)),
        (DFLASH, SLIDING, (LayerMask(2048, True), FULL)),
        (DFLASH, {"is_causal": True}, (CAUSAL, CAUSAL)),
        (DFLASH, {**SLIDING, "is_causal": False}, (LayerMask(2048, False), FULL)),
    ],
)
def test_masks(raw: dict[str, Any], changes: dict[str, Any], masks: object) -> None:
    assert read(raw, **changes).masks == masks


def test_masks_of_nested_keys() -> None:
    assert inner(DFLASH, causal=True).masks == (CAUSAL, CAUSAL)
    assert inner({**DFLASH, "is_causal": False}, causal=True).masks == (FULL, FULL)
    swa = inner(DFLASH, use_swa=True, swa_window_size=64)
    assert swa.masks == (LayerMask(64, False),) * 2
    raw = DRAFTS["speculators dflash"].raw
    layer = {"transformer_layer_config": {"model_type": "qwen3", **LAYER, **SLIDING}}
    assert read(raw, **layer).masks == (LayerMask(2048, False), FULL)
    causal = read(raw, **layer, sliding_window_non_causal=False)
    assert causal.masks == (LayerMask(2048, True), FULL)


def test_which_of_two_places_counts() -> None:
    assert inner(DFLASH, block_size=7).block_size == 7
    assert read(DFLASH, mask_token_id=9).mask_token_id == 5
    assert read(DFLASH).aux_layers.resolve(8)[0] == (2, 4, 6)
    assert read(DRAFTS["speculators dflash"].raw).aux_layers.resolve(8)[0] == (2, 4, 6)
    assert inner(DFLASH, target_layer_ids=[-1, 1]).aux_layers.resolve(8)[0] == (0, 2)
    assert inner(DFLASH, target_layer_ids=None, layer_ids=[2, 4]).aux_layers.resolve(8)[0] == (2, 4)


def test_default_layers_are_spread() -> None:
    config = inner(DFLASH, target_layer_ids=None)
    assert config.aux_layers is None
    assert config.default_aux_layer_ids(36) == (2, 34)
    five = inner({**DFLASH, "num_hidden_layers": 5}, target_layer_ids=None)
    assert five.default_aux_layer_ids(36) == (2, 10, 18, 26, 34)  # outputs 1, 9, 17, 25, 33
    one = inner({**DFLASH, "num_hidden_layers": 1}, target_layer_ids=None)
    assert one.default_aux_layer_ids(36) == (19,)
    with pytest.raises(ValueError, match="no 5 default"):
        five.default_aux_layer_ids(3)


@pytest.mark.parametrize(
    ("raw", "changes", "message"),
    [
        (DFLASH, {"architectures": ["MuseGlimmerAssistantModel"]}, "MuseGlimmer.* no block"),
        (DFLASH, {"architectures": ["K3DSparkModel"]}, "K3DSparkModel"),
        (DFLASH, {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        (DFLASH, {"speculators_model_type": "dflash"}, "with speculators_model_type 'dflash'"),
        (DFLASH, {"attn_gate_rank": 4}, "attn_gate_rank=4"),
        (DFLASH, {"use_gemma_norm": True}, "use_gemma_norm"),
        (DFLASH, {"attention_sink_bias": True}, "attention_sink_bias"),
        (DFLASH, {"block_size": 17}, "block_size=17"),
        (DFLASH, {"block_size": 1}, "block_size=1"),
        (DFLASH, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (DFLASH, {"use_sliding_window": False, **SLIDING}, "contradicts"),
        (DFLASH, {**SLIDING, "sliding_window": None}, "needs one sliding_window"),
        (DFLASH, {"layer_types": ["full_attention"]}, "for each of 2 layers"),
        (DFLASH, {"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        (DFLASH, {"rope_scaling": {"type": "spiral"}}, "spiral"),
        (DSPARK, {"mask_token_id": None}, "missing required field `mask_token_id`"),
        (DSPARK, {"mask_token_id": 96}, "mask_token_id should be a token of 0..95"),
        (DSPARK, {"markov_head_type": "lstm"}, "lstm"),
        (DSPARK, {"sample_from_anchor": True, "dspark_bonus_anchor": True}, "contradicts"),
        (DSPARK, {"aux_hidden_state_layer_ids": [1, 2, 3]}, "in two ways"),
        (DFLASH2, {"draft_vocab_size": 40}, "whole vocabulary"),
    ],
)
def test_what_is_refused(raw: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(raw, **changes)


def test_unknown_nested_keys_are_refused_and_harmless_ones_listed() -> None:
    with pytest.raises(ConfigError, match="rank_bonus=3"):
        inner(DFLASH, rank_bonus=3)
    assert read(DFLASH, comment="made on Monday").ignored_keys == ("comment",)


def test_other_targets_are_refused() -> None:
    fits = {"hidden_size": 32, "vocab_size": 96, "num_hidden_layers": 8}
    read(DFLASH, num_target_layers=8).check_against_target(LlamaConfig(**fits))
    for changed, message in (
        ({"hidden_size": 64}, "target_hidden_size is 32"),
        ({"vocab_size": 97}, "vocab_size is 96"),
        ({"num_hidden_layers": 9}, "num_target_layers is 8"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(DFLASH, num_target_layers=8).check_against_target(
                LlamaConfig(**{**fits, **changed})
            )
