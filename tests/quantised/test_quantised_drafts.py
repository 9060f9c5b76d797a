"""Eagle3 drafts with weights of their own format, under targets of any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.harness import load_model
from quantised.packing import Packed, but_the_tower, quantised
from quantised.quark_schemes import (
    FP8,
    FP8_CHANNEL,
    FP8_TOKEN,
    INT4_CHANNEL,
    INT4_GROUP,
    MXFP4,
    pack_int4_channel,
    pack_int4_groups,
    pack_mxfp4,
    pack_ptpc,
    quark,
)
from quantised.writers import AWQ_ORDER
from spec_decode import draft_bench
from spec_decode.draft_bench import MHA, MLA, DraftBench, draft_tensors, write_draft
from spec_decode.engines import HIDDEN, create_engine, generate, params
from transformers import PreTrainedTokenizerFast

from atom.config import ConfigError, ModelOptions
from atom.model_loader.drafts.eagle3 import load_draft
from atom.model_loader.drafts.folder import DraftTarget
from atom.model_loader.source import resolve_model
from atom.model_loader.weights import WeightError
from atom.model_ops.kernels.torch import quant as torch_quant
from atom.model_ops.layer_context import LayerContext
from atom.models.eagle3.base import Eagle3Draft
from atom.platform import cpu_platform

Config = dict[str, Any]
Pack = Callable[[int, int], Packed]

W4A8 = quark([FP8, INT4_CHANNEL], {**FP8, "is_dynamic": True}, exclude=["fc", "lm_head"])
PTPC = quark(FP8_CHANNEL, FP8_TOKEN, exclude=["fc", "lm_head"])


def quantise_draft(
    folder: Path,
    raw: Config,
    config: Config,
    pack: Pack,
    layer: str = "midlayer",
    plain: str = "none",
    embed: bool = False,
) -> tuple[Path, Path]:
    """The draft with its layer called `layer`, quantised but for `plain`, and its twin in numbers.

    What is not quantised is in bfloat16.
    """
    stored, dense = {}, {}
    for name, tensor in draft_tensors(raw, embed=embed).items():
        values = tensor.bfloat16() if tensor.is_floating_point() else tensor
        module = name.removesuffix(".weight")
        is_excluded = module in config["exclude"]
        if is_excluded or tensor.dim() == 1 or plain in name or "embed" in name:
            dense[name] = values
            stored[name.replace("midlayer", layer)] = values
            continue
        packed = pack(*tensor.shape)
        dense[name] = packed.weight.float()
        for part, value in packed.tensors.items():
            stored[f"{module}.{part}".replace("midlayer", layer)] = value.contiguous()
    return (
        write_draft(folder / "quantised draft", {**raw, "quantization_config": config}, stored),
        write_draft(folder / "dense draft", raw, dense),
    )


def draft_config(kind: Config, vocab_size: int = checkpoints.VOCAB) -> Config:
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    return {**kind, "hidden_size": HIDDEN, "vocab_size": vocab_size, "eagle_config": ids}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Eagle3Draft]:
    """Loads a draft under a target that is not quantised."""
    folder = checkpoints.llama(tmp_path / "target").folder
    source, target = resolve_model(ModelOptions(model=str(folder))), load_model(folder, 128)
    context = LayerContext.create(torch.float32, 128, cpu_platform())
    given = target, source, context, ModelOptions()
    return lambda draft, asked="auto": load_draft(
        str(draft), DraftTarget(*given, quantization=asked)
    )


def draft_logits(draft: Eagle3Draft) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    aux = tuple(torch.randn(7, HIDDEN, generator=generator) for _ in range(3))
    rows = (0, checkpoints.prompt(7), draft.fuse(aux))
    post, _ = DraftBench(draft).forward({"a": rows})["a"]
    return draft.compute_logits(post)


def test_a_draft_is_quantised_as_asked_unless_it_is_already(
    tmp_path: Path, load: Callable[..., Eagle3Draft]
) -> None:
    raw = draft_config(MHA)
    stored, dense = quantise_draft(tmp_path, raw, W4A8, pack_int4_channel, "midlayer", "none")
    formats = {asked: load(dense, asked).fc.storage.format for asked in ("auto", "none", "int8")}
    assert formats["auto"] is formats["none"] is None
    assert formats["int8"] is not None
    assert formats["int8"].codes == "int8"
    with pytest.raises(ConfigError, match=r"draft_quantization=int8: .* is quantised already"):
        load(stored, "int8")


@pytest.mark.parametrize(
    ("kind", "config", "pack", "layer", "plain"),
    [
        (MHA, W4A8, pack_int4_channel, "midlayer", "none"),
        (MLA, PTPC, pack_ptpc, "layers.0", "none"),
        # It has one of two possible scales, which is found by its name; also in `fc`.
        (MHA, {**W4A8, "exclude": ["lm_head"]}, pack_int4_channel, "model.layers.0", "none"),
        # The list calls the layer otherwise than the tensors do.
        (
            MHA,
            {**PTPC, "exclude": [*PTPC["exclude"], "midlayer.self_attn.o_proj"]},
            pack_ptpc,
            "layers.0",
            "o_proj",
        ),
    ],
    ids=["w4a8", "mla fp8", "model.layers.0", "other names"],
)
def test_a_draft_equals_its_twin(
    tmp_path: Path,
    load: Callable[..., Eagle3Draft],
    monkeypatch: pytest.MonkeyPatch,
    kind: Config,
    config: Config,
    pack: Pack,
    layer: str,
    plain: str,
) -> None:
    raw = draft_config(kind)
    stored, dense = quantise_draft(tmp_path, raw, config, pack, layer, plain, embed=kind is MHA)
    expected = draft_logits(load(dense))
    assert expected.std() > 0.1
    rounded = draft_logits(load(stored))
    assert 1e-3 < (rounded - expected).abs().max() < expected.abs().max() / 2
    monkeypatch.setattr(torch_quant.DenseWeights, "round_inputs", lambda _, x: x)
    torch.testing.assert_close(draft_logits(load(stored)), expected, rtol=1e-4, atol=1e-4)


def test_a_draft_that_is_not_stored_as_it_says(
    tmp_path: Path, load: Callable[[Path], Eagle3Draft]
) -> None:
    raw = draft_config(MHA)
    stored, _ = quantise_draft(tmp_path, raw, W4A8, pack_ptpc)
    with pytest.raises(WeightError, match=r"weight \[48, 96\].*shape"):
        load(stored)
    raw["quantization_config"] = {"quant_method": "other"}
    folder = write_draft(tmp_path / "other", raw, draft_tensors(draft_config(MHA)))
    with pytest.raises(ConfigError, match=r"other/config\.json: quant_method='other'"):
        load(folder)


def quantise_target(kind: str, folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A Llama in INT4, or a Kimi with its MLPs in MXFP4."""
    fields = {"vocab_size": len(tokenizer), "hidden_size": HIDDEN}
    if kind == "llama":
        plain, config = checkpoints.llama(folder / "plain", **fields), quark(INT4_GROUP)
    else:
        plain = checkpoints.kimi_k25(folder / "plain", **fields)
        config = quark(MXFP4, exclude=["lm_head", "re:.*self_attn", "vision_tower", "mm_projector"])
    tokenizer.save_pretrained(plain.folder)

    def pack(module: str, out: int, columns: int) -> Packed | None:
        if kind == "llama" and module != "lm_head":
            return pack_int4_groups(AWQ_ORDER, True)(out, columns)
        if kind == "kimi" and ".mlp." in module and not module.endswith(".gate"):
            return pack_mxfp4(out, columns)
        return None

    return quantised(plain.folder, config, but_the_tower(pack))[0]


@pytest.mark.parametrize(
    ("target", "kind", "config", "pack"),
    [
        ("llama", MHA, W4A8, pack_int4_channel),
        ("kimi", MLA, PTPC, pack_ptpc),
        ("kimi", MHA, None, None),
    ],
    ids=["llama int4, draft w4a8", "kimi mxfp4, draft fp8", "kimi mxfp4, draft plain"],
)
def test_tokens_equal_those_without_the_draft(
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    target: str,
    kind: Config,
    config: Config | None,
    pack: Pack | None,
) -> None:
    folder = quantise_target(target, tmp_path, byte_level_tokenizer)
    raw = draft_config(kind, len(byte_level_tokenizer))
    if config is None or pack is None:
        draft = write_draft(tmp_path / "draft", raw, draft_bench.draft_tensors(raw))
    else:
        draft, _ = quantise_draft(tmp_path, raw, config, pack)
    prompts = [checkpoints.prompt(3 + 4 * i, seed=i) for i in range(5)]
    plain = create_engine(folder)
    fast = create_engine(folder, method="eagle3", draft_model=str(draft), num_speculative_tokens=3)
    for setting in ("greedy", "warm"):
        sampling = params(setting, max_tokens=16)
        assert generate(fast, sampling, prompts) == generate(plain, sampling, prompts)
    stats = fast.engine.core.stats.spec_decode
    assert stats is not None
    assert stats.num_drafts > 0
