"""Tries a small copy of an architecture before it runs: what differs is refused by its name.

The copy has the configuration of the checkpoint with fewer heads and layers, shorter windows, a
small vocabulary, narrow MLPs and random weights. Transformers' own attention computes two texts of
it, each at once; then they are computed in pieces, side by side, with attention as the engine has
it. So state between tokens that is not in keys and values, positions that are not the given ones,
and masks that are not honoured all show.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from atom.config import ConfigError
from atom.models.transformers.images import (
    ProcessedImage,
    TransformersImageEncoder,
    TransformersImages,
)
from atom.models.transformers.probe import (
    PAGED,
    LayerCall,
    LayerFacts,
    head_logits,
    parameters_on_meta,
    probe,
    run,
    take_base,
    text_network,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Rotations whose frequencies follow the longest text of a batch.
_BY_LENGTH = {"dynamic", "longrope"}
# Difference of logits that is refused, in multiples of their standard deviation.
_TOLERANCE = 2e-3
_VOCABULARY = 96
# The token of an image in a copy's vocabulary, which is in no text.
_IMAGE = _VOCABULARY - 1
_WINDOW = 9
_MLP = 32
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Parts of a decoder that have a configuration of their own.
_PARTS = ("attn_config", "ffn_config")
# Parameters of a copy that is tried.
_MOST = 1 << 28
# Lengths of the two texts.
_LENGTHS = (29, 17)


def check_model(
    model_class: type[PreTrainedModel], config: PretrainedConfig, folder: Path | None = None
) -> None:
    """Refuse an architecture whose modelling code does not compute with our attention what it
    computes with its own.

    Args:
        folder: has the processor of a model that reads images, one of which is in the first text.

    Raises:
        ConfigError: with its name and the reason.
    """
    name = f"{model_class.__name__} of transformers"
    try:
        if (reason := _stated_reason(model_class, config)) is not None:
            raise ConfigError(reason)
        _try(model_class, config, folder)
    except ConfigError as error:
        raise ConfigError(f"{name} is not supported: {error}") from None
    except Exception as error:  # whatever modelling code raises
        cause, what = error, "a small copy cannot be tried"
        if (theirs := _own_error(model_class, config)) is not None:
            cause, what = theirs, "transformers itself cannot build it from this configuration"
        told = f"{type(cause).__name__}: {cause}".splitlines()[0][:200]
        raise ConfigError(f"{name} is not supported: {what} ({told})") from cause


def _own_error(model_class: type[PreTrainedModel], config: PretrainedConfig) -> Exception | None:
    """What transformers raises that builds the model of this configuration, without memory."""
    try:
        with torch.device("meta"):
            model_class(copy.deepcopy(config))
    except Exception as error:
        return error
    return None


def _stated_reason(model_class: type[PreTrainedModel], config: PretrainedConfig) -> str | None:
    """What class and configuration say themselves."""
    if config.is_encoder_decoder:
        return "it has an encoder"
    if model_class._is_stateful:
        return "it keeps a state of each text besides keys and values"
    if not model_class._supports_attention_backend:
        return (
            "its attention is code of its own that cannot be replaced, and only ours reads paged "
            "keys and values (no _supports_attention_backend)"
        )
    text = config.get_text_config()
    if others := sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES):
        return f"it has layers of type {', '.join(others)}"
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {value.get("rope_type") for value in (rope, *rope.values()) if isinstance(value, dict)}
    if by_length := sorted(str(kind) for kind in kinds & _BY_LENGTH):
        return f"its rotation ({', '.join(by_length)}) depends on other texts of a batch"
    return None


@torch.inference_mode()
def _try(model_class: type[PreTrainedModel], config: PretrainedConfig, folder: Path | None) -> None:
    seen = None if config.get_text_config() is config else _seen(folder)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        small = small_copy(config) if seen is None else _small_seeing_copy(config)
        with parameters_on_meta():
            size = sum(p.numel() for p in model_class(small).parameters())
        if size > _MOST:
            raise ConfigError(f"a small copy of it has {size} parameters, too many to try")
        model = model_class(small).eval().float()
        _randomise(model)
        texts = [torch.randint(3, _IMAGE, (length,)) for length in _LENGTHS]
    images: list[dict[str, torch.Tensor]] = [{} for _ in texts]
    if seen is not None:
        texts[0], images[0] = _with_image(texts[0], *seen)
    model.config._attn_implementation = "eager"
    positions = [torch.arange(len(ids)) for ids in texts]
    try:
        expected = [
            model(input_ids=ids[None], position_ids=at[None], use_cache=False, **image).logits[0]
            for ids, at, image in zip(texts, positions, images, strict=True)
        ]
    except Exception as error:  # whatever modelling code raises
        told = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ConfigError(f"transformers itself computes no text with it ({told})") from error
    base = text_network(model.get_submodule(model.base_model_prefix))
    call = _Dense(probe(base))
    whole = take_base(model)
    embeds = [base.get_input_embeddings()(ids) for ids in texts]
    if seen is not None:
        embeds[0][texts[0] == _IMAGE] = _rows(whole, images[0])
    base.config._attn_implementation = PAGED
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for piece in _pieces(len(texts[0])):
        starts = [sum(len(rows) for rows in done) for done in found]
        parts = [slice(start, start + n) for start, n in zip(starts, piece, strict=True)]
        ids, at, rows = (
            torch.cat([x[p] for x, p in zip(xs, parts, strict=True)])
            for xs in (texts, positions, embeds)
        )
        call.piece = piece
        given = {"input_ids": ids[None]} if seen is None else {"inputs_embeds": rows[None]}
        hidden = run(base, call, position_ids=at[None], **given)
        logits = head_logits(model, hidden[0])
        for done, rows in zip(found, torch.split_with_sizes(logits, piece), strict=True):
            done.append(rows)
    for pieces, reference in zip(found, expected, strict=True):
        difference = (torch.cat(pieces) - reference).abs().max().item() / reference.std().item()
        if not difference < _TOLERANCE:
            raise ConfigError(
                f"a small copy of it in pieces, beside another text, computes other logits than "
                f"alone at once (by {difference:.2g} of their standard deviation)"
            )


def _pieces(length: int) -> list[tuple[int, int]]:
    """Tokens of the two texts, the first of which has so many, that are computed side by side."""
    return [(11, _LENGTHS[1]), (1, 0), (length - 13, 0), (1, 0)]


def _seen(folder: Path | None) -> tuple[ProcessedImage, TransformersImages]:
    """A picture as the model gets it."""
    from PIL import Image

    if folder is None:
        raise ConfigError("it is no text model")
    processor = TransformersImages(folder)
    noise = np.random.default_rng(0).integers(0, 256, (48, 60, 3), np.uint8)
    return processor.process(Image.fromarray(noise)), processor


def _with_image(
    ids: torch.Tensor, image: ProcessedImage, processor: TransformersImages
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A text with an image in its middle, and what the model reads of that."""
    said = torch.tensor(image.token_ids)
    said = torch.where(said == processor.placeholder_id, _IMAGE, said % _IMAGE)
    given = {"pixel_values": torch.from_numpy(image.pixels).float() / 128 - 1}
    if image.size:
        given["image_sizes"] = torch.tensor([image.size])
    return torch.cat([ids[:9], said, ids[9:]]), given


def _rows(whole: PreTrainedModel, image: dict[str, torch.Tensor]) -> torch.Tensor:
    grid = tuple(image["image_sizes"][0].tolist()) if "image_sizes" in image else ()
    rows: torch.Tensor = TransformersImageEncoder(whole)(image["pixel_values"], grid)
    return rows


def _small_seeing_copy(config: PretrainedConfig) -> PretrainedConfig:
    """With a small text network, and few layers of the tower."""
    fields = copy.deepcopy(config.to_dict())
    fields.pop("quantization_config", None)
    fields["text_config"] = small_copy(config.get_text_config()).to_dict()
    vision = fields["vision_config"]
    chosen = fields.get("vision_feature_layer", -1)
    chosen = chosen if isinstance(chosen, (list, tuple)) else [chosen]
    least = max(2, *(-n if n < 0 else n for n in chosen))
    vision["num_hidden_layers"] = min(least, vision["num_hidden_layers"])
    small = type(config)(**fields)
    small.image_token_id = _IMAGE
    return small


class _Dense:
    """Attention as the engine has it: causal, with windows, over all pieces so far of each text.

    Attributes:
        piece: how many tokens of each text the step has.
    """

    piece: tuple[int, ...] = ()

    def __init__(self, layers: list[LayerFacts]) -> None:
        self._layers = layers
        self._known: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        window = self._layers[module.layer_idx].window
        parts = zip(*(torch.split_with_sizes(x[0], self.piece, 1) for x in (q, k, v)), strict=True)
        out = []
        for text, (queries, keys, values) in enumerate(parts):
            place = module.layer_idx, text
            if place in self._known:
                old_keys, old_values = self._known[place]
                keys, values = torch.cat([old_keys, keys], 1), torch.cat([old_values, values], 1)
            self._known[place] = keys, values
            group = queries.shape[0] // keys.shape[0]
            keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
            scores = queries @ keys.transpose(1, 2) * call.scale
            last = torch.arange(keys.shape[1] - queries.shape[1], keys.shape[1])[:, None]
            behind = torch.arange(keys.shape[1]) - last
            hidden = behind > 0 if window is None else (behind > 0) | (behind <= -window)
            scores = scores.masked_fill(hidden, -math.inf)
            out.append((scores.softmax(-1) @ values).transpose(0, 1))
        return torch.cat(out)[None]


def _randomise(model: nn.Module) -> None:
    """Random numbers for all parameters, so that nothing is multiplied by 0 or 1 alone."""
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.dim() < 2:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        else:
            parameter.normal_(std=max(parameter.shape[-1], 16) ** -0.5)


def small_copy(config: PretrainedConfig) -> PretrainedConfig:
    """A configuration of the same computation with smaller sizes.

    Sizes of heads stay, and so does what is shared among them.
    """
    fields = copy.deepcopy(config.to_dict())
    layers, keep = int(config.num_hidden_layers), _layers_to_keep(config)
    if getattr(config, "num_kv_shared_layers", 0):
        # The last layers read what earlier ones cached, one of each kind.
        fields["num_kv_shared_layers"] = keep
        keep = min(layers, 2 * keep)
    factor, kv_factor = _head_factors(config)
    windows: dict[int, int] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and name in _PARTS:
            value.update(_small_part(value, factor, kv_factor))
        elif isinstance(value, (list, tuple)) and len(value) == layers and layers > 1:
            fields[name] = list(value[:keep])
        elif name == "per_layer_config" and isinstance(value, dict):
            fields[name] = {layer: own for layer, own in value.items() if int(layer) < keep}
        elif type(value) is not int:
            continue
        elif _is_heads(name):
            by = kv_factor if "kv" in name or "key_value" in name else factor
            fields[name] = value // by if value % by == 0 else value
        elif name in _HIDDEN:
            fields[name] = value // factor
        elif _is_mlp(name) and value > _MLP:
            fields[name] = _MLP
        elif "vocab" in name and value > _VOCABULARY:
            fields[name] = _VOCABULARY
        elif "window" in name and "layers" not in name and value > _WINDOW:
            fields[name] = windows.setdefault(value, _WINDOW + 2 * len(windows))
        elif name in _LAYERS and value and layers % value == 0:
            # A layer of some is two, each with attention.
            fields[name] = max(1, keep * value // layers)
    for name in ("eos_token_id", "bos_token_id", "pad_token_id", "quantization_config"):
        fields.pop(name, None)
    return type(config)(**fields, eos_token_id=2, bos_token_id=1, pad_token_id=0)


def _small_part(fields: dict[str, Any], factor: int, kv_factor: int) -> dict[str, int]:
    """Smaller sizes of a part that has a configuration of its own."""
    small = {}
    for name, value in fields.items():
        by = kv_factor if "kv" in name else factor
        if type(value) is not int:
            continue
        if _is_mlp(name) and value > _MLP:
            small[name] = _MLP
        elif (name in _HIDDEN or _is_heads(name)) and value % by == 0:
            small[name] = value // by
    return small


def _layers_to_keep(config: PretrainedConfig) -> int:
    """The first layers, with one of each kind that a list of the configuration tells apart."""
    layers = int(config.num_hidden_layers)
    keep = min(layers, 2)
    for value in config.to_dict().values():
        if isinstance(value, (list, tuple)) and len(value) == layers:
            keep = max(keep, *(value.index(kind) + 1 for kind in value))
    dense = getattr(config, "first_k_dense_replace", None) or 0
    return min(layers, max(keep, dense + 1))


def _kv_heads(config: PretrainedConfig) -> int | None:
    """Stated by the configuration, or by that of a part of it."""
    stated = getattr(config, "num_key_value_heads", None)
    parts = (part for part in config.to_dict().values() if isinstance(part, dict))
    of_parts = (part.get("kv_n_heads") for part in parts)
    found = stated or next((number for number in of_parts if number), None)
    return None if found is None else int(found)


def _is_heads(name: str) -> bool:
    return name.endswith("heads") or name in ("n_head", "n_heads")


def _is_mlp(name: str) -> bool:
    return "intermediate" in name or "ffn" in name or name in ("n_inner", "d_ff")


def _head_factors(config: PretrainedConfig) -> tuple[int, int]:
    """By how much the numbers of heads, with the hidden size, and of KV heads are divided: up to
    two KV heads stay, with up to two heads each.
    """
    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    kv_heads = _kv_heads(config) or heads
    group = heads // kv_heads
    few = 2 if kv_heads % 2 == 0 else 1
    of_each = 2 if group % 2 == 0 else group
    factor = heads // (few * of_each)
    return (factor, kv_heads // few) if hidden % (2 * factor) == 0 else (1, 1)
