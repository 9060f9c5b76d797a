"""Which keys the queries of a block see, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from atom.models.block_draft.formats import BlockFormat
from atom.models.draft_fields import Fields

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
