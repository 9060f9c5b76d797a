"""The images of prompts: read, decoded, and their tokens put in their places."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace

from atom.entrypoints.chat.prompt import Prompt
from atom.entrypoints.http.errors import MAX_MESSAGE, ContextExceededError, bad_request
from atom.entrypoints.http.unknown_fields import UNSUPPORTED_CONTENT
from atom.messages import ContextLengthError, RequestRefusedError
from atom.multimodal.items import ImageItem, expand
from atom.multimodal.media import MediaFile, MediaLoader
from atom.multimodal.policy import MediaError
from atom.multimodal.processors.base import ImageProcessor
from atom.quoting import excerpt

INVALID_IMAGE = "invalid_image"

# Images that are decoded at a time, each up to 12 bytes a pixel: this bounds memory.
DECODED_AT_ONCE = 2
# Requests whose images are read at a time; most of them wait for what they fetch.
IMAGE_THREADS = 16
# Images that are read at a time, of all requests; most of these wait for what they fetch, too.
READ_THREADS = 16
# Of one request: how many are read beside the one that is waited for.
READ_AHEAD = 3
# Of one request, for all of its images.
READ_SECONDS = 60.0


def may_hold_image(data: bytes) -> bool:
    """Whether JSON text may have an image: whether its key or type is spelled, or may be."""
    return b"image" in data or b"\\u00" in data


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of prompts in the calling thread, which may take as long as fetching does.

    Attributes:
        max_images: of a prompt.
        max_model_len: tokens of a prompt; more images than fit are not read.
    """

    processor: ImageProcessor
    loader: MediaLoader
    max_images: int
    max_model_len: int
    # Threads of their own: an allocator keeps memory for each that has ever decoded.
    _decoders: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(DECODED_AT_ONCE, thread_name_prefix="decoder")
    )
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(READ_THREADS, thread_name_prefix="image")
    )

    def read(self, prompt: Prompt, urls: Sequence[str], param: str) -> Prompt:
        """The prompt with the tokens of its images.

        Args:
            urls: of the images, in the order of their placeholders.
            param: the request's field that has them.

        Raises:
            ApiError: 400 for images that are too many, not allowed, damaged or none.
        """
        if len(urls) > self.max_images:
            raise bad_request(
                f"{param} hold {len(urls)} images, and this server takes at most "
                f"{self.max_images} in a prompt (--limit-mm-per-prompt)",
                param,
                "too_many_images",
            )
        items = self._items(urls, param, len(prompt.token_ids))
        try:
            token_ids, inputs = expand(prompt.token_ids, items, self.processor.placeholder_id)
        except RequestRefusedError as error:
            raise bad_request(str(error), param, UNSUPPORTED_CONTENT) from None
        return replace(prompt, token_ids=token_ids, images=inputs)

    def _items(self, urls: Sequence[str], param: str, num_tokens: int) -> list[ImageItem]:
        """Equal URLs are read once, others side by side."""
        deadline = time.monotonic() + READ_SECONDS
        waiting = deque(dict.fromkeys(urls))
        begun: dict[str, Future[ImageItem]] = {}
        taken: set[str] = set()
        items: list[ImageItem] = []
        try:
            for number, url in enumerate(urls, start=1):
                taken.add(url)
                while waiting and len(begun) < len(taken) + READ_AHEAD:
                    following = waiting.popleft()
                    begun[following] = self._threads.submit(self._item, following)
                try:
                    items.append(begun[url].result(max(0.0, deadline - time.monotonic())))
                except MediaError as error:
                    said = excerpt(f"{param}: image {number}: {error}", MAX_MESSAGE)
                    raise bad_request(said, param, INVALID_IMAGE) from None
                except FutureTimeoutError:
                    raise bad_request(
                        f"{param}: reading {number - 1} of {len(urls)} images took longer than "
                        f"{READ_SECONDS:g} s; send fewer or smaller ones",
                        param,
                        INVALID_IMAGE,
                    ) from None
                num_tokens += len(items[-1].token_ids)
                if num_tokens > self.max_model_len:
                    exceeded = ContextLengthError(num_tokens, self.max_model_len, is_at_least=True)
                    raise ContextExceededError(exceeded, param)
        finally:
            for future in begun.values():
                future.cancel()
        return items

    def _item(self, url: str) -> ImageItem:
        file = self.loader.read(url)
        return self._decoders.submit(self._decode, file).result()

    def _decode(self, file: MediaFile) -> ImageItem:
        return self.processor.process(self.loader.decode(file))
