"""Loads a language model of its own as a draft for another one."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from atom.config import ConfigError
from atom.distributed.parallel_state import SINGLE
from atom.kv_cache.state_pool import recurrent_layers
from atom.model_loader.drafts.folder import DraftTarget, draft_options, warn_beyond_positions
from atom.model_loader.drafts.quantization import online_for_draft
from atom.model_loader.drafts.tokenizer import TokenMaps, map_tokens
from atom.model_loader.read_files import has_tokenizer
from atom.model_loader.source import resolve_model
from atom.model_loader.tokenizers.tokenizer import tokenizer_folder
from atom.model_loader.weights import build_model
from atom.model_ops.quant.base import UnquantizedConfig
from atom.model_ops.quant.summary import describe_weights
from atom.models.base import CausalLM
from atom.models.registry import create_model

logger = logging.getLogger(__name__)


def load_draft_model(draft: str, target: DraftTarget) -> tuple[CausalLM, TokenMaps | None]:
    """Build and load any model that could be a target.

    Args:
        draft: folder, GGUF file or hub id.

    Returns:
        The model, and how its tokens and the target's correspond; None if their ids are the same.

    Raises:
        ConfigError: when there is no such model, it is not supported, or its vocabulary cannot be
            mapped to the target's.
        WeightError: for tensors that are missing, unexpected or do not fit.
    """
    if target.aux_layer_convention is not None:
        raise ConfigError(
            "draft_aux_layer_convention would have no effect: method draft_model reads nothing of "
            "the target's layers"
        )
    options = draft_options(draft, target.options)
    source = resolve_model(options)
    if source.implementation is not None and source.implementation.kind == "transformers":
        raise ConfigError(f"{draft} cannot draft: it is {source.implementation}")
    # Ranks that hold whole experts wait for each other's tokens: each has all of a draft's.
    context = replace(target.context, experts=SINGLE)
    if isinstance(source.quantization, UnquantizedConfig):
        quantization = online_for_draft(target.quantization, target.source.quantization, context)
        source = replace(source, quantization=quantization)
    elif target.quantization != "auto":
        raise ConfigError(f"draft_quantization={target.quantization}: {draft} is quantised already")
    model = build_model(partial(create_model, source.hf_config), source, context, options)
    if recurrent_layers(model):
        raise ConfigError(
            f"{draft} cannot draft: it has recurrent states, which are kept for targets alone"
        )
    size, target_size = model.token_embedding.vocab_size, target.model.token_embedding.vocab_size
    maps: TokenMaps | None = None
    # Without a tokenizer, a vocabulary of the same size can only be the target's.
    if size != target_size or has_tokenizer(source.path):
        folder = tokenizer_folder(target.source, target.options)
        maps = map_tokens(source.path, folder, size, target_size)
    weights = describe_weights(model, source.quantization)
    logger.info(
        "draft %s: %s in %s%s, %d of the target's %d tokens",
        draft,
        ", ".join(source.hf_config.architectures or ["?"]),
        str(context.dtype).removeprefix("torch."),
        weights and f", {weights}",
        size if maps is None else maps.num_shared,
        target_size,
    )
    warn_beyond_positions(draft, source.hf_config.get_text_config(), context)
    return model, None if maps is None or maps.are_identical else maps
