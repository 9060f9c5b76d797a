"""The draft that comes with the package is there, and used where nothing else was said."""

from __future__ import annotations

import pytest

from atom.command_line.parser import CommandLine
from atom.config import ConfigError
from atom.model_engine.arg_utils import (
    add_engine_flags,
    choose_draft,
    engine_config,
    engine_options,
)
from atom.model_loader.drafts.shipped import shipped_draft_for


def test_the_embedded_model_has_a_draft() -> None:
    folder = shipped_draft_for(None)
    assert folder is not None
    assert (folder / "config.json").is_file()
    assert (folder / "model.safetensors").is_file()
    assert shipped_draft_for("another/model") is None


def test_the_embedded_model_speculates_unless_told_not_to() -> None:
    options = engine_config(**choose_draft({}, False)).speculative
    assert options is not None
    assert options.model == str(shipped_draft_for(None))
    assert (options.num_speculative_tokens, options.lookup, options.adaptive) == (3, True, True)
    given = {"num_speculative_tokens": 2, "speculative_lookup": False, "suffix_cache_tokens": None}
    changed = engine_config(**choose_draft(given, False)).speculative
    assert changed is not None
    assert changed.model == options.model
    assert (changed.num_speculative_tokens, changed.lookup, changed.adaptive) == (2, False, True)
    for k in (0, 16):
        with pytest.raises(ConfigError, match=f"must be 1 to 15, got {k}; .*--no-speculation"):
            engine_config(**choose_draft({"num_speculative_tokens": k}, False))
    assert engine_config(**choose_draft({}, True)).speculative is None
    assert engine_config(**choose_draft({"model": "another/model"}, False)).speculative is None


def test_flags_switch_parts_of_it_off() -> None:
    parser = CommandLine()
    add_engine_flags(parser)
    given = engine_options(parser.parse_args(["--no-speculative-lookup", "--no-overlap"]))
    options = engine_config(**choose_draft(given, False)).speculative
    assert options is not None
    assert (options.lookup, options.adaptive) == (False, True)
    assert engine_config(**choose_draft(given, True)).speculative is None
