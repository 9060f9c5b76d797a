"""What loading has in common for all drafts in folders of their own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from atom.config import ConfigError, ModelOptions
from atom.model_loader.checkpoint import has_weights, list_tensors
from atom.model_loader.drafts.quantization import online_for_draft, read_draft_quantization
from atom.model_loader.drafts.tokenizer import check_same_tokenizer
from atom.model_loader.hub import download, looks_like_path
from atom.model_loader.safetensors.reader import CheckpointTensor
from atom.model_loader.source import ModelSource
from atom.model_loader.weights import build_model
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.summary import describe_weights
from atom.models.base import CausalLM
from atom.models.config.model_config import PretrainedConfig
from atom.models.eagle3.parts import DraftConfig, DraftParts
from atom.models.eagle3.sharing import SharingDraft

logger = logging.getLogger(__name__)

D = TypeVar("D", bound=SharingDraft)


@dataclasses.dataclass(frozen=True)
class DraftTarget:
    """What a draft is loaded for.

    Attributes:
        model: loaded; the draft shares the modules that its checkpoint lacks.
        source: of the target.
        context: the target's; the draft uses the same dtype.
        options: the target's; the load format and strategy apply to the draft as well.
        aux_layer_convention: what the draft's layer ids name, where the user says it.
        quantization: of the draft, if its checkpoint has none; one of `QUANTIZATIONS`.
    """

    model: CausalLM
    source: ModelSource
    context: LayerContext
    options: ModelOptions
    aux_layer_convention: str | None = None
    quantization: str = "auto"

    @property
    def config(self) -> PretrainedConfig:
        """The text configuration."""
        return self.source.hf_config.get_text_config()


def load_onto(
    target: DraftTarget,
    draft: str,
    config: DraftConfig,
    draft_class: Callable[..., D],
    renames: tuple[tuple[str, str], ...],
    default_aux_layer_ids: Callable[[], tuple[int, ...]],
) -> D:
    """Build and load a draft; most checks run before weights are read.

    Args:
        draft: folder or hub id.
        draft_class: takes the config, the parts, the aux layer ids and the context.
        default_aux_layer_ids: what the draft reads if its config does not say it.

    Raises:
        ConfigError: when the draft does not fit the target.
        WeightError: for tensors that are missing, unexpected or do not fit.
    """
    options, context = draft_options(draft, target.options), target.context
    folder = _locate(draft, options)
    config.check_against_target(target.config)
    check_same_tokenizer(folder, target.source.path)
    aux_layer_ids = _resolve_aux_layers(
        config,
        default_aux_layer_ids,
        target.config.num_hidden_layers,
        draft,
        target.aux_layer_convention,
    )
    parts = _parts(folder, config, target.config, options)
    parts.check(config, target.config)
    create: Any = partial(draft_class, config, parts, aux_layer_ids)
    quantization = read_draft_quantization(folder, options.load_format != "dummy", renames)
    if quantization is None:
        asked = target.quantization
        quantization = online_for_draft(asked, target.source.quantization, context)
    elif target.quantization != "auto":
        raise ConfigError(f"draft_quantization={target.quantization}: {draft} is quantised already")
    source = ModelSource(
        folder, draft, config.network, frozenset(), context.dtype, quantization=quantization
    )
    model: D = build_model(create, source, context, options)
    _check_d2t(model, config, draft)
    model.share_with(target.model)
    _log(draft, config, parts, context, describe_weights(model, quantization))
    return model


def draft_folder(draft: str, options: ModelOptions) -> Path:
    """Where a draft is.

    Args:
        options: the target's.

    Raises:
        ConfigError: when there is no such draft.
    """
    return _locate(draft, draft_options(draft, options))


def draft_options(draft: str, options: ModelOptions) -> ModelOptions:
    """The target's options without those that refer to the target's files."""
    return dataclasses.replace(
        options,
        model=draft,
        tokenizer=None,
        revision=None,
        trust_remote_code=False,
        model_impl="auto",
        load_format="dummy" if options.load_format == "dummy" else "auto",
        activations="auto",
    )


def _locate(draft: str, options: ModelOptions) -> Path:
    path = Path(draft).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"the draft {draft} is a file; expected a folder or a hub id")
    if looks_like_path(draft):
        raise ConfigError(f"there is no draft folder {draft}")
    return download(draft, options)


def _resolve_aux_layers(
    config: DraftConfig,
    default: Callable[[], tuple[int, ...]],
    num_layers: int,
    draft: str,
    stated: str | None,
) -> tuple[int, ...]:
    """The boundary ids of the hidden states that the draft reads."""
    aux = config.aux_layers
    try:
        if aux is None and stated is not None:
            raise ValueError("draft_aux_layer_convention has no effect: its config has no ids")
        if aux is None:
            resolved = default()
            given = "none given, the target's default"
        else:
            resolved, applied = aux.resolve(num_layers, stated)
            given = f"{list(aux.ids)} of {aux.field} read as {applied} ids"
    except ValueError as error:
        raise ConfigError(f"draft {draft}: {error}") from error
    logger.info(
        "draft %s: aux layer ids %s: it reads what enters layers %s of %d",
        draft,
        given,
        ", ".join(str(i) for i in resolved),
        num_layers,
    )
    return resolved


def _parts(
    folder: Path, config: DraftConfig, target: PretrainedConfig, options: ModelOptions
) -> DraftParts:
    """The optional modules in the checkpoint; with dummy weights, those that cannot be shared."""
    pruned = config.draft_vocab_size != config.vocab_size
    if options.load_format == "dummy":
        own = config.hidden_size != target.hidden_size
        return DraftParts(embed_tokens=own, lm_head=own or pruned, d2t=pruned)
    if not has_weights(folder):
        raise ConfigError(
            f"the draft {folder} holds no *.safetensors files; weights in other formats, such as "
            f"pickled ones (.bin, .pt), have to be converted first"
        )
    tensors = list_tensors(folder)
    _check_fc(tensors, config, folder)
    parts = DraftParts.of(tensor.name for tensor in tensors)
    if config.shares_vocabulary:
        return dataclasses.replace(parts, embed_tokens=False, lm_head=False)
    return parts


def _check_fc(tensors: list[CheckpointTensor], config: DraftConfig, folder: Path) -> None:
    expected = (config.hidden_size, config.fc_fan_in)
    for tensor in tensors:
        if tensor.name.removeprefix("model.") != "fc.weight":
            continue
        has_numbers = tensor.torch_dtype is not None and tensor.torch_dtype.is_floating_point
        if has_numbers and tensor.shape != expected:
            raise ConfigError(
                f"{folder}: fc.weight is {list(tensor.shape)}, and its config says "
                f"{list(expected)}: {config.num_aux_hidden_states} hidden states of "
                f"{config.target_hidden_size} elements make {config.fc_fan_in} inputs for "
                f"{config.hidden_size} outputs"
            )


def _check_d2t(model: SharingDraft, config: DraftConfig, draft: str) -> None:
    """Refuse d2t values outside the vocabulary, such as absolute ids instead of offsets."""
    if model.d2t is None or model.d2t.is_meta:
        return
    drafts = torch.arange(config.draft_vocab_size, device=model.d2t.device)
    targets = model.to_target_ids(drafts)
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= config.vocab_size:
        raise ConfigError(
            f"draft {draft}: d2t leads to target tokens {low} to {high}, outside "
            f"0..{config.vocab_size - 1}; it should hold offsets, target id minus draft id"
        )
    if (distinct := len(set(targets.tolist()))) != targets.numel():
        raise ConfigError(
            f"draft {draft}: d2t leads {targets.numel()} draft tokens to only {distinct} target "
            f"tokens; it should hold offsets, target id minus draft id"
        )


def _log(
    draft: str, config: DraftConfig, parts: DraftParts, context: LayerContext, weights: str
) -> None:
    """Args:
    weights: how they are quantised; "" if none are.
    """
    logger.info(
        "draft %s: %s in %s%s, %s embedding, %s head over %d of %d tokens",
        draft,
        config.architecture,
        str(context.dtype).removeprefix("torch."),
        weights and f", {weights}",
        "own" if parts.embed_tokens else "the target's",
        "own" if parts.lm_head else "the target's",
        config.draft_vocab_size,
        config.vocab_size,
    )
    if config.ignored_keys:
        logger.warning(
            "draft %s: unknown config keys ignored: %s", draft, ", ".join(config.ignored_keys)
        )
    warn_beyond_positions(draft, config.network, context)


def warn_beyond_positions(draft: str, network: PretrainedConfig, context: LayerContext) -> None:
    """Warn of contexts that are longer than those that a draft was made for."""
    trained = network.max_position_embeddings
    if context.max_model_len > trained:
        logger.warning(
            "draft %s was made for %d positions and the context is %d; acceptance may fall "
            "beyond the former",
            draft,
            trained,
            context.max_model_len,
        )
