"""Whatever model transformers knows is served, or refused by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from atom.config import ConfigError, ModelOptions
from atom.model_loader.source import resolve_model
from atom.models.registry import model_types

_GENERATING = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_NATIVE = {kind for kinds in model_types().values() for kind in kinds}
# Heads of their defaults do not divide the hidden size, and there is no head_dim.
_UNEVEN = {"glm4_moe"}
# Their defaults are refused by transformers itself.
_UNCREATABLE = {"gemma4_assistant", "nougat"}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(sorted(_NATIVE & _GENERATING & set(CONFIG_MAPPING_NAMES)), id="native models"),
        pytest.param(
            sorted(_GENERATING & set(CONFIG_MAPPING_NAMES) - _UNCREATABLE - _NATIVE),
            id="language models",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            sorted(set(CONFIG_MAPPING_NAMES) - _GENERATING - _UNCREATABLE),
            id="others",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_configuration_of_transformers(names: list[str], tmp_path: Path) -> None:
    supported = model_types()
    for name in names:
        named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name) or MODEL_MAPPING_NAMES.get(name) or name
        architecture = named if isinstance(named, str) else named[0]
        raw = CONFIG_MAPPING[name]().to_dict() | {"architectures": [architecture]}
        (tmp_path / "config.json").write_text(json.dumps(raw, default=str))
        options = ModelOptions(str(tmp_path), load_format="dummy")
        if name in supported.get(architecture, ()):
            if name in _UNEVEN:
                with pytest.raises(ConfigError, match=r"does not split over .* no head_dim"):
                    resolve_model(options)
                continue
            found = resolve_model(options).implementation
            assert found is not None
            assert (found.kind, found.name) == ("atom", architecture)
            continue
        refused = ""
        try:
            found = resolve_model(options).implementation
        except ConfigError as error:
            refused = str(error)
        if refused:
            assert architecture in refused or f"of type {name}:" in refused, name
        else:
            assert found is not None
            assert (found.kind, found.name) == ("transformers", architecture)


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", [7], {"a": 1}])
def test_no_architecture(architectures: object, tmp_path: Path) -> None:
    raw = {"model_type": "llama", "architectures": architectures}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        ConfigError, match=r"architecture \(none given\) is not supported \(type llama\)"
    ):
        resolve_model(ModelOptions(str(tmp_path), load_format="dummy"))
