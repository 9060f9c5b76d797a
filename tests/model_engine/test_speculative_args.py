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
    expected = SpeculativeOptions("eagle3", 3, "D", ngram_max=5, lookup=True, adaptive=True)
    switches = {"speculative_lookup": True, "speculative_adaptive": True}
    assert options(**EAGLE, ngram_max=5, **switches) == expected
    line = "--method eagle3 --draft-model D --num-speculative-tokens 3 --ngram-max 5"
    switched = (*line.split(), "--speculative-lookup", "--speculative-adaptive")
    assert from_command_line(*switched) == expected
    text = (
        '{"method": "eagle3", "model": "D", "num_speculative_tokens": 3, "ngram_max": 5, '
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


def test_the_shortest_suffix_depends_on_what_is_beside_the_lookup() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    assert options(**ngram).shortest_ngram == 1
    assert options(**ngram, speculative_adaptive=True).shortest_ngram == 1
    assert options(**EAGLE, speculative_lookup=True).shortest_ngram == 2
    assert options(**EAGLE, speculative_lookup=True, ngram_min=3).shortest_ngram == 3
    mtp = {"method": "mtp", "num_speculative_tokens": 1, "speculative_lookup": True}
    assert options(**mtp).lookup


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative_lookup": True}, "--speculative-lookup has no effect without"),
        ({"speculative_adaptive": True}, "--speculative-adaptive has no effect without"),
        ({"draft_model": "D"}, "--draft-model has no effect without"),
        (
            {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "draft_aux_layer_convention": "output",
            },
            "draft_aux_layer_convention would have no effect",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1},
            "draft_tensor_parallel_size would have no effect",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "speculative_lookup": True},
            "method ngram is a lookup already",
        ),
        ({**EAGLE, "ngram_min": 2}, "for lookup beside a draft, not for eagle3 alone"),
        (
            {**EAGLE, "speculative_lookup": True, "ngram_min": 5},
            "ngram_max must be an integer of at least 5, got 4",
        ),
        (
            {**EAGLE, "speculative_lookup": True, "ngram_max": 1},
            "ngram_max must be an integer of at least 2, got 1",
        ),
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
