"""Lists of modules in a checkpoint's configuration: wrong, hostile and long ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantised.compressed import INT4
from quantised.quark_schemes import MXFP4, layer, quark
from work import count_lines

from atom.config import ConfigError
from atom.model_ops.quant.base import Header
from atom.model_ops.quant.formats.table import parse_quantization
from atom.model_ops.quant.names import read_names, read_object
from atom.model_ops.quant.patterns import Glob, PatternReader

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
FP8 = {"quant_method": "fp8"}
MLP = "model.layers.0.mlp"
GATE_UP = f"{MLP}.gate_up_proj", (f"{MLP}.gate_proj", f"{MLP}.up_proj")


@pytest.mark.parametrize(
    "expression",
    [
        "(.+)+X",
        "(a|ab)*X",
        "(a?){30}a{30}",
        ".?" * 30 + "X",
        ".*" * 12 + "X",
        "(?:a|ab)" * 40 + "X",
        "((?:.*))+X",
        r"(.)\1",
        "a" * 501,
        "a{99999999999999}",
        "(",
    ],
)
def test_expressions_that_could_take_for_ever(expression: str) -> None:
    for settings, key in (
        ({**INT4, "ignore": [f"re:{expression}"]}, "ignore"),
        (
            {**INT4, "config_groups": {"W4A16": [f"re:{expression}"]}, "format": "pack-quantized"},
            "targets",
        ),
        ({**GPTQ, "dynamic": {f"-:{expression}": {}}}, "dynamic"),
        (quark(MXFP4, exclude=[f"re:{expression}"]), "exclude"),
    ):
        with pytest.raises(ConfigError, match=f"{key} holds "):
            parse_quantization(settings, {})


def test_expressions_of_real_checkpoints() -> None:
    reader = PatternReader("ignore")
    for text in (
        ".*self_attn.*",
        r"^(?!.*experts).*",
        r".*\.layers\.(?:[0-9]|[1-5][0-9]|60)\..*",
        r".*layers\.\d+\.mlp\.experts\.\d+\.(gate|up|gate_up|down)_proj.*",
        r"model\.layers\.[0-9]+\.mlp\.[^.]+_proj$",
        "(?:.*self_attn.*|.*shared_experts.*)",
        r".*a.*b.*c.*",
    ):
        assert reader.expression(text, text).pattern == text


def test_many_slow_expressions_are_as_slow_as_one() -> None:
    reader = PatternReader("ignore")
    for index in range(200):
        reader.expression(f".*a.*{index}x", "")
    rest = [f".*a.*b{index}x" for index in range(200)]
    with pytest.raises(ConfigError, match="it takes too long to fit it, and those before it"):
        assert not [reader.expression(text, text) for text in rest]


def test_globs_are_fast() -> None:
    """An expression with as many `.*` would take for ever."""
    name = "language_model.model.layers.1.mlp.experts.3.down_proj"
    for stars in ("*" * 200 + "X", "*e" * 30 + "X", "*.*" * 12 + "X"):
        assert not Glob("e", (stars,)).fits(name)
        for settings in (
            {**MODELOPT, "ignore": [stars]},
            quark(MXFP4, exclude=[stars]),
            quark(MXFP4, layer_quant_config={stars: layer(None)}),
        ):
            assert parse_quantization(settings, {}).method_for(name) is not None
    with pytest.raises(ConfigError, match=r"exclude holds .* takes too long"):
        parse_quantization(quark(MXFP4, exclude=[".*" * 12 + "X"]), {})


@pytest.mark.parametrize("value", [5, True, 3.5, "lm_head", [None], [1], [["a"]], {"a": 1}])
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (AWQ, "modules_to_not_convert"),
        (FP8, "modules_to_not_convert"),
        (FP8, "ignored_layers"),
        ({"quant_method": "mxfp4"}, "modules_to_not_convert"),
        (INT4, "ignore"),
        (MODELOPT, "ignore"),
        (MODELOPT, "exclude_modules"),
        (quark(MXFP4), "exclude"),
    ],
)
def test_what_is_no_list_of_names(settings: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key}=.* is no list of names"):
        parse_quantization({**settings, key: value}, {})
    parse_quantization({**settings, key: None}, {})


@pytest.mark.parametrize("value", ["x", ["a"], 5, True])
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (GPTQ, "dynamic"),
        (INT4, "config_groups"),
        (quark(MXFP4), "export"),
        (quark(MXFP4), "layer_quant_config"),
        (quark(MXFP4), "layer_type_quant_config"),
        ({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, "quantized_layers"),
    ],
)
def test_what_is_no_object(settings: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key}=.* is no object"):
        parse_quantization({**settings, key: value}, {})


def test_rules_that_are_no_objects_and_groups_without_targets() -> None:
    with pytest.raises(ConfigError, match=r"dynamic\['\+:y'\]='x' is no object"):
        parse_quantization({**GPTQ, "dynamic": {"+:y": "x"}}, {})
    group = {**INT4["config_groups"]["group_0"], "targets": None}
    with pytest.raises(ConfigError, match=r"config_groups\.a has no targets"):
        parse_quantization({**INT4, "config_groups": {"a": group}}, {})


def test_lists_have_an_end() -> None:
    with pytest.raises(ConfigError, match="ignore has 100001 entries; at most 100000"):
        read_names("ignore", ["a"] * 100_001)
    with pytest.raises(ConfigError, match="dynamic has 100001 entries"):
        read_object("dynamic", {str(i): {} for i in range(100_001)})


LISTED = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(500) for p in "qkvo"]


@pytest.mark.parametrize(
    "settings",
    [
        lambda names: {**INT4, "ignore": names},
        lambda names: {
            **INT4,
            "config_groups": {
                "a": {**INT4["config_groups"]["group_0"], "targets": ["Linear", *names]}
            },
        },
        lambda names: quark(MXFP4, exclude=names),
        lambda names: quark(MXFP4, layer_quant_config={n: layer(None) for n in names}),
        lambda names: {**AWQ, "modules_to_not_convert": names},
        lambda names: {**MODELOPT, "exclude_modules": names},
        lambda names: {**FP8, "modules_to_not_convert": names},
    ],
)
def test_long_lists_are_as_fast_as_short_ones(
    settings: Callable[[list[str]], dict[str, Any]],
) -> None:
    """2000 entries: comparing each would be a hundred times the work."""

    def lines(names: list[str]) -> int:
        config = parse_quantization(settings(names), {})
        prefix = "model.layers.3.mlp.experts"
        parts = [f"{prefix}.{i}.{p}_proj" for i in range(64) for p in ("gate", "up", "down")]
        return count_lines(lambda: config.method_for(prefix, parts, "experts"))

    assert lines(LISTED) <= lines(LISTED[:1]) + len(LISTED)


def test_parts_that_differ_are_named_as_they_are() -> None:
    for settings, name in ((AWQ, "AWQ"), (FP8, "fp8")):
        config = parse_quantization({**settings, "modules_to_not_convert": [GATE_UP[1][1]]}, {})
        with pytest.raises(
            ConfigError, match=rf"gate_proj is stored as {name} and .*up_proj as unquantised"
        ):
            config.method_for(*GATE_UP)


@pytest.mark.parametrize(
    ("entry", "ignored"),
    [
        ("gate", ["mlp.gate"]),
        ("mlp.gate", ["mlp.gate"]),
        ("mlp.gate.", ["mlp.gate"]),
        ("self_attn", ["self_attn.q_proj"]),
        ("layers.0.self_attn", ["self_attn.q_proj"]),
        ("model.layers.0.", ["mlp.gate", "mlp.gate_proj", "self_attn.q_proj"]),
        ("model.layers.00", []),
        ("visual", []),
    ],
)
def test_awq_lists_components_if_there_are_no_weights(entry: str, ignored: list[str]) -> None:
    config = parse_quantization({**AWQ, "modules_to_not_convert": [entry]}, {})
    names = ["mlp.gate", "mlp.gate_proj", "self_attn.q_proj"]
    assert [n for n in names if config.method_for(f"model.layers.0.{n}") is None] == ignored


def test_awq_lists_text_that_weights_overrule() -> None:
    stored = {f"{MLP}.gate_proj.qweight": Header(torch.int32, (64, 8))}
    config = parse_quantization({**AWQ, "modules_to_not_convert": ["gate", "attn"]}, stored)
    assert config.method_for(f"{MLP}.gate_proj") is not None
    assert config.method_for(f"{MLP}.gate") is None
    assert config.method_for("model.layers.0.self_attn.q_proj") is None


def test_quark_takes_the_first_layer_that_fits() -> None:
    plain, packed = layer(None), layer(MXFP4)
    name = "model.layers.1.self_attn.q_proj"
    for layers, is_plain in (
        ({"q_proj": plain, name: packed, "*": packed}, True),
        ({"*": packed, "q_proj": plain}, False),
        ({"layers.1": plain}, True),
        ({"layers.11": plain, "layers.1.self": plain}, False),
        ({"q_pro": plain}, True),
    ):
        config = parse_quantization(quark(MXFP4, layer_quant_config=layers), {})
        assert (config.method_for(name) is None) == is_plain, layers
