"""The configuration of a block drafter, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.config import ConfigError
from atom.model_ops.attention.metadata import MAX_DECODE_QUERIES
from atom.models.block_draft.formats import BlockFormat, block_fields
from atom.models.config.check import check_config
from atom.models.config.model_config import ModelConfig
from atom.models.draft_fields import (
    Fields,
    mask_token,
    read_aux_layers,
    read_draft_config,
    read_draft_vocab_size,
    refuse_activations,
    rope_parameters,
)
from atom.models.eagle3.aux_layers import AuxLayers
from atom.models.eagle3.card import expected_acceptance
from atom.stats import ExpectedAcceptance

# Which keys the queries of a block see, layer by layer.

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LayerMask:
    """Attributes:
    window: a query at position p sees keys after p - window; None for all of the context.
    causal: whether a query sees none of the rows after its own; else it sees the whole block.
    """

    window: int | None
    causal: bool


def read_masks(fields: Fields, form: BlockFormat, num_layers: int) -> tuple[LayerMask, ...]:
    """The mask of each layer: `is_causal` counts for all, then `causal`, then the layer's type.

    Full layers see the whole block. Layers with a window are causal within it, or as
    `sliding_window_non_causal` says in the layout of the speculators library.

    Raises:
        ConfigError: for types that are unknown, contradictory or too few.
    """
    stated = next((n for n in ("is_causal", "causal") if fields.get(n) is not None), None)
    causal = None if stated is None else fields.flag(stated)
    kinds = fields.get("layer_types")
    if kinds is None:
        if fields.flag("use_sliding_window") and fields.get("sliding_window"):
            raise fields.error("use_sliding_window=true needs layer_types")
        kinds = [_FULL] * num_layers
    known = isinstance(kinds, list) and set(kinds) <= {_FULL, _SLIDING}
    if not known or len(kinds) < num_layers:
        raise fields.error(
            f"layer_types={kinds!r} is not supported; it should say full_attention or "
            f"sliding_attention for each of {num_layers} layers"
        )
    kinds = kinds[:num_layers]
    if fields.flag("use_swa") and _SLIDING not in kinds:
        return (LayerMask(fields.integer("swa_window_size"), bool(causal)),) * num_layers
    if _SLIDING not in kinds:
        return (LayerMask(None, bool(causal)),) * num_layers
    sliding = LayerMask(_window(fields), _slides_causally(fields, form, causal))
    full = LayerMask(None, bool(causal))
    return tuple(sliding if kind == _SLIDING else full for kind in kinds)


def _slides_causally(fields: Fields, form: BlockFormat, causal: bool | None) -> bool:
    if causal is not None:
        return causal
    if form.speculators:
        return not fields.flag("sliding_window_non_causal", True)
    return True


def _window(fields: Fields) -> int:
    if fields.get("use_sliding_window") is False:
        raise fields.error(
            "use_sliding_window=false contradicts layer_types with sliding_attention"
        )
    sizes = {name: fields.get(name) for name in ("sliding_window", "swa_window_size")}
    given = {size for size in sizes.values() if size is not None}
    if len(given) != 1:
        raise fields.error(
            f"layer_types with sliding_attention needs one sliding_window, got {sizes}"
        )
    name = next(name for name, size in sizes.items() if size is not None)
    return fields.integer(name)


if TYPE_CHECKING:
    from transformers import PretrainedConfig

MARKOV_HEADS = ("vanilla", "gated", "rnn")

# Layer ids of the target, in the published formats.
_AUX_FIELDS = ("aux_hidden_state_layer_ids", "target_layer_ids", "layer_ids")
_LARGEST_RANK = 1 << 14


@dataclass(frozen=True)
class Markov:
    """A head that adds what the token before says to a position's logits.

    Attributes:
        rank: of the two matrices.
        kind: one of `MARKOV_HEADS`.
    """

    rank: int
    kind: str


@dataclass(frozen=True)
class Confidence:
    """A head that guesses whether a draft will be accepted.

    Attributes:
        with_markov: whether it reads the Markov head's vector of the token before, too.
    """

    with_markov: bool


@dataclass(frozen=True)
class Selector:
    """A head that scores pairs of a position's best tokens and the token before.

    Attributes:
        rank: of the codebooks.
        top_k: tokens of each position that it chooses from.
    """

    rank: int
    top_k: int


@dataclass(frozen=True)
class BlockConv:
    """Convolutions along the block, around each attention and MLP.

    Attributes:
        taps: rows that an output reads, its own included.
        group: channels that share a coefficient.
    """

    taps: int
    group: int


@dataclass(frozen=True)
class BlockDraftConfig:
    """A block drafter's `config.json`.

    Attributes:
        format: the published format that it has.
        network: sizes, biases and RoPE of the decoder layers, with transformers' field names.
        masks: what each layer's queries see.
        block_size: rows of a block.
        samples_anchor: whether row j drafts the token after its own position, so that all rows are
            drafts; else row j > 0 drafts the token at its position, and row 0 none.
        mask_token_id: stands in the rows after the anchor.
        draft_vocab_size: rows of the draft's output head.
        target_hidden_size: elements of one of the target's hidden states.
        aux_layers: target layers that feed `fc`, as the checkpoint names them; None for those that
            `default_aux_layer_ids` spreads.
        num_aux_hidden_states: target layers that feed `fc`.
        num_target_layers: of the target, if stated.
        markov, selector, confidence, conv: optional parts.
        interleaved: whether RoPE rotates neighbouring elements instead of halves.
        embedding_scale, value_scale, logit_scale, softcap: factors; softcap is None for no cap.
        temperature_scale: at how many times the requests' temperatures drafts are chosen.
        tied: the config ties the output head to the embedding.
        expected_acceptance: what its card says that it reaches, if it does, as a draft of the
            format's kind.
        ignored_keys: unknown keys whose names suggest no effect on the computation.
    """

    format: BlockFormat
    network: ModelConfig
    masks: tuple[LayerMask, ...]
    block_size: int
    samples_anchor: bool
    mask_token_id: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: AuxLayers | None
    num_aux_hidden_states: int
    num_target_layers: int | None
    markov: Markov | None
    selector: Selector | None
    confidence: Confidence | None
    conv: BlockConv | None
    interleaved: bool
    embedding_scale: float
    value_scale: float
    logit_scale: float
    softcap: float | None
    temperature_scale: float
    tied: bool
    expected_acceptance: ExpectedAcceptance | None = None
    ignored_keys: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        return self.format.architecture

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the draft is: `dflash`, `dflash2` or `dspark`; a DSpark draft without Markov head
        is a DFlash draft, too.
        """
        kind, plain = self.format.kind, self.format.plain_kind
        return (kind,) if plain is None or self.markov is not None else (kind, plain)

    @property
    def hidden_size(self) -> int:
        return int(self.network.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.network.vocab_size)

    @property
    def fc_fan_in(self) -> int:
        return self.num_aux_hidden_states * self.target_hidden_size

    @property
    def max_drafts(self) -> int:
        """Drafts of one block."""
        return self.block_size if self.samples_anchor else self.block_size - 1

    @classmethod
    def from_folder(cls, folder: Path) -> BlockDraftConfig:
        """Read `folder/config.json`.

        Raises:
            ConfigError: for what `from_dict` refuses, and for a missing or damaged file.
        """
        return cls.from_dict(*read_draft_config(folder))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "draft config") -> BlockDraftConfig:
        """The configuration described by `raw`; `where` names it in errors.

        Raises:
            ConfigError: for another format, contradictory or unsupported values, and unknown keys
                that may change the computation.
        """
        fields, form = block_fields(raw, where)
        ignored = fields.unknown()
        _refuse_unsupported(fields)
        network = _network(fields)
        check_config(network.to_dict(), where)
        draft_vocab_size = read_draft_vocab_size(fields, network.vocab_size)
        aux_layers = read_aux_layers(fields, _AUX_FIELDS)
        samples_anchor = _samples_anchor(fields, form)
        markov = _markov(fields, form)
        config = cls(
            format=form,
            network=network,
            masks=read_masks(fields, form, network.num_hidden_layers),
            block_size=_block_size(fields, samples_anchor),
            samples_anchor=samples_anchor,
            mask_token_id=mask_token(fields, network.vocab_size),
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=fields.integer("target_hidden_size", network.hidden_size),
            aux_layers=aux_layers,
            num_aux_hidden_states=_num_aux(fields, aux_layers, network.num_hidden_layers),
            num_target_layers=(
                None
                if fields.get("num_target_layers") is None
                else fields.integer("num_target_layers")
            ),
            markov=markov,
            selector=_selector(fields, form),
            confidence=_confidence(fields, form, markov),
            conv=_conv(fields, form, network.hidden_size),
            interleaved=_interleaved(fields),
            embedding_scale=fields.number("input_embedding_scale", 1.0),
            value_scale=fields.number("attention_value_scale", 1.0),
            logit_scale=fields.number("output_multiplier", fields.number("logit_scale", 1.0)),
            softcap=(
                None
                if fields.get("final_logit_softcapping") is None
                else fields.number("final_logit_softcapping", 1.0)
            ),
            temperature_scale=fields.number("draft_temperature_scale", 1.0),
            tied=fields.flag("tie_word_embeddings"),
            expected_acceptance=expected_acceptance(fields, form.kind),
            ignored_keys=tuple(ignored),
        )
        if config.selector is not None and draft_vocab_size != network.vocab_size:
            raise fields.error(
                f"a {form.kind} draft has the target's whole vocabulary, got draft_vocab_size="
                f"{draft_vocab_size} of {network.vocab_size}"
            )
        return config

    def check_against_target(self, target: PretrainedConfig) -> None:
        """Refuse a draft that was made for another target.

        Args:
            target: the target's text configuration.

        Raises:
            ConfigError: with the numbers of both.
        """
        pairs = {
            "target_hidden_size": (self.target_hidden_size, target.hidden_size, "hidden_size"),
            "vocab_size": (self.vocab_size, target.vocab_size, "vocab_size"),
        }
        if self.num_target_layers is not None:
            pairs["num_target_layers"] = (
                self.num_target_layers,
                target.num_hidden_layers,
                "num_hidden_layers",
            )
        for name, (ours, theirs, field) in pairs.items():
            if ours != theirs:
                raise ConfigError(
                    f"the draft's {name} is {ours} and the target's {field} is {theirs}: the draft "
                    f"belongs to another target"
                )

    def default_aux_layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """The boundary ids for a config without ids, as the reference spreads them: layer outputs
        from 1 to the last but two, as many as the draft has layers.

        Raises:
            ValueError: when the target has too few layers.
        """
        count = self.num_aux_hidden_states
        if count == 1:
            return (num_layers // 2 + 1,)
        ids = tuple(round(1 + i * (num_layers - 4) / (count - 1)) + 1 for i in range(count))
        if len(set(ids)) != count or num_layers < 4:
            raise ValueError(
                f"no {count} default aux layer ids for a model of {num_layers} layers; name them"
            )
        return ids


def _refuse_unsupported(fields: Fields) -> None:
    for name in ("use_gemma_norm", "attention_sink_bias", "mlp_bias"):
        if fields.flag(name):
            raise fields.error(f"{name}=true is not supported for a block drafter")
    refuse_activations(fields)


def _network(fields: Fields) -> ModelConfig:
    heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    return ModelConfig.from_dict(
        {
            "num_hidden_layers": fields.integer("num_hidden_layers"),
            "hidden_size": hidden_size,
            "intermediate_size": fields.integer("intermediate_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": fields.integer("num_key_value_heads", heads),
            "head_dim": fields.integer("head_dim", max(hidden_size // heads, 1)),
            "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
            "vocab_size": fields.integer("vocab_size"),
            "max_position_embeddings": fields.integer("max_position_embeddings", 32768),
            "attention_bias": fields.flag("attention_bias"),
            "hidden_act": "silu",
            "rope_parameters": rope_parameters(fields),
        }
    )


def _samples_anchor(fields: Fields, form: BlockFormat) -> bool:
    given, opposite = fields.get("sample_from_anchor"), fields.get("dspark_bonus_anchor")
    if given is not None and opposite is not None and given is opposite:
        raise fields.error(
            f"sample_from_anchor={given} contradicts dspark_bonus_anchor={opposite}, its opposite"
        )
    if given is None and opposite is not None:
        return not fields.flag("dspark_bonus_anchor")
    return fields.flag("sample_from_anchor", form.samples_anchor)


def _block_size(fields: Fields, samples_anchor: bool) -> int:
    # The nested one counts first.
    size, least = fields.integer("block_size"), 1 if samples_anchor else 2
    if not least <= size <= MAX_DECODE_QUERIES:
        raise fields.error(
            f"block_size={size} is not supported; it should be {least} to {MAX_DECODE_QUERIES}"
        )
    return size


def _num_aux(fields: Fields, aux_layers: AuxLayers | None, num_layers: int) -> int:
    named = num_layers if aux_layers is None else len(aux_layers.ids)
    count = fields.integer("num_aux_hidden_states", named)
    if count != named:
        raise fields.error(f"num_aux_hidden_states={count} contradicts {named} layer ids")
    return count


def _markov(fields: Fields, form: BlockFormat) -> Markov | None:
    rank = fields.get("markov_rank")
    if not form.has_markov or rank == 0:
        return None
    kind = fields.get("markov_head_type") or MARKOV_HEADS[0]
    if kind not in MARKOV_HEADS:
        raise fields.error(
            f"markov_head_type={kind!r} is not supported; supported are {', '.join(MARKOV_HEADS)}"
        )
    return Markov(_at_most("markov_rank", fields.integer("markov_rank", 256), fields), kind)


def _confidence(fields: Fields, form: BlockFormat, markov: Markov | None) -> Confidence | None:
    if not form.has_markov or not fields.flag("enable_confidence_head", form.speculators):
        return None
    with_markov = fields.flag("confidence_head_with_markov", form.speculators)
    return Confidence(with_markov and markov is not None)


def _selector(fields: Fields, form: BlockFormat) -> Selector | None:
    if not form.has_selector:
        return None
    rank = _at_most("selector_rank", fields.integer("selector_rank", 256), fields)
    return Selector(rank, fields.integer("selector_top_k", 16))


def _conv(fields: Fields, form: BlockFormat, hidden_size: int) -> BlockConv | None:
    if not form.has_selector:
        return None
    taps, group = fields.integer("conv_kernel_size", 2), fields.integer("conv_group_size", 16)
    if hidden_size % group:
        raise fields.error(f"conv_group_size={group} does not divide hidden_size={hidden_size}")
    return BlockConv(_at_most("conv_kernel_size", taps, fields, MAX_DECODE_QUERIES), group)


def _at_most(name: str, value: int, fields: Fields, most: int = _LARGEST_RANK) -> int:
    if value > most:
        raise fields.error(f"{name}={value} is more than {most}")
    return value


def _interleaved(fields: Fields) -> bool:
    names = ("is_neox_style", "rope_is_neox_style")
    styles = {fields.flag(name) for name in names if fields.get(name) is not None}
    if len(styles) > 1:
        raise fields.error(f"{' and '.join(names)} contradict each other")
    return styles == {False}
