"""Loads an Eagle3 draft and checks that it fits its target."""

from __future__ import annotations

from atom.model_loader.drafts.folder import DraftTarget, draft_folder, load_onto
from atom.models.eagle3.base import Eagle3Draft
from atom.models.eagle3.config import Eagle3Config
from atom.models.eagle3.deepseek import Eagle3DeepseekV2ForCausalLM
from atom.models.eagle3.llama import LlamaForCausalLMEagle3


def load_draft(draft: str, target: DraftTarget) -> Eagle3Draft:
    """Build and load an Eagle3 draft.

    Args:
        draft: folder or hub id.

    Raises:
        ConfigError: when there is no such draft or it does not fit the target.
        WeightError: for tensors that are missing, unexpected or do not fit.
    """
    config = Eagle3Config.from_folder(draft_folder(draft, target.options))
    draft_class = Eagle3DeepseekV2ForCausalLM if config.is_mla else LlamaForCausalLMEagle3
    default_aux_layer_ids = target.model.default_aux_layer_ids
    return load_onto(target, draft, config, draft_class, draft_class.renames, default_aux_layer_ids)
