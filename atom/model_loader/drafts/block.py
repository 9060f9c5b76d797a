"""Loads a block drafter and checks that it fits its target."""

from __future__ import annotations

import logging
from functools import partial

import torch
from msgspec import structs

from atom.config import ConfigError
from atom.model_loader.drafts.folder import DraftTarget, draft_folder, load_onto
from atom.models.block_draft.config import BlockDraftConfig
from atom.models.block_draft.draft import BlockDraft
from atom.models.config.file import is_there

logger = logging.getLogger(__name__)


def load_block_draft(draft: str, target: DraftTarget, kind: str) -> BlockDraft:
    """Build and load a block drafter.

    Args:
        draft: folder or hub id.
        kind: `dflash`, `dflash2` or `dspark`, which the draft has to be.

    Raises:
        ConfigError: when there is no such draft or it does not fit the target.
        WeightError: for tensors that are missing, unexpected or do not fit.
    """
    folder = draft_folder(draft, target.options)
    config = BlockDraftConfig.from_folder(folder)
    if kind not in config.kinds:
        raise ConfigError(
            f"the draft {draft} is a {config.architecture}, which goes with method "
            f"{' or '.join(config.kinds)}, not {kind}"
        )
    if is_there(folder / "mask_embedding.pt"):
        raise ConfigError(
            f"the draft {draft} replaces its mask token's embedding by mask_embedding.pt, a "
            f"pickled file, which is not read"
        )
    if target.context.dtype is torch.float16:
        logger.warning(
            "draft %s runs in float16, whose range sums of hidden states exceed in many targets; "
            "acceptance may be nil. Use bfloat16 or float32",
            draft,
        )
    # The statistics name it after the method, which may be another of its kinds.
    config = structs.replace(config, kind=kind)
    return load_onto(
        target,
        draft,
        config,
        BlockDraft,
        BlockDraft.renames,
        partial(config.default_aux_layer_ids, target.config.num_hidden_layers),
    )
