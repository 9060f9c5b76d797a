"""Images of models of transformers' classes: its processors, and its towers as encoders."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from atom.config import ConfigError
from atom.models.vision.encoder import ImageEncoder

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedModel

# What processors return besides pixels that says nothing of an image.
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
_PIXELS, _SIZES = "pixel_values", "image_sizes"


@dataclass(frozen=True)
class ProcessedImage:
    """Attributes:
    pixels: [..., 3, height, width], before they are normalised.
    size: rows and columns that the model is told; () if it is told none.
    token_ids: what the image is in a prompt.
    """

    pixels: npt.NDArray[np.uint8]
    size: tuple[int, ...]
    token_ids: list[int]


class TransformersImages:
    """A checkpoint's processor, with Pillow; may be called in any thread.

    Attributes:
        placeholder, placeholder_id: what stands for an image in a prompt.
        settings: of its image processor.

    Raises:
        ConfigError: when the checkpoint has none.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoImageProcessor, AutoProcessor

        try:
            self._processor: Any = AutoProcessor.from_pretrained(folder)
            images = AutoImageProcessor.from_pretrained(folder, backend="pil")
            self._processor.image_processor = images
            self.placeholder = str(self._processor.image_token)
        except Exception as error:  # whatever reading these files raises
            told = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            raise ConfigError(f"{folder}: its processor cannot be loaded ({told})") from error
        ids = self._processor.tokenizer.convert_tokens_to_ids([self.placeholder])
        self.placeholder_id = int(ids[0])
        self.settings: dict[str, Any] = images.to_dict()
        # Tokenizers are not for several threads at once.
        self._lock = threading.Lock()

    def normalised(self, image: Image) -> npt.NDArray[np.float32]:
        """The pixels of an RGB image as the model reads them."""
        pixels: npt.NDArray[np.float32] = np.asarray(self._call(image)[_PIXELS], np.float32)
        return pixels

    def process(self, image: Image) -> ProcessedImage:
        """Args:
        image: RGB.

        Raises:
            ConfigError: when more than pixels and a size is known of it.
        """
        made = self._call(image, do_rescale=False, do_normalize=False)
        if others := sorted(set(made) - _OF_TEXT - {_PIXELS, _SIZES}):
            raise ConfigError(f"its processor returns {', '.join(others)} of an image")
        size = tuple(int(n) for n in made[_SIZES][0]) if _SIZES in made else ()
        pixels = np.asarray(made[_PIXELS])
        return ProcessedImage(pixels.astype(np.uint8), size, list(map(int, made["input_ids"][0])))

    def _call(self, image: Image, **options: bool) -> Any:
        with self._lock:
            return self._processor(
                text=[self.placeholder],
                images=[image],
                add_special_tokens=False,
                return_tensors="np",
                **options,
            )


class TransformersImageEncoder(ImageEncoder):
    """A base model without its text network.

    Args:
        inner: whose names are those of the checkpoint.
    """

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixels: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """Pixels as the processor makes them; the grid is the size that it states, if it does."""
        sizes = {_SIZES: torch.tensor([grid], device=pixels.device)} if grid else {}
        found = self.inner.get_image_features(pixel_values=pixels, return_dict=True, **sizes)
        rows: Any = found.pooler_output
        if not isinstance(rows, torch.Tensor):
            rows = torch.cat(tuple(rows))
        flat: torch.Tensor = rows.flatten(0, -2)
        return flat

    def largest_input(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        raise ConfigError(
            "what the largest image takes is not known of encoders of transformers' modelling "
            "code; say how much memory the KV cache gets (--kv-cache-memory), or load no encoder "
            "(--language-model-only)"
        )
