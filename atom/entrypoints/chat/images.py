"""The images and videos of prompts: read, decoded, and their tokens put in their places."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from typing import Literal

from atom.entrypoints.chat.prompt import Prompt
from atom.entrypoints.http.errors import MAX_MESSAGE, ContextExceededError, bad_request
from atom.entrypoints.http.unknown_fields import UNSUPPORTED_CONTENT
from atom.messages import ContextLengthError, RequestRefusedError
from atom.multimodal.items import ImageItem, expand
from atom.multimodal.media import MediaFile, MediaLoader, VideoSource
from atom.multimodal.policy import MediaError
from atom.multimodal.processors.base import ImageProcessor, VideoProcessor
from atom.quoting import excerpt

Kind = Literal["image", "video"]

# Images that are decoded at a time, each up to 12 bytes a pixel: this bounds memory. A video's
# frames take 7 a pixel, and have up to four times as many together.
DECODED_AT_ONCE = 2
# Requests whose images are read at a time; most of them wait for what they fetch.
IMAGE_THREADS = 16
# Images that are read at a time, of all requests; most of these wait for what they fetch, too.
READ_THREADS = 16
# Of one request: how many are read beside the one that is waited for.
READ_AHEAD = 3
# Of one request, for all of its images.
READ_SECONDS = 60.0


def may_hold_media(data: bytes) -> bool:
    """Whether JSON text may have an image or a video: whether its type is spelled, or may be."""
    return b"image" in data or b"video" in data or b"\\u00" in data


def kind_of(given: str | VideoSource) -> Kind:
    """Of a URL of an image, or a video."""
    return "video" if isinstance(given, VideoSource) else "image"


@dataclass(frozen=True)
class ImageReader:
    """Reads the images and videos of prompts in the calling thread, which may take as long as
    fetching does.

    Attributes:
        max_images: of a prompt.
        max_model_len: tokens of a prompt; more images than fit are not read.
        videos: None where the model reads none.
        max_videos: of a prompt.
    """

    processor: ImageProcessor
    loader: MediaLoader
    max_images: int
    max_model_len: int
    videos: VideoProcessor | None = None
    max_videos: int = 0
    # Threads of their own: an allocator keeps memory for each that has ever decoded.
    _decoders: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(DECODED_AT_ONCE, thread_name_prefix="decoder")
    )
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(READ_THREADS, thread_name_prefix="image")
    )

    @property
    def kinds(self) -> list[Kind]:
        """What prompts may have."""
        most: dict[Kind, int] = {"image": self.max_images, "video": self.max_videos}
        return [kind for kind in most if most[kind] and (kind == "image" or self.videos)]

    def read(self, prompt: Prompt, given: Sequence[str | VideoSource], param: str) -> Prompt:
        """The prompt with the tokens of its images and videos.

        Args:
            given: URLs of images, and videos by URLs, in the order of their placeholders.
            param: the request's field that has them.

        Raises:
            ApiError: 400 for images or videos that are too many, not allowed, damaged or none.
        """
        num_videos = sum(isinstance(each, VideoSource) for each in given)
        if num_videos and self.videos is None:
            raise bad_request(
                f"{param} hold videos, and this model reads none, or was loaded to read none; "
                f"send images or text",
                param,
                UNSUPPORTED_CONTENT,
            )
        num_images = len(given) - num_videos
        for kind, count, most in (
            ("images", num_images, self.max_images),
            ("videos", num_videos, self.max_videos),
        ):
            if count > most:
                raise bad_request(
                    f"{param} hold {count} {kind}, and this server takes at most {most} in a "
                    f"prompt (--limit-mm-per-prompt)",
                    param,
                    f"too_many_{kind}",
                )
        items = self._items(given, param, len(prompt.token_ids))
        video = None if self.videos is None else self.videos.placeholder_id
        try:
            token_ids, inputs = expand(
                prompt.token_ids, items, self.processor.placeholder_id, video
            )
        except RequestRefusedError as error:
            raise bad_request(str(error), param, UNSUPPORTED_CONTENT) from None
        return replace(prompt, token_ids=token_ids, images=inputs)

    def _items(
        self, given: Sequence[str | VideoSource], param: str, num_tokens: int
    ) -> list[ImageItem]:
        """Equal ones are read once, others side by side."""
        deadline = time.monotonic() + READ_SECONDS
        waiting = deque(dict.fromkeys(given))
        begun: dict[str | VideoSource, Future[ImageItem]] = {}
        taken: set[str | VideoSource] = set()
        numbers: Counter[Kind] = Counter()
        items: list[ImageItem] = []
        try:
            for each in given:
                kind = kind_of(each)
                numbers[kind] += 1
                taken.add(each)
                while waiting and len(begun) < len(taken) + READ_AHEAD:
                    following = waiting.popleft()
                    begun[following] = self._threads.submit(self._item, following)
                try:
                    items.append(begun[each].result(max(0.0, deadline - time.monotonic())))
                except MediaError as error:
                    said = excerpt(f"{param}: {kind} {numbers[kind]}: {error}", MAX_MESSAGE)
                    raise bad_request(said, param, f"invalid_{kind}") from None
                except FutureTimeoutError:
                    raise bad_request(
                        f"{param}: reading {len(items)} of {len(given)} images and videos took "
                        f"longer than {READ_SECONDS:g} s; send fewer or smaller ones",
                        param,
                        f"invalid_{kind}",
                    ) from None
                num_tokens += len(items[-1].token_ids)
                if num_tokens > self.max_model_len:
                    exceeded = ContextLengthError(num_tokens, self.max_model_len, is_at_least=True)
                    raise ContextExceededError(exceeded, param)
        finally:
            for future in begun.values():
                future.cancel()
        return items

    def _item(self, given: str | VideoSource) -> ImageItem:
        if isinstance(given, VideoSource):
            return self._decoders.submit(self._decode_video, given).result()
        file = self.loader.read(given)
        return self._decoders.submit(self._decode, file).result()

    def _decode_video(self, source: VideoSource) -> ImageItem:
        assert self.videos is not None  # checked before anything is read
        return self.videos.process(self.loader.load_video(source))

    def _decode(self, file: MediaFile) -> ImageItem:
        return self.processor.process(self.loader.decode(file))
