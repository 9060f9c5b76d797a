"""Whatever model transformers knows is served, or refused by its name with what is missing."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import DENSE, MLA
from models.families import FAMILIES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from atom.config import ConfigError, ModelOptions
from atom.model_loader.source import resolve_model
from atom.models.registry import Implementation, model_types
from atom.plan.sizes import rank_sizes

_GENERATING = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_NATIVE = {kind for kinds in model_types().values() for kind in kinds}
# What the defaults of a native type lack, or contradict.
_UNFIT = {
    "glm4_moe": "does not split over .* no head_dim",
    "deepseek_v2": "without num_experts_per_tok",
}
# Their defaults are refused by transformers itself.
_UNCREATABLE = {"gemma4_assistant", "nougat"}
_NAMES = set(CONFIG_MAPPING_NAMES) - _UNCREATABLE
_IMPLEMENTATIONS = ("auto", "atom", "transformers")


def start(raw: dict[str, Any], folder: Path, model_impl: str = "auto") -> Implementation:
    """What a start does with a configuration but reading weights: it is read, what computes it is
    chosen and tried, and the model is built on the meta device, where its memory is counted.
    """
    (folder / "config.json").write_text(json.dumps(raw, default=str))
    options = ModelOptions(str(folder), load_format="dummy", model_impl=model_impl)
    source = resolve_model(options)
    sizes = rank_sizes(source, torch.bfloat16, torch.bfloat16, 1)
    assert sizes.weights > 0
    assert source.implementation is not None
    return source.implementation


def check_defaults(name: str, folder: Path, implementations: tuple[str, ...]) -> None:
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name) or MODEL_MAPPING_NAMES.get(name) or name
    architecture = named if isinstance(named, str) else named[0]
    raw = CONFIG_MAPPING[name]().to_dict() | {"architectures": [architecture]}
    is_native = name in model_types().get(architecture, ())
    for wanted in implementations:
        if is_native and name in _UNFIT:
            expected = architecture if wanted == "transformers" else _UNFIT[name]
            with pytest.raises(ConfigError, match=f"{expected}|head_dim"):
                start(raw, folder, wanted)
            continue
        by_us = wanted == "atom" or (wanted == "auto" and is_native)
        try:
            found = start(raw, folder, wanted)
        except ConfigError as error:  # and nothing else
            told = str(error)
            assert not is_native or wanted == "transformers", told
            assert architecture in told or f"of type {name}:" in told, f"{name}: {told}"
        else:
            assert (found.kind, found.name) == ("atom" if by_us else "transformers", architecture)


@pytest.mark.parametrize(
    ("names", "implementations"),
    [
        pytest.param(_NATIVE & _NAMES, ("auto", "atom"), id="native models"),
        pytest.param(_NATIVE & _NAMES, ("transformers",), id="tried", marks=pytest.mark.slow),
        pytest.param(_GENERATING & _NAMES - _NATIVE, ("atom",), id="language models"),
        pytest.param(
            _GENERATING & _NAMES - _NATIVE,
            ("auto", "transformers"),
            id="tried language models",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            _NAMES - _GENERATING - _NATIVE, _IMPLEMENTATIONS, id="others", marks=pytest.mark.slow
        ),
    ],
)
def test_every_configuration_of_transformers(
    names: set[str], implementations: tuple[str, ...], tmp_path: Path
) -> None:
    assert names
    for name in sorted(names):
        check_defaults(name, tmp_path, implementations)


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", [7], {"a": 1}])
def test_no_architecture(architectures: object, tmp_path: Path) -> None:
    raw = {"model_type": "llama", "architectures": architectures}
    with pytest.raises(
        ConfigError, match=r"architecture \(none given\) is not supported \(type llama\)"
    ):
        start(raw, tmp_path)


# Errors of Python, instead of what is missing.
_RAW = ("TypeError", "AttributeError", "KeyError", "IndexError", "ZeroDivisionError", "NoneType")


def places(raw: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where fields stand, in nested objects, too."""
    for name, value in raw.items():
        yield (*path, name)
        if isinstance(value, dict) and name.endswith(("_config", "_parameters", "_attention")):
            yield from places(value, (*path, name))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=() if name in ("deepseek_v2", "gemma3_text", "smollm3") else pytest.mark.slow,
        )
        for name in (*(name for name in FAMILIES if "-" not in name), "deepseek_v2", "deepseek_v3")
    ],
)
def test_fields_that_are_null_absent_or_of_another_type(name: str, tmp_path: Path) -> None:
    """Any of them is read as its default, or refused with its name."""
    own = FAMILIES[name][1] if name in FAMILIES else {**MLA, "n_group": 4, "topk_group": 2}
    raw = CONFIG_MAPPING[name](**{**DENSE, **own}).to_dict()
    raw["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]]
    start(raw, tmp_path)
    for path in places(raw):
        for value in ("absent", None, 0, []):
            changed = copy.deepcopy(raw)
            level = changed
            for outer in path[:-1]:
                level = level[outer]
            level[path[-1]] = value
            if value == "absent":
                del level[path[-1]]
            try:
                start(changed, tmp_path)
            except ConfigError as error:
                told = str(error)
                named = path[-1] in told or not any(word in told for word in _RAW)
                assert named, f"{path} {value!r}: {told}"
