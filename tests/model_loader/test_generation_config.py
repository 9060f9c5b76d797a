"""Which sampling parameters apply where a request gives none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atom.config import ConfigError, ModelOptions
from atom.model_engine.arg_utils import engine_config
from atom.model_loader.generation_config import describe_defaults, sampling_defaults
from atom.model_loader.source import resolve_model


def write(folder: Path, **content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def defaults(folder: Path, **options: Any) -> dict[str, Any]:
    return sampling_defaults(folder, engine_config(**options).model)


def test_the_models_own_apply(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "model",
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        min_p=0.01,
        repetition_penalty=1.05,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        eos_token_id=2,
        do_sample=True,
        transformers_version="5.0",
    )
    assert defaults(folder) == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    assert defaults(folder, generation_config="none") == {}
    assert defaults(write(tmp_path / "null", temperature=None)) == {}
    assert defaults(tmp_path / "nothing here") == {}


def test_another_folder_and_an_override(tmp_path: Path) -> None:
    model = write(tmp_path / "model", temperature=0.6, top_k=20)
    other = write(tmp_path / "other", temperature=0.1)
    assert defaults(model, generation_config=str(other)) == {"temperature": 0.1}
    override = '{"temperature": 0.9, "min_p": 0.1}'
    assert defaults(model, override_generation_config=override) == {
        "temperature": 0.9,
        "top_k": 20,
        "min_p": 0.1,
    }
    given = {"generation_config": "none", "override_generation_config": {"top_p": 0.5}}
    assert defaults(model, **given) == {"top_p": 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_config": "nowhere"}, "auto, none or a folder"),
        ({"override_generation_config": "{"}, "expected a JSON object"),
        ({"override_generation_config": "[1]"}, "expected a JSON object"),
        ({"override_generation_config": {"max_new_tokens": 9}}, "does not know max_new_tokens"),
        ({"override_generation_config": {"top_p": 2}}, r"top_p must be in \(0, 1\]"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        defaults(tmp_path, **options)


def test_a_wrong_value_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature must be"):
        defaults(write(tmp_path, temperature="hot"))


def test_the_embedded_model_has_those_of_its_card() -> None:
    source = resolve_model(ModelOptions())
    assert source.sampling_defaults == {"temperature": 0.2, "top_p": 0.9}
    assert "temperature=0.2, top_p=0.9" in describe_defaults(source.sampling_defaults)
    assert resolve_model(ModelOptions(generation_config="none")).sampling_defaults == {}
