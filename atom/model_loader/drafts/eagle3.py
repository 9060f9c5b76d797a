"""Loads an Eagle3 draft and checks that it fits its target."""

from __future__ import annotations

from atom.config import ModelOptions
from atom.model_loader.drafts.folder import DraftTarget, draft_folder, load_onto
from atom.model_loader.source import ModelSource
from atom.model_ops.layer_context import LayerContext
from atom.models.base import CausalLM
from atom.models.eagle3.base import Eagle3Draft
from atom.models.eagle3.config import Eagle3Config
from atom.models.eagle3.deepseek import Eagle3DeepseekV2ForCausalLM
from atom.models.eagle3.llama import LlamaForCausalLMEagle3


def load_draft(
    draft: str,
    target: CausalLM,
    target_source: ModelSource,
    context: LayerContext,
    options: ModelOptions,
    aux_layer_convention: str | None = None,
    quantization: str = "auto",
) -> Eagle3Draft:
    """Build and load an Eagle3 draft; the arguments are the fields of `DraftTarget`.

    Args:
        draft: folder or hub id.

    Raises:
        ConfigError: when there is no such draft or it does not fit the target.
        WeightError: for tensors that are missing, unexpected or do not fit.
    """
    config = Eagle3Config.from_folder(draft_folder(draft, options))
    draft_class = Eagle3DeepseekV2ForCausalLM if config.is_mla else LlamaForCausalLMEagle3
    return load_onto(
        DraftTarget(target, target_source, context, options, aux_layer_convention, quantization),
        draft,
        config,
        draft_class,
        draft_class.renames,
        target.default_aux_layer_ids,
    )
