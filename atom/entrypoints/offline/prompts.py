"""The shapes that prompts and what goes with them may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Text; token ids; or a dict with either "prompt" or "prompt_token_ids".
Prompt = str | Sequence[int] | Mapping[str, Any]


def prompt_list(
    prompts: Prompt | Sequence[Prompt] | None,
    prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None,
) -> list[Prompt]:
    """One or many prompts, given in one of two ways, as a list.

    Raises:
        TypeError: for both ways, or neither.
    """
    if (prompts is None) == (prompt_token_ids is None):
        raise TypeError("give either prompts or prompt_token_ids")
    given: Any = prompt_token_ids if prompts is None else prompts
    if isinstance(given, (str, Mapping)):
        return [given]
    if given and all(isinstance(p, int) for p in given):
        return [given]
    return list(given)


def content_of(prompt: Prompt) -> str | list[int]:
    """The text or the token ids of a prompt.

    Raises:
        TypeError: when it is neither.
    """
    value: Any = prompt
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not {"prompt", "prompt_token_ids"} & set(prompt):
            raise TypeError(
                f"a prompt dict holds either 'prompt' or 'prompt_token_ids', got {sorted(prompt)}"
            )
        value = next(iter(prompt.values()))
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not all(type(t) is int for t in value):
        raise TypeError(f"a prompt is text or token ids, got {value!r}")
    return list(value)


def one_each(name: str, value: Any, count: int) -> list[Any]:
    """A value for each of `count` prompts: the one that there is, or each its own.

    Raises:
        ValueError: when there are more or fewer.
    """
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{len(value)} {name} were given for {count} prompts")
    return list(value)


def refuse_adapter(lora_request: object) -> None:
    """Raises ValueError: there are no adapters, so only None can be meant."""
    if lora_request is not None:
        raise ValueError("lora_request: adapters are not supported; merge it into the model")
