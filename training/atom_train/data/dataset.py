"""The dataset that `synthesize` writes and `train` reads: safetensors shards and a manifest."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from atom_train.data.prompts import DataError

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True)
class Example:
    """One text.

    Attributes:
        index: of the prompt that it answers.
        token_ids: [n] int32.
        mask: [n] bool; tokens that the target generated.
        temperature: at which it answered; 0 is greedy.
        answer_start: place of the answer's first token, behind a turn that the target may have
            written, too; None in folders that do not say.
        features: [n - 1, (A + 1) * hidden]; for every token but the last, the target's A aux hidden
            states and its final one after the norm, concatenated. None when not kept.
    """

    index: int
    token_ids: torch.Tensor
    mask: torch.Tensor
    features: torch.Tensor | None = None
    temperature: float = 1.0
    answer_start: int | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass
class Manifest:
    """The content and origin of a dataset folder.

    Attributes:
        settings: everything that determines the texts; a resumed run must have the same.
        aux_layer_ids: boundary ids of the kept features; None without features.
        counts: numbers of texts and tokens, kept and dropped.
        dropped: indices of prompts whose answers were dropped.
        shards: file names in order.
    """

    settings: dict[str, Any]
    aux_layer_ids: list[int] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    format: int = _FORMAT

    def add(self, name: str, amount: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount

    def temperature(self, index: int) -> float:
        """Of the answer to prompt `index`."""
        return draw_temperature(self.settings["seed"], index, self.settings["temperatures"])

    def write(self, folder: Path) -> None:
        replace_file(folder / MANIFEST, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises:
        DataError: when there is no manifest, or it has another format.
        """
        path = folder / MANIFEST
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            manifest = cls(**raw)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path} is no dataset manifest: {error}") from error
        if manifest.format != _FORMAT:
            raise DataError(f"{path} has format {manifest.format}, this version reads {_FORMAT}")
        return manifest


def draw_seed(seed: int, request_id: str) -> tuple[int, random.Random]:
    """The seed of a request of a run with `seed`, and a generator for its other choices."""
    rng = random.Random(f"{seed} {request_id}")
    return rng.getrandbits(63), rng


def draw_temperature(seed: int, index: int, temperatures: Sequence[float]) -> float:
    """The temperature of the answer to prompt `index` in a run with `seed`."""
    return draw_seed(seed, str(index))[1].choice(temperatures)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_shard(path: Path, examples: Sequence[Example]) -> None:
    """Write concatenated examples; the file is replaced atomically."""
    lengths = torch.tensor([len(example) for example in examples])
    tensors = {
        "token_ids": torch.cat([example.token_ids for example in examples]).int(),
        "mask": torch.cat([example.mask for example in examples]).to(torch.uint8),
        "offsets": torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))),
        "indices": torch.tensor([example.index for example in examples]),
    }
    starts = [example.answer_start for example in examples if example.answer_start is not None]
    if len(starts) == len(examples):
        tensors["answer_starts"] = torch.tensor(starts)
    features = [example.features for example in examples if example.features is not None]
    if features:
        tensors["features"] = torch.cat(features)
    temporary = path.with_name(path.name + ".tmp")
    save_file(tensors, temporary)
    temporary.replace(path)


def read_shard_texts(path: Path) -> list[Example]:
    """The texts of a shard, without their features.

    Raises:
        DataError: when the file is not a shard.
    """
    try:
        with safe_open(path, framework="pt") as file:
            token_ids, mask, offsets, indices = (
                file.get_tensor(name) for name in ("token_ids", "mask", "offsets", "indices")
            )
            starts: list[int | None] = [None] * len(indices)
            if "answer_starts" in file.keys():  # noqa: SIM118
                starts = file.get_tensor("answer_starts").tolist()
    except Exception as error:  # safetensors has its own exception class
        raise DataError(f"{path} is no shard of a dataset: {error}") from error
    bounds = itertools.pairwise(offsets.tolist())
    return [
        Example(index, token_ids[first:last], mask[first:last].bool(), answer_start=start)
        for index, start, (first, last) in zip(indices.tolist(), starts, bounds, strict=True)
    ]


@dataclass(frozen=True)
class FeaturePlace:
    """Rows `first` to `last` of a shard's features."""

    shard: Path
    first: int
    last: int


@dataclass(frozen=True)
class Dataset:
    """The texts of one or more folders, numbered consecutively.

    Attributes:
        places: where the features of text i are, if they were kept.
        aux_layer_ids: boundary ids of the kept features; None when a folder has none.
    """

    texts: list[Example]
    places: list[FeaturePlace]
    aux_layer_ids: tuple[int, ...] | None

    @classmethod
    def read(cls, folders: Sequence[Path], target: str, vocab_size: int) -> Dataset:
        """Raises:
        DataError: for a folder without texts, of another target, or with other features.
        """
        texts: list[Example] = []
        places: list[FeaturePlace] = []
        kept: set[tuple[int, ...] | None] = set()
        for folder in folders:
            manifest = Manifest.read(folder)
            written_by = manifest.settings.get("target")
            if written_by != target:
                raise DataError(
                    f"{folder} was written by {written_by!r}, the target is {target!r}: a draft "
                    f"learns from its own target's texts only"
                )
            if not manifest.shards:
                raise DataError(f"{folder} holds no texts")
            aux = manifest.aux_layer_ids
            kept.add(None if aux is None else tuple(aux))
            for name in manifest.shards:
                first = 0
                for example in read_shard_texts(folder / name):
                    _check(example, folder / name, vocab_size)
                    places.append(FeaturePlace(folder / name, first, first + len(example) - 1))
                    temperature = manifest.temperature(example.index)
                    texts.append(replace(example, index=len(texts), temperature=temperature))
                    first += len(example) - 1
        if len(kept) > 1 and None not in kept:
            layers = sorted(ids for ids in kept if ids)
            raise DataError(f"the folders keep the features of different layers: {layers}")
        return cls(texts, places, kept.pop() if len(kept) == 1 else None)


def _check(example: Example, shard: Path, vocab_size: int) -> None:
    if len(example) < 3:
        raise DataError(f"{shard}: text {example.index} has {len(example)} tokens, needs 3")
    if not 0 <= int(example.token_ids.min()) <= int(example.token_ids.max()) < vocab_size:
        raise DataError(
            f"{shard}: text {example.index} has token ids outside the target's {vocab_size}"
        )


def read_indices(folder: Path, manifest: Manifest) -> Iterator[int]:
    """Indices of the prompts in the dataset."""
    for name in manifest.shards:
        with safe_open(folder / name, framework="pt") as file:
            yield from file.get_tensor("indices").tolist()
