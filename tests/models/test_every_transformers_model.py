"""Every causal language model of the installed transformers runs equal, or is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from models.checkpoints import DENSE, Checkpoint, prompt
from models.harness import ModelBench
from models.transformers_families import EXPERTS, FAMILIES, MLA, save_random
from models.transformers_outcomes import OUTCOMES, VERSION
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from atom.config import ConfigError
from atom.model_loader.errors import WeightError
from atom.models.transformers.check import small_copy

LENGTH = 30
# Equal within this multiple of the logits' standard deviation.
TOLERANCE = 1e-3


def tiny(model_type: str) -> PreTrainedModel | None:
    """A small model of a type; None if none of the ways to make one works."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    make = CONFIG_MAPPING[model_type]
    ways = [
        lambda: make(**{**DENSE, **EXPERTS, **FAMILIES.get(model_type, {})}),
        lambda: make(**{**DENSE, **EXPERTS, **MLA}),
        lambda: small_copy(make()),
    ]
    for way in ways:
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in getattr(transformers, name)(way()).parameters())
            if size > 1 << 26:
                continue
            model: PreTrainedModel = getattr(transformers, name)(way()).eval()
            ids = torch.tensor([prompt(LENGTH)])
            with torch.inference_mode():
                model(input_ids=ids, use_cache=False)
        except Exception:  # whatever their code raises for sizes that do not fit
            continue
        return model
    return None


def outcome(model_type: str, folder: Path) -> str:
    """`equal` or `refused`, or `untried` where transformers makes or saves no small model.

    Raises:
        AssertionError: for a refusal without its name, and for other logits.
    """
    model = tiny(model_type)
    if model is None:
        return "untried"
    name = type(model).__name__
    try:
        checkpoint: Checkpoint = save_random(model, folder)
    except (NotImplementedError, RuntimeError, ValueError):
        return "untried"
    refused: Exception | None = None
    try:
        bench = ModelBench(folder, model_impl="transformers")
    except (ConfigError, WeightError) as error:
        refused = error
    if refused is not None:
        assert (
            isinstance(refused, WeightError) or name in str(refused) or model_type in str(refused)
        )
        return "refused"
    tokens = prompt(LENGTH)
    expected = checkpoint.logits(tokens)
    limit = TOLERANCE * expected.std().item()
    for sizes in ([LENGTH], [11, 7, 1]):
        found = bench.run(tokens, sizes, str(sizes))
        torch.testing.assert_close(found, expected, atol=limit, rtol=0)
    return "equal"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_it_is_equal_or_refused_by_its_name(model_type: str, tmp_path: Path) -> None:
    """As recorded, where the version of transformers is that of the record."""
    found = outcome(model_type, tmp_path)
    if transformers.__version__ == VERSION:
        assert OUTCOMES[model_type] == found
