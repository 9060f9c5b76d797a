"""The options of speculative decoding."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atom.options.fields import REQUIRED, ConfigError, Options, option
from atom.options.quantizations import QUANTIZATIONS
from atom.options.speculative_methods import SPECULATIVE_METHODS, methods_that

AUX_LAYER_CONVENTIONS = ("boundary", "output")
MAX_SPECULATIVE_TOKENS = 15
_log = logging.getLogger(__name__)

# Keys of vLLM's object (vllm/config/speculative.py) that change no token, and what is so here.
_FOREIGN_KEYS = {
    **dict.fromkeys(
        ("prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth"),
        "the lookup chooses the lengths that it matches",
    ),
    **dict.fromkeys(
        ("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
        "the lookup chooses how much it drafts",
    ),
    "suffix_decoding_max_cached_requests": "suffix_cache_tokens has the size of that cache",
    "num_speculative_tokens_per_batch_size": "adaptive chooses the number of drafts by measurement",
    "adaptive_verification": "adaptive chooses the number of drafts by measurement",
    "draft_sample_method": "drafts are the likeliest tokens",
    "disable_padded_drafter_batch": "batches of drafts need no choice",
    "max_model_len": "drafts reach as far as the context",
    **dict.fromkeys(
        ("attention_backend", "moe_backend", "enforce_eager"),
        "drafts run on the kernels that the machine has",
    ),
}


def without_foreign_keys(document: Any) -> Any:
    """The object of `speculative_config` without vLLM's keys that have no effect here, each of
    which is warned of; what is no object stays as it is.
    """
    try:
        content = json.loads(document) if isinstance(document, str) else document
    except json.JSONDecodeError:
        return document
    if not isinstance(content, Mapping):
        return document
    for key in [key for key in content if key in _FOREIGN_KEYS]:
        _log.warning("%s of speculative_config has no effect: %s", key, _FOREIGN_KEYS[key])
    return {key: value for key, value in content.items() if key not in _FOREIGN_KEYS}


@dataclass(frozen=True)
class SpeculativeOptions(Options):
    """How drafts are proposed; `SPECULATIVE_METHODS` says what each method takes."""

    method: str = option(
        REQUIRED,
        "how to propose drafts; none when omitted",
        choices=SPECULATIVE_METHODS,
        spellings={
            "EAGLE3": "eagle3",
            "DFLASH": "dflash",
            "DSPARK": "dspark",
            "STANDALONE": "draft_model",
            "NEXTN": "mtp",
            "deepseek_mtp": "mtp",
            "glm4_moe_mtp": "mtp",
            "glm4_moe_lite_mtp": "mtp",
            "qwen3_next_mtp": "mtp",
        },
        nearest={"ngram": "suffix", "ngram_gpu": "suffix", "NGRAM": "suffix"},
    )
    num_speculative_tokens: int = option(
        REQUIRED, f"drafts per step, 1 to {MAX_SPECULATIVE_TOKENS}"
    )
    model: str | None = option(
        None,
        "folder or hub id of the draft, for --method "
        + methods_that(lambda m: m.takes_draft_model),
        name="draft_model",
    )
    lookup: bool = option(
        False,
        "look the newest tokens up in the text so far, too, and draft what followed them there",
        name="speculative_lookup",
    )
    suffix_cache_tokens: int = option(
        0,
        "tokens of other requests' recent outputs to look up in, too, for method suffix and "
        "lookup; only those with the same cache_salt (0: none)",
        at_least=0,
    )
    adaptive: bool = option(
        False,
        "measure what drafts cost and bring, and draft less where that is faster",
        name="speculative_adaptive",
    )
    aux_layer_convention: str | None = option(
        None,
        "what the draft's layer ids name: what enters a layer, or its output; told by the field "
        "that holds them when omitted",
        name="draft_aux_layer_convention",
        choices=AUX_LAYER_CONVENTIONS,
    )
    quantization: str = option(
        "auto",
        "of a draft whose checkpoint has none, when it is loaded; auto: int8 on a CPU, unless the "
        "target's weights are float32; none: its own numbers",
        name="draft_quantization",
        choices=QUANTIZATIONS,
    )
    image_embeddings: bool = option(
        False,
        "an Eagle3 draft's rows of images read their embeddings, as the target's do, not that of "
        "the placeholder: for drafts that were trained so",
        name="draft_image_embeddings",
    )
    synthetic_acceptance_length: float | None = option(
        None,
        "for benchmarks: accept drafts at random, so that a step brings this many tokens, from 1 "
        "to one more than the drafts; answers mean nothing then, and no grammar can hold",
        name="speculative_synthetic_acceptance_length",
    )
    draft_tensor_parallel_size: int | None = option(
        None,
        "number of GPUs that share the draft: 1 (each has all of it), or as many as share the "
        "target, which is the default",
        at_least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        k = self.num_speculative_tokens
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens must be 1 to {MAX_SPECULATIVE_TOKENS}, got {k!r}; to run "
                "without speculation leave the method out, or give --no-speculation where a draft "
                "comes with the model"
            )
        length = self.synthetic_acceptance_length
        if length is not None and not 1 <= length <= k + 1:
            raise ConfigError(
                f"synthetic_acceptance_length must be 1 to num_speculative_tokens + 1 = {k + 1}, "
                f"got {length!r}"
            )
        self._check_method()

    def _check_method(self) -> None:
        method = SPECULATIVE_METHODS[self.method]
        if method.takes_draft_model and self.model is None:
            raise ConfigError(f"method {self.method} needs a draft model")
        if not method.takes_draft_model and self.model is not None:
            raise ConfigError(f"method {self.method} takes no draft model, got {self.model!r}")
        if not method.takes_draft_model and self.aux_layer_convention is not None:
            raise ConfigError(
                f"method {self.method} takes no draft model, so draft_aux_layer_convention would "
                f"have no effect"
            )
        if not method.takes_draft_model and self.quantization != "auto":
            raise ConfigError(
                f"method {self.method} takes no draft model, so draft_quantization would have no "
                f"effect"
            )
        if self.image_embeddings and not method.may_read_images:
            raise ConfigError(
                f"draft_image_embeddings is for drafts of method "
                f"{methods_that(lambda m: m.may_read_images)}; with {self.method} it would have "
                f"no effect"
            )
        if method.is_lookup and self.draft_tensor_parallel_size is not None:
            raise ConfigError(
                f"method {self.method} has no draft, so draft_tensor_parallel_size would have no "
                f"effect"
            )
        if self.lookup and method.is_lookup:
            others = methods_that(lambda m: not m.is_lookup)
            raise ConfigError(
                f"lookup goes beside a draft ({others}); method {self.method} is a lookup already"
            )
        if self.suffix_cache_tokens and not self.looks_up:
            lookups = methods_that(lambda m: m.is_lookup)
            raise ConfigError(
                f"suffix_cache_tokens is for method {lookups} and for lookup beside a draft, not "
                f"for {self.method} alone"
            )

    @property
    def looks_up(self) -> bool:
        """Whether drafts come from a lookup, alone or beside a draft."""
        return self.lookup or SPECULATIVE_METHODS[self.method].is_lookup
