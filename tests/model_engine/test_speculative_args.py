"""Speculation options, as flags, as keyword arguments and as JSON."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from atom.config import ConfigError, SpeculativeOptions
from atom.model_engine.arg_utils import (
    add_engine_flags,
    engine_config,
    engine_options,
)


def options(**kwargs: Any) -> SpeculativeOptions:
    found = engine_config(**kwargs).speculative
    assert found is not None
    return found


def from_command_line(*flags: str) -> SpeculativeOptions:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    found = engine_config(**engine_options(parser.parse_args(flags))).speculative
    assert found is not None
    return found


EAGLE = {"method": "eagle3", "draft_model": "D", "num_speculative_tokens": 3}


def test_flags_and_json_say_the_same() -> None:
    expected = SpeculativeOptions(
        "eagle3", 3, "D", suffix_cache_tokens=5, lookup=True, adaptive=True
    )
    switches = {"speculative_lookup": True, "speculative_adaptive": True}
    assert options(**EAGLE, suffix_cache_tokens=5, **switches) == expected
    line = "--method eagle3 --draft-model D --num-speculative-tokens 3 --suffix-cache-tokens 5"
    switched = (*line.split(), "--speculative-lookup", "--speculative-adaptive")
    assert from_command_line(*switched) == expected
    text = (
        '{"method": "eagle3", "model": "D", "num_speculative_tokens": 3, "suffix_cache_tokens": 5, '
        '"lookup": true, "adaptive": true}'
    )
    assert options(speculative_config=text) == expected
    assert from_command_line("--speculative-config", text) == expected


def test_what_layer_ids_name() -> None:
    text = (
        '{"method": "eagle3", "model": "D", "num_speculative_tokens": 3, '
        '"aux_layer_convention": "output"}'
    )
    assert options(speculative_config=text).aux_layer_convention == "output"
    assert options(**EAGLE, draft_aux_layer_convention="boundary").aux_layer_convention
    with pytest.raises(ConfigError, match="must be one of boundary, output; got 'input'"):
        options(**EAGLE, draft_aux_layer_convention="input")


def test_both_are_off_by_default() -> None:
    found = options(**EAGLE)
    assert (found.lookup, found.adaptive) == (False, False)


def test_what_looks_up() -> None:
    suffix = {"method": "suffix", "num_speculative_tokens": 15}
    assert options(**suffix).looks_up
    assert options(**suffix).suffix_cache_tokens == 0
    assert not options(**EAGLE).looks_up
    assert options(**EAGLE, speculative_lookup=True, suffix_cache_tokens=9).looks_up


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative_lookup": True}, "--speculative-lookup has no effect without"),
        ({"speculative_adaptive": True}, "--speculative-adaptive has no effect without"),
        ({"draft_model": "D"}, "--draft-model has no effect without"),
        (
            {
                "method": "suffix",
                "num_speculative_tokens": 3,
                "draft_aux_layer_convention": "output",
            },
            "draft_aux_layer_convention would have no effect",
        ),
        (
            {"method": "suffix", "num_speculative_tokens": 3, "draft_quantization": "int8"},
            "draft_quantization would have no effect",
        ),
        (
            {"method": "suffix", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1},
            "draft_tensor_parallel_size would have no effect",
        ),
        (
            {"method": "suffix", "num_speculative_tokens": 3, "speculative_lookup": True},
            "method suffix is a lookup already",
        ),
        ({**EAGLE, "suffix_cache_tokens": 2}, "for lookup beside a draft, not for eagle3 alone"),
        ({"suffix_cache_tokens": 2}, "--suffix-cache-tokens has no effect without"),
        (
            {**EAGLE, "speculative_lookup": True, "suffix_cache_tokens": -1},
            "suffix_cache_tokens must be an integer of at least 0, got -1",
        ),
        (
            {"speculative_config": {"model": "D", "num_speculative_tokens": 3}},
            "--speculative-config needs method (",
        ),
        ({"speculative_config": "{}"}, "and num_speculative_tokens; it has nothing"),
        ({"speculative_config": {"method": "suffix"}}, "needs num_speculative_tokens; it has meth"),
        (
            {"speculative_config": "{}", "speculative_adaptive": True},
            "--speculative-config and --speculative-adaptive say the same thing",
        ),
        (
            {"speculative_config": {**EAGLE, "model": "D", "lookup": 1}},
            "does not know draft_model",
        ),
        (
            {
                "speculative_config": {
                    "method": "eagle3",
                    "model": "D",
                    "num_speculative_tokens": 3,
                    "adaptive": "yes",
                }
            },
            "adaptive must be true or false, got 'yes'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_config(**given)
    assert message in str(error.value)
