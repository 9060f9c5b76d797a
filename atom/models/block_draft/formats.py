"""The published formats of block drafters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from atom.config import ConfigError


@dataclass(frozen=True)
class BlockFormat:
    """One format.

    Attributes:
        architecture: as configs name it.
        kind: `dflash`, `dflash2` or `dspark`.
        has_markov, has_selector: which head it may have; the selector comes with convolutions.
        plain_kind: what it is without its head, too.
        samples_anchor: what a config means that does not say it.
        speculators: whether it has the layout of the speculators library.
        has_latents: whether its attention is to latents; then its embedding and head are the
            target's, and its config does not say how long a block is.
    """

    architecture: str
    kind: str
    has_markov: bool = False
    has_selector: bool = False
    plain_kind: str | None = None
    samples_anchor: bool = False
    speculators: bool = False
    has_latents: bool = False


_DFLASH = BlockFormat("DFlashDraftModel", "dflash")
_DFLASH2 = BlockFormat("DFlash2DraftModel", "dflash2", has_selector=True)
_DSPARK = BlockFormat("Qwen3DSparkModel", "dspark", has_markov=True, plain_kind="dflash")
_FORMATS = (
    _DFLASH,
    _DFLASH2,
    replace(_DSPARK, samples_anchor=True),
    replace(_DSPARK, architecture="K3DSparkModel", samples_anchor=True, has_latents=True),
    replace(_DFLASH, architecture="DFlashSpeculator", speculators=True),
    replace(_DFLASH2, speculators=True),
    replace(_DSPARK, architecture="DSparkSpeculator", speculators=True),
)


def find_format(raw: Mapping[str, Any]) -> BlockFormat:
    """The format of a block drafter's config.

    Raises:
        ConfigError: for another architecture, or one that contradicts `speculators_model_type`.
    """
    names = raw.get("architectures")
    name = names[0] if isinstance(names, (list, tuple)) and names else names
    kind = raw.get("speculators_model_type")
    fitting = (f for f in _FORMATS if (f.architecture, f.speculators) == (name, kind is not None))
    form = next(fitting, None)
    if form is None or kind not in (None, form.kind):
        known = ", ".join(dict.fromkeys(f.architecture for f in _FORMATS))
        stated = "" if kind is None else f" with speculators_model_type {kind!r}"
        raise ConfigError(
            f"architecture {name!r}{stated} is no block drafter that is supported; supported are "
            f"{known}"
        )
    return form
