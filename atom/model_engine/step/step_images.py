"""The rows of a step that images fill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from atom.batch import EncoderCounts, ScheduledBatch, ScheduledSequence
from atom.messages import ImageInput
from atom.model_engine.step.encoder_cache import EncoderCache
from atom.model_ops.attention.metadata import ImageRows

# (first row of a step, first row of the image, number)
_Piece = tuple[int, int, int]


class StepImages:
    """The images of running sequences, by their row in the runner's tables.

    An image is encoded as a whole when a step computes any of its positions, and each step takes
    the rows that it needs: prompts may be cut anywhere.
    """

    def __init__(self, cache: EncoderCache, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._images: dict[int, tuple[ImageInput, ...]] = {}
        # Of those rows' images, which were asked for since their sequence started.
        self._asked: dict[int, set[bytes]] = {}

    def start(self, batch: ScheduledBatch) -> None:
        """Take the images of sequences that start, and forget those of sequences that ended."""
        for row in batch.freed_rows:
            self._images.pop(row, None)
            self._asked.pop(row, None)
        for new in batch.new:
            if new.images:
                self._images[new.row] = new.images
                self._asked[new.row] = set()

    def rows(self, sequences: Sequence[ScheduledSequence]) -> ImageRows | None:
        """What fills the step's rows that stand for images; None if there are none."""
        if not self._images:
            return None
        places: list[int] = []
        parts: list[torch.Tensor] = []
        first = 0
        for sequence in sequences:
            for image in self._images.get(sequence.row, ()):
                pieces = list(_pieces(image, sequence.start, sequence.context_len, first))
                if not pieces:
                    continue
                asked = self._asked[sequence.row]
                rows = self._cache.rows(image, counts=image.digest not in asked)
                asked.add(image.digest)
                for place, start, count in pieces:
                    places += range(place, place + count)
                    parts.append(rows[start : start + count])
            first += len(sequence.token_ids)
        if not places:
            return None
        return ImageRows(torch.tensor(places, device=self._device), torch.cat(parts))

    def take_counts(self) -> EncoderCounts:
        """As `EncoderCache.take_counts`."""
        return self._cache.take_counts()


def _pieces(image: ImageInput, start: int, stop: int, first: int) -> Iterator[_Piece]:
    """The image's rows at positions `start` to `stop`, the first of which is row `first`."""
    done = 0
    for place, count in image.ranges:
        begin, end = max(place, start), min(place + count, stop)
        if begin < end:
            yield first + begin - start, done + begin - place, end - begin
        done += count
