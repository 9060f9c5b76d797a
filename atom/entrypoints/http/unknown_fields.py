"""What becomes of the fields of a body that no model of it names.

Nothing that would change an answer is ignored silently, and nothing that asks for nothing is
refused. An unknown field is, by its path:

- refused when `REFUSED` has it, unless it has one of the values there: it changes answers;
- passed over when its value is null, false or empty, or one that `HARMLESS` has;
- else ignored, with a warning and by name in the answer's headers, or refused: the server's
  `--unknown-fields` says which.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel

from atom.entrypoints.http.errors import bad_request
from atom.entrypoints.http.provider_tools import ProviderTool
from atom.quoting import excerpt, quote

# Fields of other engines' APIs, by path, with the values that ask for nothing here.
#
# Only fields that a body's model does not name are looked up. Null is always harmless.

# Every value is harmless.
ANY: Final[tuple[Any, ...]] = ("any",)

# Beyond null, false and empty; other values are ignored with a warning.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "cache_prompt": (True,),
    "id_slot": (-1,),
    "messages[].id": ANY,
    "messages[].content[].cache_control": ANY,
    "messages[].content[].prompt_cache_breakpoint": ANY,
    "request_id": ANY,
    "rid": ANY,
    "stream_options": ANY,
    "spaces_between_special_tokens": (True,),
    "tools[].cache_control": ANY,
    "tools[].function.cache_control": ANY,
}

# These change answers and are not supported: values that are not here are refused.
REFUSED: dict[str, tuple[Any, ...]] = {
    # What only others of this server's APIs take.
    "ebnf": ("",),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "input": ("",),
    "instructions": ("",),
    "json_schema": ("", {}),
    "logprobs": (False, 0),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "max_tokens": (),
    "messages": ([],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "regex": ("",),
    "response_format": ({"type": "text"},),
    "stop": ("", []),
    "stop_sequences": ([],),
    "system": ("", []),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
    # How tokens are chosen.
    "adaptive_target": (-1.0,),
    "bad_words_ids": ([],),
    "best_of": (1,),
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "diversity_penalty": (0.0,),
    "do_sample": (True,),
    "dry_multiplier": (0.0,),
    "dynatemp_range": (0.0,),
    "early_stopping": (False,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "n_predict": (-1,),
    "nsigma": (0.0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "penalty_alpha": (0.0,),
    "repeat_penalty": (1.0,),
    "smoothing_factor": (0.0,),
    "tfs": (1.0,),
    "tfs_z": (1.0,),
    "top_a": (0.0,),
    "top_n_sigma": (-1.0, 0.0),
    "typical_p": (1.0,),
    "use_beam_search": (False,),
    "xtc_probability": (0.0,),
    # How far, and in what form, the answer goes.
    "backend_stop": ("", []),
    "max_new_tokens": (),
    "no_stop_trim": (False,),
    "stop_regex": ("", []),
    "thinking_budget": (-1,),
    "thinking_token_budget": (-1,),
    # What the prompt is.
    "adapter": ("",),
    "add_vision_id": (False,),
    "audio_data": ([],),
    "documents": ([],),
    "enable_thinking": (),
    "image_data": ([],),
    "images": ([],),
    "input_embeds": ([],),
    "input_extra": ([],),
    "lora_path": ("",),
    "lora_request": ({},),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": ("", []),
    "reasoning": ({},),
    "safe_prompt": (False,),
    "transforms": ([],),
    "truncate_prompt_tokens": (-1,),
    "video_data": ([],),
    # What comes back.
    "detokenize": (True,),
    "include_reasoning": (True,),
    "logprob_token_ids": ([],),
    "n_probs": (0,),
    "logprob_start_len": (-1,),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_logprob": (False,),
    "return_meta_info": (False,),
    "return_routed_experts": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "stream_reasoning": (True,),
    "token_ids_logprob": ([],),
    "top_logprobs_num": (0,),
}


logger = logging.getLogger(__name__)

IGNORED_FIELDS_HEADER = "x-atom-ignored-fields"

# The code of what is refused because it is unknown, and because it is known not to be supported.
UNKNOWN_FIELD = "unknown_field"
UNSUPPORTED_FIELD = "unsupported_field"

# The type of the validation error of an item or part of a kind that is not supported.
UNSUPPORTED_CONTENT = "unsupported_content"

# Of one body, counting the same field of many items once.
MAX_IGNORED_FIELDS = 32
# Of all bodies: beyond them nothing is logged any more.
MAX_LOGGED_KINDS = 1000
MAX_PATH_CHARACTERS = 100

_logged: set[str] = set()


class UnknownFields:
    """The unknown fields of one request.

    Args:
        refuses: whether fields that are not harmless are refused instead of ignored.

    Attributes:
        ignored: paths such as `tools[4].strict`, of a field of many items the first.
    """

    def __init__(self, refuses: bool) -> None:
        self.ignored: list[str] = []
        self._refuses = refuses
        self._kinds: set[str] = set()

    def take(self, body: BaseModel) -> None:
        """Take the unknown fields, and judge the provider's tools, out of a validated body.

        Raises:
            ApiError: 400 for a field that must not be ignored, or for too many of them.
        """
        for path, model in _models(body, ""):
            if isinstance(model, ProviderTool):
                self.ignore(path, f"a tool of type {quote(model.type)}, which a provider runs")
                continue
            extra = model.model_extra or {}
            for name, value in extra.items():
                self._judge(f"{path}.{name}" if path else name, value)
            extra.clear()

    def ignore(self, path: str, what: str = "not a field that this server knows") -> None:
        """Note that what is at `path` is left out of account.

        Raises:
            ApiError: 400 when the server refuses what it would ignore, or there is too much of it.
        """
        shown = excerpt(path, MAX_PATH_CHARACTERS)
        if self._refuses:
            raise bad_request(f"{shown} is {what}", shown, UNKNOWN_FIELD)
        kind = f"{_without_indices(shown)} is {what}"
        if kind in self._kinds:
            return
        if len(self._kinds) == MAX_IGNORED_FIELDS:
            raise bad_request(
                f"the body has more than {MAX_IGNORED_FIELDS} fields that this server does not "
                f"know, {shown} among them",
                shown,
                UNKNOWN_FIELD,
            )
        self._kinds.add(kind)
        self.ignored.append(shown)
        if kind not in _logged and len(_logged) < MAX_LOGGED_KINDS:
            _logged.add(kind)
            logger.warning("ignored in a request: %s", quote(kind))

    def _judge(self, path: str, value: Any) -> None:
        # Some APIs have the fields of others in an object of their own.
        field = _without_indices(path).removeprefix("sampling_params.")
        if field not in REFUSED:
            if not (asks_for_nothing(value) or _is_among(value, HARMLESS.get(field, ()))):
                self.ignore(path)
        elif value is not None and not _is_among(value, REFUSED[field]):
            raise bad_request(f"{path} is not supported by this server", path, UNSUPPORTED_FIELD)

    @property
    def headers(self) -> dict[str, str]:
        """The header that names what was ignored; none when nothing was."""
        if not self.ignored:
            return {}
        names = (re.sub(r"[^\w.\[\]$-]", "?", path, flags=re.ASCII) for path in self.ignored)
        return {IGNORED_FIELDS_HEADER: ", ".join(names)}


def asks_for_nothing(value: Any) -> bool:
    """Whether a value is null, false, empty, or a list or object of only such values."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif not (value is None or value is False or value == ""):
            return False
    return True


def _is_among(value: Any, harmless: tuple[Any, ...]) -> bool:
    # 1 is no true here, and 0 no false.
    return harmless is ANY or any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless
    )


def _without_indices(path: str) -> str:
    return re.sub(r"\[\d+\]", "[]", path)


def _models(value: Any, path: str) -> Iterator[tuple[str, BaseModel]]:
    """The models within a value, with their paths. Lists of models hold nothing else."""
    if isinstance(value, BaseModel):
        yield path, value
        for name, field in type(value).model_fields.items():
            spelled = field.alias or name
            yield from _models(getattr(value, name), f"{path}.{spelled}" if path else spelled)
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for index, item in enumerate(value):
            yield from _models(item, f"{path}[{index}]")
