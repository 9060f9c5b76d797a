"""Checks that a draft's tokenizer, if it has one, is the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atom.config import ConfigError
from atom.models.config_file import check_regular, is_there, read_json

# Compared byte by byte; each contains an ordered vocabulary.
_VOCABULARY_FILES = ("tiktoken.model", "tokenizer.model", "vocab.json")


def check_same_tokenizer(draft: Path, target: Path) -> None:
    """Compare the tokenizer files of two folders, where both have the same kind.

    Raises:
        ConfigError: when a token id has different texts in draft and target.
    """
    ours, theirs = draft / "tokenizer.json", target / "tokenizer.json"
    if is_there(ours) and is_there(theirs):
        _compare_vocabularies(_tokens_by_id(ours), _tokens_by_id(theirs), draft, target)
        return
    for name in _VOCABULARY_FILES:
        ours, theirs = draft / name, target / name
        if not (is_there(ours) and is_there(theirs)):
            continue
        check_regular(ours)
        check_regular(theirs)
        if ours.read_bytes() != theirs.read_bytes():
            raise ConfigError(
                f"{ours} ({ours.stat().st_size} bytes) and {theirs} ({theirs.stat().st_size} "
                f"bytes) differ: the draft was made for another tokenizer than the target's"
            )
        return


def _compare_vocabularies(
    ours: dict[int, str], theirs: dict[int, str], draft: Path, target: Path
) -> None:
    different = sorted(i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i])
    if different:
        i = different[0]
        raise ConfigError(
            f"the draft's tokenizer ({draft}, {len(ours)} tokens) is not the target's ({target}, "
            f"{len(theirs)} tokens): {len(different)} ids mean something else, such as {i}: "
            f"{ours[i]!r} to the draft, {theirs[i]!r} to the target"
        )


def _tokens_by_id(path: Path) -> dict[int, str]:
    content = read_json(path)
    try:
        vocabulary = content["model"]["vocab"]
        tokens = _numbered(vocabulary)
        tokens |= {int(t["id"]): str(t["content"]) for t in content.get("added_tokens") or []}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error!r}") from error
    return tokens


def _numbered(vocabulary: Any) -> dict[int, str]:
    """Token texts by id; unigram models have a list of (token, score)."""
    if isinstance(vocabulary, list):
        return {i: str(entry[0]) for i, entry in enumerate(vocabulary)}
    return {int(i): str(token) for token, i in vocabulary.items()}
