"""Models that see by transformers' modelling code: tokens as transformers' own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import checkpoints
from models.checkpoints import DENSE
from multimodal.image_engine import NEW_TOKENS, create, generate
from multimodal.vision_checkpoints import _with_random_tower, picture
from PIL import Image
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from atom import LLM
from atom.config import ConfigError

MARK = "<image>"
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
CLIP = {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32}
LLAMA = {**DENSE, "model_type": "llama", "max_position_embeddings": 256}
PINPOINTS = [[28, 56], [56, 28], [56, 56]]
# Name of the classes; fields of the configuration, and of its text network.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Its embeddings of texts have a factor, and those of images none.
    "Llava": ({"image_seq_length": 16}, {"model_type": "gemma", "head_dim": 12}),
    "VipLlava": ({"vision_feature_layers": [-1, -2]}, {}),
    "LlavaNext": ({"image_grid_pinpoints": PINPOINTS}, {}),
}


class Seeing:
    """A checkpoint, its model and its processor."""

    def __init__(self, family: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        own = copy.deepcopy(tokenizer)
        own.add_tokens([MARK], special_tokens=True)
        self.placeholder: int = own.convert_tokens_to_ids(MARK)
        fields, text_fields = FAMILIES[family]
        config = getattr(transformers, f"{family}Config")(
            text_config={**LLAMA, **text_fields, "vocab_size": len(own)},
            vision_config=CLIP,
            image_token_index=self.placeholder,
            tie_word_embeddings=False,
            **fields,
        )
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
        written = checkpoints.write_checkpoint(
            folder, _random(model), never_sampled=self.placeholder
        )
        self.folder, self.model = folder, written.reference
        self.processor = _processor(family, own)
        self.processor.save_pretrained(folder)

    @torch.inference_mode()
    def greedy(self, text: str, images: list[Image.Image]) -> tuple[list[int], list[int]]:
        """Tokens of the prompt, and what transformers generates."""
        options = {"return_tensors": "pt", "add_special_tokens": False}
        given = self.processor(text=[text], images=images or None, **options)
        tokens = given.pop("input_ids")[0].tolist()
        given.pop("attention_mask")
        known = list(tokens)
        for _ in range(NEW_TOKENS):
            logits = self.model(torch.tensor([known]), use_cache=False, **given).logits
            known.append(int(logits[0, -1].argmax()))
        return tokens, known[len(tokens) :]


def _random(model: PreTrainedModel) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        if "projector" in name or "newline" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return _with_random_tower(model)


def _processor(family: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    sizes = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    images, made = transformers.CLIPImageProcessorPil(**sizes), transformers.LlavaProcessor
    if family == "LlavaNext":
        images = transformers.LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=PINPOINTS)
        made = transformers.LlavaNextProcessor
    return made(
        images,
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        image_token=MARK,
        num_additional_image_tokens=1,
    )


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    byte_level_tokenizer: PreTrainedTokenizerFast,
) -> Seeing:
    return Seeing(request.param, tmp_path_factory.mktemp("seeing"), byte_level_tokenizer)


@pytest.fixture(scope="module")
def engine(seeing: Seeing) -> Iterator[LLM]:
    with _create(seeing) as llm:
        yield llm


def _create(seeing: Seeing, **options: Any) -> LLM:
    return create(seeing, max_model_len=256, model_impl="transformers", **options)  # type: ignore[arg-type]


PROMPTS: list[tuple[str, list[Image.Image]]] = [
    ("what is <image> this", [picture(60, 45)]),
    ("<image>and<image>", [picture(20, 70), picture(28, 28)]),
    ("nothing", []),
]


def test_tokens_equal_those_of_transformers(seeing: Seeing, engine: LLM) -> None:
    """In one batch, from the prefix cache, and in pieces."""
    answers = [seeing.greedy(*prompt) for prompt in PROMPTS]
    tokenizer = seeing.processor.tokenizer
    given = [(tokenizer.encode(text, add_special_tokens=False), images) for text, images in PROMPTS]
    for _ in range(2):
        assert generate(engine, given) == [tokens for _, tokens in answers]
    assert answers[0][1] != seeing.greedy(PROMPTS[0][0], [picture(60, 45, 1)])[1]
    with _create(seeing, max_num_batched_tokens=7, max_num_seqs=3) as llm:
        assert generate(llm, given) == [tokens for _, tokens in answers]
        options = {"prompt_token_ids": given[0][0], "multi_modal_data": {"image": PROMPTS[0][1]}}
        (output,) = llm.generate(options, use_tqdm=False)
        assert output.prompt_token_ids == answers[0][0]


def test_without_a_tower(seeing: Seeing) -> None:
    with _create(seeing, limit_mm_per_prompt={"image": 0}) as llm:
        assert llm.engine.core.executor.parts.model.image_encoder is None
        text = seeing.processor.tokenizer.encode("nothing", add_special_tokens=False)
        assert generate(llm, [(text, [])]) == [seeing.greedy("nothing", [])[1]]


@pytest.mark.parametrize("name", ["PaliGemmaForConditionalGeneration", "MllamaForConditional"])
def test_others_are_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"architectures": ["{name}"], "model_type": "x"}}')
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"architecture {name} is not supported"):
        LLM(str(tmp_path))
