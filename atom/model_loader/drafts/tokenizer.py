"""Compares a draft's tokenizer, if it has one, with the target's."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atom.config import ConfigError
from atom.model_loader.read_files import read_tokenizer
from atom.model_loader.tokenizers.plain_tokenizer import BYTE_OF_CHAR
from atom.models.config.file import check_regular, is_there, read_json, read_json_object

# Compared byte by byte; each contains an ordered vocabulary.
_VOCABULARY_FILES = ("tiktoken.model", "tokenizer.model", "vocab.json")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Whether it was added to the vocabulary, as special tokens are, and what it reads.
_Token = tuple[bool, bytes]


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


@dataclass(frozen=True)
class TokenMaps:
    """Tokens of two vocabularies that read the same, or nearly.

    Attributes:
        to_target: for each of the draft's tokens, the target's with its text, or else the longest
            with which its text begins.
        to_draft: for each of the target's tokens, the draft's with its text, or else the longest
            with which its text ends.
        num_shared: the target's tokens that the draft has.
    """

    to_target: list[int]
    to_draft: list[int]
    num_shared: int

    @property
    def are_identical(self) -> bool:
        """Whether every id means the same."""
        ids = list(range(len(self.to_target)))
        return self.to_target == self.to_draft == ids


def map_tokens(draft: Path, target: Path, draft_size: int, target_size: int) -> TokenMaps:
    """Map the tokens of the tokenizers in two folders.

    Args:
        draft_size, target_size: of the vocabularies, padding included.

    Raises:
        ConfigError: when a tokenizer cannot be read, or they have no token in common.
    """
    ours, theirs = _read_tokens(draft, draft_size), _read_tokens(target, target_size)
    num_shared = len(set(ours.values()) & set(theirs.values()))
    if not num_shared:
        raise ConfigError(f"the tokenizers of {draft} and {target} have no token in common")
    return TokenMaps(
        _nearest(
            ours, theirs, draft_size, lambda text: (text[:n] for n in range(len(text), 0, -1))
        ),
        _nearest(theirs, ours, target_size, lambda text: (text[n:] for n in range(len(text)))),
        num_shared,
    )


def _nearest(
    tokens: dict[int, _Token],
    others: dict[int, _Token],
    size: int,
    parts: Callable[[bytes], Iterator[bytes]],
) -> list[int]:
    """For each of `size` tokens, one of the others; itself where that has the same text, and the
    first where none fits.

    Args:
        parts: of a text, from the longest on.
    """
    ids = {token: i for i, token in sorted(others.items(), reverse=True)}
    found = []
    for i in range(size):
        token = tokens.get(i)
        if token is None or others.get(i) == token:
            found.append(i if token is not None else 0)
            continue
        candidates = (ids.get((False, part)) for part in parts(token[1]))
        nearest = next((other for other in candidates if other is not None), 0)
        found.append(ids.get(token, nearest))
    return found


def _read_tokens(folder: Path, size: int) -> dict[int, _Token]:
    """The tokens by id, below `size`, but for those without a text."""
    tokens = dict(_tokens_of_tiktoken(folder) if _is_tiktoken(folder) else _tokens_of_json(folder))
    return {i: token for i, token in tokens.items() if i < size and token[1]}


def _is_tiktoken(folder: Path) -> bool:
    return is_there(folder / "tiktoken.model") and not is_there(folder / "tokenizer.json")


def _tokens_of_tiktoken(folder: Path) -> Iterator[tuple[int, _Token]]:
    path = folder / "tiktoken.model"
    check_regular(path)
    try:
        for line in path.read_bytes().split(b"\n"):
            if line:
                text, rank = line.split()
                yield int(rank), (False, base64.b64decode(text, validate=True))
        added = read_json_object(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
        for i, token in added.items():
            yield int(i), (True, str(token["content"]).encode())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder} cannot be read as a tokenizer: {error!r}") from error


def _tokens_of_json(folder: Path) -> Iterator[tuple[int, _Token]]:
    path = folder / "tokenizer.json"
    if is_there(path):
        content = read_json(path)
    else:
        backend = getattr(read_tokenizer(folder, False), "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"{folder} has no tokenizer.json, and no tokenizer that becomes one")
        content = json.loads(backend.to_str())
    try:
        read = (
            _read_byte_level if "ByteLevel" in json.dumps(content.get("decoder")) else _read_piece
        )
        for i, piece in _numbered(content["model"]["vocab"]).items():
            yield i, (False, read(piece))
        for token in content.get("added_tokens") or []:
            yield int(token["id"]), (True, str(token["content"]).encode())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error!r}") from error


def _read_byte_level(piece: str) -> bytes:
    if any(char not in BYTE_OF_CHAR for char in piece):
        return piece.encode()
    return bytes(BYTE_OF_CHAR[char] for char in piece)


def _read_piece(piece: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace("\u2581", " ").encode()
