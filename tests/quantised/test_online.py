"""`--quantization`: weights that are quantised at load, against quantisers written here."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.harness import load_model
from quantised.packing import Pack, Packed, logits, quantised, split_products
from safetensors.torch import load_file, save_file
from spec_decode import engines
from transformers import PreTrainedTokenizerFast

from atom.config import ConfigError
from atom.model_engine.arg_utils import add_engine_flags, engine_config, engine_options
from atom.model_loader.weights import WeightError
from atom.model_ops.quant.formats import online
from atom.model_ops.quant.formats.online import METHODS, OnlineConfig
from atom.model_ops.quant.weights import dequantise

FORMATS = ("fp8", "int8", "int4", "mxfp4")
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def per_channel(weight: torch.Tensor, largest: float, rounded: Callable[..., Any]) -> torch.Tensor:
    scale = (weight.abs().amax(dim=1) / largest).double()
    return rounded(weight / scale.float()[:, None]).double() * scale[:, None]


def per_group(weight: torch.Tensor, rounded: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """`rounded` takes groups of 32, [groups, 32]; the last of a row is filled with zeros."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32))
    numbers: torch.Tensor = rounded(padded.view(-1, 32)).double()
    return numbers.view_as(padded)[:, : weight.shape[1]]


def fp4(groups: torch.Tensor) -> torch.Tensor:
    """The nearest of the numbers, of two equally near ones that with an even code."""
    largest = groups.abs().amax(1).tolist()
    scale = torch.tensor([2.0 ** (math.floor(math.log2(x / 7)) + 1) for x in largest])[:, None]
    distance = ((groups / scale).abs()[..., None] - torch.tensor(MAGNITUDES)).abs().double()
    code = (distance + torch.tensor([0, 1e-9] * 4)).argmin(dim=-1)
    return torch.tensor(MAGNITUDES)[code] * scale * groups.sign()


def int4(groups: torch.Tensor) -> torch.Tensor:
    """The nearest of 16 numbers that are equally far from each other."""
    low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
    step = ((high - low) / 15).bfloat16().double()
    first = -(-low / step.float()).half().double() * step
    numbers = first + step * torch.arange(16)
    nearest = (groups[..., None] - numbers[:, None]).abs().argmin(dim=-1)
    return numbers.gather(1, nearest)


QUANTISERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp8": lambda w: per_channel(w, 448, lambda x: x.to(torch.float8_e4m3fn)),
    "int8": lambda w: per_channel(w, 127, torch.round),
    "int4": lambda w: per_group(w, int4),
    "mxfp4": lambda w: per_group(w, fp4),
}


def is_left_alone(module: str) -> bool:
    return module.endswith(("lm_head", "embed_tokens", "mlp.gate", "kv_b_proj")) or (
        "vision" in module or "mm_projector" in module
    )


def plain_pack(folder: Path, name: str) -> Pack:
    """Matrices of a checkpoint as they are after quantisation, stored as plain numbers."""
    weights = load_file(folder / "model.safetensors")

    def pack(module: str, *_: int) -> Packed | None:
        if is_left_alone(module):
            return None
        numbers = QUANTISERS[name](weights[f"{module}.weight"].float())
        return Packed({"weight": numbers.float()}, numbers)

    return pack


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("write", [checkpoints.llama, checkpoints.kimi_k25])
def test_weights_are_those_of_another_quantiser(
    tmp_path: Path, name: str, write: Callable[[Path], checkpoints.Checkpoint]
) -> None:
    """Groups of 32 are ragged in 48 and in 24 inputs."""
    folder = write(tmp_path / "plain").folder
    _, dense = quantised(folder, {}, plain_pack(folder, name))
    expected = logits(dense)
    found = logits(folder, quantization=name)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - logits(folder)).abs().max() > 1e-3


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_reproduce_the_product(name: str, size: int) -> None:
    """The largest weights of a row are not on every rank."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 128, generator=generator) * torch.linspace(0.1, 2, 128)
    x = torch.randn(3, 128, generator=generator)
    expected = (x.double() @ QUANTISERS[name](weight).T).float()
    for product in split_products(OnlineConfig(name), {"weight": weight}, x, 64, size):
        torch.testing.assert_close(product, expected, rtol=1e-4, atol=1e-4)


def test_ranks_that_would_cut_a_group() -> None:
    with pytest.raises(ValueError, match=r"groups of 32 inputs, which .* 0\.\.48 of 96 would cut"):
        split_products(OnlineConfig("int4"), {}, torch.ones(1, 96), 64, 2)


@pytest.mark.parametrize("name", FORMATS)
def test_experts_in_one_tensor_are_read_in_parts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    whole = METHODS[name].read("weight", weight)
    monkeypatch.setattr(online, "_PART_WEIGHTS", 200)
    parts = METHODS[name].read("weight", weight)
    for of, values in whole.items():
        assert values.shape[:2] == (3, 5)
        assert torch.equal(values.view(torch.uint8), parts[of].view(torch.uint8))


def test_groups_of_zeros_stay_zeros() -> None:
    for name, method in METHODS.items():
        read = method.read("weight", torch.zeros(2, 64))
        assert not dequantise(method.convert(read, [2], 64)).any(), name


@pytest.mark.parametrize(
    "pattern",
    ["model.layers.1.mlp", "model.layers.1.mlp.*_proj", r"re:.*layers\.1\.mlp\.(gate|up|down)_"],
)
def test_ignored_modules_are_as_stored(tmp_path: Path, pattern: str) -> None:
    folder = checkpoints.llama(tmp_path / "plain").folder
    pack = plain_pack(folder, "int8")
    _, dense = quantised(
        folder, {}, lambda m, out, columns: None if "1.mlp" in m else pack(m, out, columns)
    )
    found = logits(folder, quantization="int8", quantization_ignore=(pattern,))
    torch.testing.assert_close(found, logits(dense), rtol=1e-4, atol=1e-4)


def test_ignored_experts_and_what_is_never_quantised(tmp_path: Path) -> None:
    """Names are the checkpoint's, which begin with `language_model.`."""
    folder = checkpoints.kimi_k25(tmp_path).folder
    ignored = ("language_model.model.layers.1.mlp.experts", "*.layers.0.self_attn")
    model = load_model(folder, 8, quantization="int4", quantization_ignore=ignored)
    matrices = {name for name, p in model.named_parameters() if p.dim() > 1}
    left = {name.removeprefix("model.layers.") for name in matrices if "layers" in name}
    attention = ("qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj")
    assert left == {
        *(f"0.self_attn.{name}.weight" for name in attention),
        *(f"{i}.self_attn.kv_b_proj.weight" for i in (1, 2)),
        *(f"{i}.mlp.gate.weight" for i in (1, 2)),
        "1.mlp.experts.w13_weight",
        "1.mlp.experts.w2_weight",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"quantization": "int3"},
            "quantization must be one of auto, none, fp8, int8, int4, mxfp4",
        ),
        ({"quantization_ignore": ("lm_head",)}, "no effect without quantization"),
        (
            {"quantization": "int4", "quantization_ignore": ("o_proj",)},
            r"--quantization-ignore o_proj names no module of .*model\.layers\.0\.",
        ),
        (
            {"quantization": "int4", "quantization_ignore": ("re:*.mlp",)},
            r"re:\*\.mlp is no regular expression",
        ),
        (
            {"quantization": "int4", "quantization_ignore": ("*.k_proj",)},
            r"q_proj is stored as int4 and .*k_proj as unquantised; they are parts of .*qkv_proj",
        ),
    ],
)
def test_options_that_cannot_be_honoured(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    folder = checkpoints.llama(tmp_path).folder
    with pytest.raises(ConfigError, match=message):
        logits(folder, **options)


def test_names_on_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    given = engine_options(parser.parse_args(["-q", "int4", "--quantization-ignore", "a", "b.*"]))
    model = engine_config(**given).model
    assert (model.quantization, model.quantization_ignore) == ("int4", ("a", "b.*"))


def test_a_checkpoint_that_is_quantised_already(tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "plain").folder

    def pack(module: str, out: int, columns: int) -> Packed | None:
        if module == "lm_head":
            return None
        codes = torch.randn(out, columns, generator=torch.Generator().manual_seed(out))
        stored = codes.to(torch.float8_e4m3fn)
        return Packed({"weight": stored, "weight_scale": torch.tensor(0.5)}, stored.double() / 2)

    stored, _ = quantised(folder, {"quant_method": "fp8"}, pack)
    assert torch.equal(logits(stored, quantization="fp8"), logits(stored))
    with pytest.raises(ConfigError, match=r"quantised already \(quant_method='fp8'\).* to int4"):
        logits(stored, quantization="int4")
    with pytest.raises(ConfigError, match="--quantization-ignore would have no effect"):
        logits(stored, quantization="fp8", quantization_ignore=("lm_head",))


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_values_that_cannot_be_quantised(tmp_path: Path, name: str) -> None:
    folder = checkpoints.llama(tmp_path).folder
    file = folder / "model.safetensors"
    plain = load_file(file)
    wrong = "model.layers.1.mlp.down_proj.weight"
    for value, message in (
        (torch.full_like(plain[wrong], math.nan), "NaN or infinite"),
        (plain[wrong].to(torch.float8_e4m3fn), r"not torch\.float8_e4m3fn"),
        (plain[wrong][:, :-2], r"holds shape \[48, 62\], the model wants \[48, 64\]"),
    ):
        save_file({**plain, wrong: value.contiguous()}, file, metadata={"format": "pt"})
        with pytest.raises(WeightError, match=rf"{wrong}.*{message}"):
            logits(folder, quantization=name)
    scale = f"{wrong}_scale"
    save_file({**plain, scale: torch.ones(48, 1)}, file, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=f"{scale}.*checkpoint has one already"):
        logits(folder, quantization=name)


@pytest.mark.parametrize("name", ["int8", "mxfp4"])
def test_dummy_weights(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoints.kimi_k25(tmp_path).folder
    options = {"quantization": name, "quantization_ignore": ("x",), "load_format": "dummy"}
    with caplog.at_level(logging.WARNING):
        assert logits(folder, **options).isfinite().all()
    assert "--quantization-ignore x is not checked" in caplog.text


@pytest.mark.parametrize(
    ("kind", "method", "name"),
    [("llama", "suffix", "int4"), ("deepseek_v3", "mtp", "mxfp4"), ("deepseek_v3", "mha", "fp8")],
)
def test_speculation_is_lossless(
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    kind: str,
    method: str,
    name: str,
) -> None:
    """The prediction layers are the checkpoint's and quantised, too; an Eagle3 draft is not."""
    target = engines.write_target(kind, tmp_path / "target", byte_level_tokenizer)
    speculation = {"method": method}
    if method == "mha":
        draft = engines.write_draft(method, tmp_path / "draft", len(byte_level_tokenizer))
        speculation = {"method": "eagle3", "draft_model": str(draft)}
    expected, found = (
        engines.generate(engine, engines.params("greedy"))
        for engine in (
            engines.create_engine(target, quantization=name),
            engines.create_engine(
                target, quantization=name, num_speculative_tokens=3, **speculation
            ),
        )
    )
    assert found == expected
