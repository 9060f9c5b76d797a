"""What a draft's card says of it, in its `config.json`."""

from __future__ import annotations

from atom.models.draft_fields import Fields
from atom.stats import ExpectedAcceptance

_NAME = "expected_acceptance_length"
_KEYS = {"tokens_per_forward", "num_speculative_tokens", "data"}


def expected_acceptance(fields: Fields, source: str) -> ExpectedAcceptance | None:
    """The acceptance length that the draft reached, bonus token included, and on what; None if it
    does not say.

    Args:
        source: the draft's name in the statistics.

    Raises:
        ConfigError: for anything but an object with all keys and possible values.
    """
    given = fields.get(_NAME)
    if given is None:
        return None
    if not isinstance(given, dict) or given.keys() != _KEYS:
        raise fields.error(
            f"{_NAME} should be an object with {', '.join(sorted(_KEYS))}, got {given!r}"
        )
    most, length, data = (
        given[key] for key in ("num_speculative_tokens", "tokens_per_forward", "data")
    )
    if type(most) is not int or most < 1:
        raise fields.error(f"{_NAME}: num_speculative_tokens should be at least 1, got {most!r}")
    if type(length) not in (int, float) or not 1 <= length <= most + 1:
        raise fields.error(
            f"{_NAME}: tokens_per_forward should be 1 to {most + 1} with {most} drafts, got "
            f"{length!r}"
        )
    if not isinstance(data, str) or not data:
        raise fields.error(f"{_NAME}: data should say on what it was measured, got {data!r}")
    return ExpectedAcceptance(
        source=source, tokens_per_forward=length, num_speculative_tokens=most, data=data
    )
