"""Each image is encoded once while its rows are kept."""

from __future__ import annotations

import time
from collections import OrderedDict

import torch

from atom.batch import EncoderCounts
from atom.messages import ImageInput
from atom.models.vision.encoder import ImageEncoder


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class EncoderCache:
    """The rows of images by their digests, the least recently used going first.

    What is asked for is always there: an image whose rows are gone, or were too many to keep, is
    encoded again. Equal images have equal rows, whoever sent them.

    Attributes:
        encoder: as given.

    Args:
        num_bytes: of all rows that are kept.
    """

    def __init__(
        self, encoder: ImageEncoder, num_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.encoder = encoder
        self._num_bytes = num_bytes
        self._dtype = dtype
        self._device = device
        self._rows: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._used = 0
        self._queries = self._hits = 0
        self._seconds = 0.0
        # Of encodings on a GPU: the events before and behind each.
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def rows(self, image: ImageInput, *, counts: bool) -> torch.Tensor:
        """The image's rows, [tokens, hidden].

        Args:
            counts: whether this is a query that the counts tell of.
        """
        found = self._rows.get(image.digest)
        self._queries += counts
        if found is not None:
            self._hits += counts
            self._rows.move_to_end(image.digest)
            return found
        made = self._encode(image)
        if made.nbytes <= self._num_bytes:
            self._rows[image.digest] = made
            self._used += made.nbytes
            while self._used > self._num_bytes:
                self._used -= self._rows.popitem(last=False)[1].nbytes
        return made

    def take_counts(self) -> EncoderCounts:
        """What happened since the last call; of encodings on a GPU, those that have ended."""
        while self._timed and self._timed[0][1].query():  # type: ignore[no-untyped-call]
            begun, ended = self._timed.pop(0)
            self._seconds += begun.elapsed_time(ended) / 1000
        taken = EncoderCounts(self._queries, self._hits, self._seconds)
        self._queries = self._hits = 0
        self._seconds = 0.0
        return taken

    def _encode(self, image: ImageInput) -> torch.Tensor:
        """Raises:
        RuntimeError: when the encoder makes another number of rows than the prompt has places for.
        """
        started, events = time.perf_counter(), None
        if self._device.type == "cuda":
            events = _event(), _event()
            events[0].record()
        stored = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(image.shape)
        pixels = stored.to(self._device).float()
        of_channels = (-1, 1, 1)
        pixels -= torch.tensor(image.mean, device=self._device).view(of_channels)
        pixels /= torch.tensor(image.std, device=self._device).view(of_channels)
        made: torch.Tensor = self.encoder(pixels.to(self._dtype), image.grid)
        if len(made) != image.num_tokens:
            raise RuntimeError(
                f"an image of shape {image.shape} was encoded to {len(made)} rows, and its prompt "
                f"has {image.num_tokens} tokens for it"
            )
        if events is None:
            self._seconds += time.perf_counter() - started
        else:
            events[1].record()
            self._timed.append(events)
        return made
