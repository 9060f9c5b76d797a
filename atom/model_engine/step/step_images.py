"""The rows of a step that images fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from atom.batch import EncoderCounts, ScheduledBatch, ScheduledSequence
from atom.messages import ImageInput
from atom.model_ops.attention.metadata import ImageRows
from atom.models.vision.encoder_cache import EncoderCache

# Of a step's tokens, and of its next tokens.
RowsOfImages = tuple[ImageRows | None, ImageRows | None]
NO_ROWS: RowsOfImages = (None, None)
# (first row of a step, first row of the image, number)
_Piece = tuple[int, int, int]


class NoImages:
    """Of a model that reads none.

    Attributes:
        are_read: whether the model reads images.
        are_running: whether a running sequence has any.
        mrope: whether tokens rotate by three numbers.
    """

    are_read = are_running = mrope = False

    def __init__(self) -> None:
        # By the sequences' rows in the runner's tables.
        self._images: dict[int, tuple[ImageInput, ...]] = {}

    def start(self, batch: ScheduledBatch) -> None:
        """Take the images of sequences that start, and forget those of sequences that ended."""

    def rows(self, sequences: Sequence[ScheduledSequence]) -> RowsOfImages:
        """What fills the step's rows that stand for images, and those whose next token does, where
        it is read.
        """
        return NO_ROWS

    def mrope_shifts(self, sequences: Sequence[ScheduledSequence]) -> np.ndarray:
        """As in `ModelInput`, of all their tokens: [N, 3] int64.

        Those of tokens behind a prompt do not depend on where they are, so they are right for
        sequences whose start only the device knows, too.
        """
        parts = [shifts_at(self._images.get(s.row, ()), s.start, s.context_len) for s in sequences]
        return np.concatenate(parts)

    def take_counts(self) -> EncoderCounts:
        """As `EncoderCache.take_counts`."""
        return EncoderCounts()


class StepImages(NoImages):
    """The images of running sequences, by their row in the runner's tables.

    An image is encoded as a whole when a step computes any of its positions, and each step takes
    the rows that it needs: prompts may be cut anywhere.

    Args:
        reads_next: whether a proposer reads the embeddings of next tokens.
    """

    are_read = True

    def __init__(self, cache: EncoderCache, device: torch.device, reads_next: bool = False) -> None:
        super().__init__()
        self.mrope = cache.encoder.mrope
        self._cache = cache
        self._device = device
        self._reads_next = reads_next
        # Of those rows' images, which were asked for since their sequence started.
        self._asked: dict[int, set[bytes]] = {}

    def start(self, batch: ScheduledBatch) -> None:
        for row in batch.freed_rows:
            self._images.pop(row, None)
            self._asked.pop(row, None)
        for new in batch.new:
            if new.images:
                self._images[new.row] = new.images
                self._asked[new.row] = set()
        self.are_running = bool(self._images)

    def rows(self, sequences: Sequence[ScheduledSequence]) -> RowsOfImages:
        own = self._rows(sequences, 0)
        return own, self._rows(sequences, 1) if self._reads_next else None

    def _rows(self, sequences: Sequence[ScheduledSequence], ahead: int) -> ImageRows | None:
        """Where the tokens so far ahead of the step's rows are those of images."""
        places: list[int] = []
        parts: list[torch.Tensor] = []
        first = 0
        for sequence in sequences:
            for image in self._images.get(sequence.row, ()):
                start, stop = sequence.start + ahead, sequence.context_len + ahead
                pieces = list(_pieces(image, start, stop, first))
                if not pieces:
                    continue
                asked = self._asked[sequence.row]
                rows = self._cache.rows(image, counts=image.digest not in asked)
                asked.add(image.digest)
                for place, begin, count in pieces:
                    places += range(place, place + count)
                    parts.append(rows[begin : begin + count])
            first += len(sequence.token_ids)
        if not places:
            return None
        return ImageRows(torch.tensor(places, device=self._device), torch.cat(parts))

    def take_counts(self) -> EncoderCounts:
        return self._cache.take_counts()


class FullStepImages(StepImages):
    """Images fill every row of every step: the most memory that they take beside the layers.

    Args:
        like: whose place it takes.
        embed: token ids [T] -> [T, hidden].
    """

    are_running = True

    def __init__(self, like: StepImages, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(like._cache, like._device, like._reads_next)
        self._embed = embed

    def start(self, batch: ScheduledBatch) -> None:
        """They are the same for all sequences."""

    def rows(self, sequences: Sequence[ScheduledSequence]) -> RowsOfImages:
        count = sum(len(sequence.token_ids) for sequence in sequences)
        places = torch.arange(count, device=self._device)
        embedded = self._embed(torch.zeros_like(places))
        own = ImageRows(places, embedded.repeat(1, 1 + self._cache.encoder.num_deep))
        if not self._reads_next:
            return own, None
        return own, ImageRows(places, own.embeddings.clone())


def shifts_at(images: Sequence[ImageInput], start: int, stop: int) -> np.ndarray:
    """What is added to the positions `start` to `stop` of a prompt with images, [N, 3] int64.

    A token of an image at range's place p has those of p with its time, row and column added; text
    goes on behind the largest of them.
    """
    shifts = np.zeros((stop - start, 3), dtype=np.int64)
    shift = 0
    for image in images:
        grid = image.mrope_grid
        if grid is None or image.start >= stop:
            continue
        for place, count in image.ranges:
            begin, end = max(place, start), min(place + count, stop)
            if begin < end:
                own = np.arange(begin - place, end - place)
                frames, within = np.divmod(own, grid.rows * grid.columns)
                rows, columns = np.divmod(within, grid.columns)
                places = np.stack([np.array(grid.times)[frames], rows, columns], axis=1)
                shifts[begin - start : end - start] = shift + places - own[:, None]
            shift += grid.extent - count
            shifts[max(place + count - start, 0) :] = shift
    return shifts


def _pieces(image: ImageInput, start: int, stop: int, first: int) -> Iterator[_Piece]:
    """The image's rows at positions `start` to `stop`, the first of which is row `first`."""
    done = 0
    for place, count in image.ranges:
        begin, end = max(place, start), min(place + count, stop)
        if begin < end:
            yield first + begin - start, done + begin - place, end - begin
        done += count
