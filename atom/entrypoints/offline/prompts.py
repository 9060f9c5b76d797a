"""The shapes that prompts and what goes with them may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atom.entrypoints.chat.image_marks import mark_of, without_marks
from atom.multimodal.media import VideoSource
from atom.quoting import quote

# Types of parts, which are the names of their images, too.
_IMAGES = ("image_url", "image", "image_pil")
_VIDEOS = ("video_url", "video")

# Text; token ids; or a dict with either "prompt" or "prompt_token_ids", and "multi_modal_data".
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
        names = set(prompt) - {"multi_modal_data"}
        if len(names) != 1 or not names <= {"prompt", "prompt_token_ids"}:
            raise TypeError(
                f"a prompt dict holds either 'prompt' or 'prompt_token_ids', and multi_modal_data "
                f"if there are images; got {sorted(prompt)}"
            )
        value = prompt[names.pop()]
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not all(type(t) is int for t in value):
        raise TypeError(f"a prompt is text or token ids, got {value!r}")
    return list(value)


def images_of(prompt: Prompt) -> list[Any]:
    """The images that go with a prompt, in the order of their places, and behind them its videos.

    Raises:
        TypeError: for other data, which nothing reads.
    """
    data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if data is None:
        return []
    if not isinstance(data, Mapping) or not set(data) <= {"image", "video"}:
        raise TypeError(
            f"multi_modal_data holds 'image' and 'video': one or a list of them; got {quote(data)}"
        )
    image, video = data.get("image"), data.get("video")
    images = list(image) if isinstance(image, (list, tuple)) else [image]
    # A list of frames is one video, and one of lists, arrays of frames or dicts is several.
    videos = [video]
    if isinstance(video, list) and all(map(_is_video, video)):
        videos = video
    return [
        *(given for given in images if given is not None),
        *(_video_of(given) for given in videos if given is not None),
    ]


def _is_video(given: Any) -> bool:
    if getattr(given, "ndim", 0) == 4 or isinstance(given, (list, tuple, Mapping, VideoSource)):
        return True
    return isinstance(given, str) and given[:11].lower() == "data:video/"


def _video_of(given: Any) -> VideoSource:
    """Frames, `{"frames": ..., "fps": ...}`, or vLLM's `(frames, {"fps": ...})`.

    Raises:
        TypeError: for an object with other keys.
    """
    if isinstance(given, VideoSource):
        return given
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        given = {"frames": given[0], **given[1]}
    if not isinstance(given, Mapping):
        return VideoSource(given)
    if "frames" not in given or not set(given) <= {"frames", "fps"}:
        raise TypeError(f"a video is its frames, or has 'frames' and 'fps'; got {sorted(given)}")
    return VideoSource(**given)


def marked_images(
    conversation: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """A conversation with marks in place of its images, and the images, numbered as the marks.

    Parts of images are `{"type": "image_url", "image_url": URL or {"url": URL}}`, or
    `{"type": "image", "image": ...}` with whatever else `MediaLoader.load` takes; `image_pil` is
    another name of the latter. Those of videos are `video_url` and `video` likewise, as
    `VideoSource` says, with `fps` beside it.
    """
    images: list[Any] = []

    def told(part: Any) -> Any:
        if isinstance(part, str):
            return without_marks(part)
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _IMAGES and kind in part:
            image = part[kind]
            is_object = isinstance(image, Mapping) and set(image) == {"url"}
            images.append(image["url"] if is_object else image)
            return mark_of(len(images) - 1)
        if kind in _VIDEOS and kind in part:
            video = part[kind]
            is_object = isinstance(video, Mapping) and set(video) == {"url"}
            fps = {"fps": part["fps"]} if "fps" in part else {}
            images.append(VideoSource(video["url"] if is_object else video, **fps))
            return mark_of(len(images) - 1, "video")
        if kind == "text" and isinstance(part.get("text"), str):
            return {**part, "text": without_marks(part["text"])}
        return part

    messages: list[Mapping[str, Any]] = []
    for message in conversation:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            message = {**message, "content": told(content)}
        elif isinstance(content, (list, tuple)):
            message = {**message, "content": [told(part) for part in content]}
        messages.append(message)
    return messages, images


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
