"""The draft that comes with the package is there, and used where nothing else was said."""

from __future__ import annotations

from atom.model_engine.arg_utils import choose_draft, engine_config
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
    assert engine_config(**choose_draft({}, True)).speculative is None
    assert engine_config(**choose_draft({"model": "another/model"}, False)).speculative is None
