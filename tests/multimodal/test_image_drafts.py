"""What draft models read of images.

An image whose rows are the embeddings of tokens is those tokens: a draft that reads images makes
the same drafts of both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from multimodal import vision_checkpoints
from multimodal.image_engine import create, generate, generate_all
from multimodal.test_kimi_images import prompts
from multimodal.vision_checkpoints import VisionCheckpoint, picture
from safetensors.torch import load_file, save_file
from spec_decode import engines
from spec_decode.mtp_reference import add_mtp_layers
from transformers import PreTrainedTokenizerFast

from atom.config import ConfigError
from atom.model_engine.start_up import kv_memory
from atom.model_ops.attention.metadata import ImageRows
from atom.models.vision.kimi_k25 import KimiImageEncoder

# What the image of 6 rows says, and another one.
SAID, OTHER = [17, 4, 33, 8, 21, 40], [17, 4, 33, 8, 21, 39]
BEFORE, BEHIND = [11, 12, 13, 14, 15], [16, 17, 18]
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def kimi(
    tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: PreTrainedTokenizerFast
) -> VisionCheckpoint:
    """With a prediction layer, which none that is published has."""
    folder = tmp_path_factory.mktemp("kimi")
    checkpoint = vision_checkpoints.kimi_k25(
        folder, byte_level_tokenizer, num_nextn_predict_layers=1
    )
    file, prefix = folder / "model.safetensors", "language_model."
    # transformers writes `blocks`; published text networks have `layers`.
    written = load_file(file).items()
    tensors = {k.replace(f"{prefix}model.blocks.", f"{prefix}model.layers."): v for k, v in written}
    save_file(tensors, file, metadata={"format": "pt"})
    add_mtp_layers(folder, prefix)
    return checkpoint


def eagle(kind: str, checkpoint: VisionCheckpoint, folder: Path, **options: Any) -> dict[str, Any]:
    vocab_size = checkpoint.reference.config.text_config.vocab_size
    draft = str(engines.write_draft(kind, folder, vocab_size))
    return {"method": "eagle3", "draft_model": draft, "num_speculative_tokens": 3, **options}


def drafts_of(
    monkeypatch: pytest.MonkeyPatch, checkpoint: VisionCheckpoint, **options: Any
) -> list[list[list[int]]]:
    """All drafts behind a text, the same with an image that says it, and with another image."""
    with (
        engines.drafts_recorded(monkeypatch) as recorded,
        create(checkpoint, enable_prefix_caching=False, **options) as llm,
    ):
        model = llm.engine.core.executor.parts.model
        embedding, encoder = model.token_embedding, model.image_encoder
        assert encoder is not None
        made, tokens = [], []
        for says in (None, SAID, OTHER):
            rows = None if says is None else embedding(torch.tensor(says))
            monkeypatch.setattr(encoder, "forward", lambda pixels, grid, rows=rows: rows)
            middle = SAID if says is None else [checkpoint.placeholder]
            images = [] if says is None else [picture(84, 56, len(made))]
            tokens += generate(llm, [(BEFORE + middle + BEHIND, images)])
            made.append(list(recorded[0].values()))
            recorded[0].clear()
    assert tokens[0] == tokens[1] != tokens[2]
    return made


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"max_num_batched_tokens": 4, "max_num_seqs": 1},
        {"max_num_batched_tokens": 5, "max_num_seqs": 1, "overlap": True},
        {"max_num_batched_tokens": 9, "max_num_seqs": 1, "mm_cache_memory": 0},
        {},
    ],
    ids=str,
)
def test_prediction_layers_read_images(
    kimi: VisionCheckpoint, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Wherever the prompt is cut: the row before an image is of its first token."""
    text, image, other = drafts_of(monkeypatch, kimi, **MTP, **options)
    assert text == image != other


@pytest.mark.parametrize("kind", ["mha", "mla", "peagle"])
def test_eagle_drafts_read_images_if_told_to(
    kimi: VisionCheckpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """Published ones were trained with the placeholder's embedding."""
    reading = eagle(kind, kimi, tmp_path, draft_image_embeddings=True)
    text, image, _ = drafts_of(monkeypatch, kimi, max_num_batched_tokens=9, **reading)
    assert text == image
    text, image, _ = drafts_of(monkeypatch, kimi, **{**reading, "draft_image_embeddings": False})
    assert text != image


SEEDED = {"temperature": 0.8, "seed": 5, "n": 2}


@pytest.fixture(scope="module")
def sampled(kimi: VisionCheckpoint) -> list[list[list[int]]]:
    """Two outputs of each prompt, which differ."""
    with create(kimi) as llm:
        outputs = generate_all(llm, list(prompts(kimi.placeholder).values()), **SEEDED)
    assert all(first != second for first, second in outputs)
    return outputs


@pytest.mark.parametrize("kind", ["mtp", "mha", "mla", "peagle", "dflash", "suffix"])
def test_sampled_tokens_are_those_without_drafts(
    kimi: VisionCheckpoint, sampled: list[list[list[int]]], tmp_path: Path, kind: str
) -> None:
    """All outputs, cold, and from the prefix cache."""
    speculation: dict[str, Any] = {"method": kind, "num_speculative_tokens": 3}
    if kind in engines.EAGLE_DRAFTS:
        speculation = eagle(kind, kimi, tmp_path, draft_image_embeddings=True)
    elif kind == "dflash":
        vocab_size = kimi.reference.config.text_config.vocab_size
        speculation["draft_model"] = str(engines.write_draft(kind, tmp_path, vocab_size))
    with create(kimi, max_num_batched_tokens=12, **speculation) as llm:
        for _ in range(2):
            given = list(prompts(kimi.placeholder).values())
            assert generate_all(llm, given, **SEEDED) == sampled
        assert llm.engine.core.stats.num_draft_steps > 0 or kind == "suffix"


def test_drafts_that_cannot_read_images(kimi: VisionCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="draft_image_embeddings is for drafts of method eagle3"):
        create(kimi, **MTP, draft_image_embeddings=True)
    reading = eagle("mha", kimi, tmp_path, draft_image_embeddings=True)
    with pytest.raises(ConfigError, match=r"has no effect: .* reads no images"):
        create(kimi, **reading, limit_mm_per_prompt={"image": 0})


def test_the_largest_steps_are_full_of_images(
    kimi: VisionCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are measured before the cache is sized, as on a GPU."""

    def budget(_: object, __: object, profile: Callable[[], None], *___: object) -> int:
        profile()
        return 16 << 20

    filled: list[int] = []
    fill = ImageRows.fill

    def counting(self: ImageRows, hidden: torch.Tensor) -> torch.Tensor:
        assert len(self.places) == len(hidden)
        filled.append(len(hidden))
        return fill(self, hidden)

    monkeypatch.setattr(kv_memory, "kv_cache_budget", budget)
    monkeypatch.setattr(ImageRows, "fill", counting)
    # The real one takes seconds.
    monkeypatch.setattr(KimiImageEncoder, "largest_input", lambda _: ((4, 3, 14, 14), (2, 2)))
    sizes = {"max_model_len": 40, "max_num_batched_tokens": 64, "max_num_seqs": 2}
    with create(kimi, **MTP, kv_cache_memory=None, mm_cache_memory=0, **sizes):
        # By the target, and by the prediction layer.
        assert filled.count(64) >= 2
