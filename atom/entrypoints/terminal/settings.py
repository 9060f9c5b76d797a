"""The parameters of answers in a terminal: names, flags and values, from `SamplingParams`."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from atom.sampling_params import SamplingParams

# One answer as text has no place for several, for log-probabilities or for functions; grammars
# and lists of token ids belong in requests.
_NOT_HERE = {
    *("n", "logprobs", "prompt_logprobs", "kept_special_tokens", "bad_word_ids"),
    *("logits_processors", "structured_output", "structured_outputs"),
}
_KINDS = {
    field.name: field.type
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in _NOT_HERE
}
SETTINGS = tuple(_KINDS)
# The engine's flags say these, when it is loaded.
_OF_ENGINE = ("speculation", "num_speculative_tokens")
SETTING_FLAGS = tuple(name for name in SETTINGS if name not in _OF_ENGINE)
_DEST = "setting_"


def descriptions() -> dict[str, str]:
    """What each parameter does, as `SamplingParams` says; nothing where docstrings are stripped."""
    text = inspect.getdoc(SamplingParams) or ""
    entries = re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {
        name: " ".join(words.split()).rstrip(".").replace("`", "")
        for names, words in entries
        for name in names.split(", ")
    }


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each parameter that the engine's flags do not say."""
    section = parser.add_argument_group("the answer")
    help_of = descriptions()
    for name in SETTING_FLAGS:
        flags = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
        about = help_of.get(name, "").replace("%", "%%")
        if _KINDS[name] is bool:
            section.add_argument(
                *flags,
                dest=_DEST + name,
                action=argparse.BooleanOptionalAction,
                default=None,
                help=about,
            )
        else:
            section.add_argument(*flags, dest=_DEST + name, help=about)


def given_settings(namespace: argparse.Namespace) -> dict[str, Any]:
    """What the flags of `add_setting_flags` say.

    Raises:
        ValueError: naming a value that cannot be.
    """
    return dict(_given(namespace))


def _given(namespace: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    for dest, value in vars(namespace).items():
        if dest.startswith(_DEST) and value is not None:
            name = dest.removeprefix(_DEST)
            yield name, value if isinstance(value, bool) else read_setting(name, value)


def read_setting(name: str, value: str) -> Any:
    """The value of one of `SETTINGS`: as JSON or, where text is allowed, as it stands; `none` for
    one that may be left out.

    Raises:
        ValueError: for an unknown name, or a value that it cannot have.
    """
    if name not in _KINDS:
        raise ValueError(f"unknown setting {name!r}; there are {', '.join(SETTINGS)}")
    text = value.strip()
    for candidate in _readings(text):
        try:
            typed = msgspec.convert(candidate, _KINDS[name], str_keys=True)
        except msgspec.ValidationError:
            continue
        msgspec.structs.replace(SamplingParams(max_tokens=None), **{name: typed})
        return typed
    raise ValueError(f"{name} cannot be {value!r}")


def _readings(text: str) -> Iterator[Any]:
    """What a text may stand for, the likeliest first."""
    if text.lower() == "none":
        yield None
    for spelling in (text, text.lower()):  # True and False, too
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(spelling)
    yield text


def spelled(value: Any) -> str:
    """A setting's value as `/set` takes it."""
    return value if isinstance(value, str) else json.dumps(value).replace("null", "none")
