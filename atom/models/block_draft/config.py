"""The configuration of a block drafter, validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from atom.config import ConfigError
from atom.model_ops.attention.metadata import MAX_DECODE_QUERIES
from atom.models.block_draft.formats import BlockFormat, find_format
from atom.models.config.draft_fields import Count, DraftFields, Factor

_FULL, _SLIDING = "full_attention", "sliding_attention"
_Rank = Annotated[int, msgspec.Meta(ge=1, le=1 << 14)]
# Keys of parts that formats have, and the others do not.
_MARKOV_KEYS = (
    *("markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)
# Rows of a block of a format that does not say it: as many as its published figures were made with.
_LATENT_BLOCK = 7
_SELECTOR_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True)
class LayerMask:
    """Which keys the queries of a block see in a layer.

    Attributes:
        window: a query at position p sees keys after p - window; None for all of the context.
        causal: whether a query sees none of the rows after its own; else it sees the whole block.
    """

    window: int | None
    causal: bool


@dataclass(frozen=True)
class Markov:
    """A head that adds what the token before says to a position's logits.

    Attributes:
        rank: of the two matrices.
        kind: `vanilla`, `gated` or `rnn`.
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


class BlockDraftConfig(DraftFields, frozen=True, kw_only=True):
    """A block drafter's `config.json`.

    Attributes:
        block_size: rows of a block.
        embedding_scale, value_scale, logit_scale, softcap: factors; softcap is None for no cap.
    """

    nested: ClassVar = ("dflash_config",)
    inner_first: ClassVar = ("block_size", "mask_token_id")
    unused: ClassVar = "selector_loss_alpha logit_scale target_num_hidden_layers"
    layer_types_known: ClassVar = ("qwen3", "llama")

    max_position_embeddings: Count = 32768
    num_target_layers: Count | None = None
    mask_token_id: int
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_DECODE_QUERIES)]
    sample_from_anchor: bool | None = None
    dspark_bonus_anchor: bool | None = None
    sliding_window_non_causal: bool = True
    is_causal: bool | None = None
    causal: bool | None = None
    use_swa: bool = False
    swa_window_size: Count | None = None
    is_neox_style: bool | None = None
    rope_is_neox_style: bool | None = None
    value_scale: Factor = msgspec.field(default=1.0, name="attention_value_scale")
    embedding_scale: Factor = msgspec.field(default=1.0, name="input_embedding_scale")
    logit_scale: Factor = msgspec.field(default=1.0, name="output_multiplier")
    softcap: Factor | None = msgspec.field(default=None, name="final_logit_softcapping")
    markov_rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 14)] = 256
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    selector_rank: _Rank = 256
    selector_top_k: Count = 16
    conv_kernel_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_DECODE_QUERIES)] = 2
    conv_group_size: Count = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        bonus = self.dspark_bonus_anchor
        if bonus is not None and bonus is self.sample_from_anchor:
            raise ValueError(
                f"sample_from_anchor={self.sample_from_anchor} contradicts dspark_bonus_anchor="
                f"{bonus}, its opposite"
            )
        if self.max_drafts < 1:
            raise ValueError(f"block_size={self.block_size} is not supported; it leaves no drafts")
        if {self.is_neox_style, self.rope_is_neox_style} == {True, False}:
            raise ValueError("is_neox_style and rope_is_neox_style contradict each other")
        self._check_masks()
        if self.format.has_latents != (self.kv_lora_rank is not None):
            raise ValueError(
                f"architecture {self.format.architecture} contradicts kv_lora_rank="
                f"{self.kv_lora_rank!r}"
            )
        if self.format.has_latents:
            self.check_latents()
            if set(self.masks) != {LayerMask(None, False)}:
                raise ValueError("blocks of latent attention see all of the context and themselves")
        if self.conv is not None and self.hidden_size % self.conv.group:
            raise ValueError(
                f"conv_group_size={self.conv.group} does not divide hidden_size={self.hidden_size}"
            )
        if self.selector is not None and self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                f"a {self.format.kind} draft has the target's whole vocabulary, got "
                f"draft_vocab_size={self.draft_vocab_size} of {self.vocab_size}"
            )

    def _check_masks(self) -> None:
        kinds, layers = self.layer_types, self.num_hidden_layers
        if kinds is None:
            if self.use_sliding_window and self.sliding_window:
                raise ValueError("use_sliding_window=true needs layer_types")
        elif not set(kinds) <= {_FULL, _SLIDING} or len(kinds) < layers:
            raise ValueError(
                f"layer_types={list(kinds)!r} is not supported; it should say full_attention or "
                f"sliding_attention for each of {layers} layers"
            )
        elif _SLIDING in kinds[:layers]:
            if self.use_sliding_window is False:
                raise ValueError(
                    "use_sliding_window=false contradicts layer_types with sliding_attention"
                )
            sizes = {"sliding_window": self.sliding_window, "swa_window_size": self.swa_window_size}
            if len({size for size in sizes.values() if size is not None}) != 1:
                raise ValueError(
                    f"layer_types with sliding_attention needs one sliding_window, got {sizes}"
                )
            if (self.sliding_window or 1) < 1:
                raise ValueError(f"sliding_window={self.sliding_window} should be positive")
        if self.use_swa and self.swa_window_size is None:
            raise ValueError("use_swa=true needs swa_window_size")

    @classmethod
    def check_format(cls, raw: Mapping[str, Any]) -> None:
        form = find_format(raw)
        inner = raw.get("dflash_config") or {}
        told = {**raw, **(inner if isinstance(inner, dict) else {})}
        foreign = [*(() if form.has_markov else _MARKOV_KEYS)]
        foreign += () if form.has_selector else _SELECTOR_KEYS
        if given := [f"{name}={told[name]!r}" for name in foreign if told.get(name)]:
            raise ConfigError(f"{', '.join(given)}: a {form.architecture} has no such parts")

    @classmethod
    def complete(cls, flat: dict[str, Any]) -> None:
        super().complete(flat)
        form = find_format(flat)
        flat["(kind)"] = form.kind
        if form.has_latents:
            # Its name for the number of hidden states.
            count = flat.pop("num_target_layers", None)
            if count is not None:
                flat.setdefault("num_aux_hidden_states", count)
            if "target_num_hidden_layers" in flat:
                flat["num_target_layers"] = flat["target_num_hidden_layers"]
            flat.setdefault("block_size", _LATENT_BLOCK)
        if "logit_scale" in flat:
            flat.setdefault("output_multiplier", flat["logit_scale"])
        names = ("aux_hidden_state_layer_ids", "target_layer_ids", "layer_ids")
        given = next((flat[name] for name in names if isinstance(flat.get(name), list)), None)
        flat.setdefault(
            "num_aux_hidden_states", len(given) if given else flat.get("num_hidden_layers")
        )

    @property
    def format(self) -> BlockFormat:
        """The published format that it has."""
        return find_format(msgspec.structs.asdict(self))

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the draft is: `dflash`, `dflash2` or `dspark`; a DSpark draft without Markov head
        is a DFlash draft, too.
        """
        kind, plain = self.format.kind, self.format.plain_kind
        return (kind,) if plain is None or self.markov is not None else (kind, plain)

    @property
    def samples_anchor(self) -> bool:
        """Whether row j drafts the token after its own position, so that all rows are drafts; else
        row j > 0 drafts the token at its position, and row 0 none.
        """
        if self.sample_from_anchor is not None:
            return self.sample_from_anchor
        if self.dspark_bonus_anchor is not None:
            return not self.dspark_bonus_anchor
        return self.format.samples_anchor

    @property
    def max_drafts(self) -> int:
        """Drafts of one block."""
        return self.block_size if self.samples_anchor else self.block_size - 1

    @property
    def masks(self) -> tuple[LayerMask, ...]:
        """The mask of each layer: `is_causal` counts for all, then `causal`, then the layer's type.

        Full layers see the whole block. Layers with a window are causal within it, or as
        `sliding_window_non_causal` says in the layout of the speculators library.
        """
        stated = self.causal if self.is_causal is None else self.is_causal
        full = LayerMask(None, bool(stated))
        kinds = (self.layer_types or (_FULL,) * self.num_hidden_layers)[: self.num_hidden_layers]
        if _SLIDING not in kinds:
            mask = LayerMask(self.swa_window_size, bool(stated)) if self.use_swa else full
            return (mask,) * len(kinds)
        by_type = not (self.format.speculators and self.sliding_window_non_causal)
        window = self.sliding_window or self.swa_window_size
        sliding = LayerMask(window, by_type if stated is None else stated)
        return tuple(sliding if kind == _SLIDING else full for kind in kinds)

    @property
    def markov(self) -> Markov | None:
        if not self.format.has_markov or self.markov_rank == 0:
            return None
        return Markov(self.markov_rank, self.markov_head_type)

    @property
    def confidence(self) -> Confidence | None:
        form = self.format
        stated, with_markov = self.enable_confidence_head, self.confidence_head_with_markov
        if not form.has_markov or not (form.speculators if stated is None else stated):
            return None
        reads = form.speculators if with_markov is None else with_markov
        return Confidence(reads and self.markov is not None)

    @property
    def selector(self) -> Selector | None:
        if not self.format.has_selector:
            return None
        return Selector(self.selector_rank, self.selector_top_k)

    @property
    def conv(self) -> BlockConv | None:
        if not self.format.has_selector:
            return None
        return BlockConv(self.conv_kernel_size, self.conv_group_size)

    @property
    def interleaved(self) -> bool:
        """Whether RoPE rotates neighbouring elements instead of halves."""
        if self.format.has_latents:
            return self.rope_interleave
        return False in (self.is_neox_style, self.rope_is_neox_style)

    @property
    def shares_vocabulary(self) -> bool:
        return self.format.has_latents

    def network_fields(self) -> dict[str, Any]:
        fields = super().network_fields()
        return self.with_latents(fields) if self.format.has_latents else fields

    def shared_with_target(self) -> list[tuple[str, int, str]]:
        shared = super().shared_with_target()
        if self.num_target_layers is not None:
            shared.append(("num_target_layers", self.num_target_layers, "num_hidden_layers"))
        return shared

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
