"""Rotary position embedding, with the checkpoint's scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import nn

from atom.model_ops.attention.metadata import AttentionMetadata, ModelInput
from atom.model_ops.kernels.torch.elementwise import Rope
from atom.model_ops.layer_context import LayerContext

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


class Rotation(Protocol):
    """A table of angles, and the op that rotates by rows of it.

    Attributes: as of `RotaryEmbedding`.
    """

    @property
    def cos_sin(self) -> torch.Tensor: ...

    @property
    def interleaved(self) -> bool: ...

    @property
    def rope(self) -> Rope: ...


class Rotary(Rotation, Protocol):
    """A rotation with a row for each position."""

    def of_step(self, model_input: ModelInput) -> AttentionInputs: ...


class AttentionInputs(NamedTuple):
    """What attention is given besides T rows.

    Attributes:
        positions: [T] int64, the rows of `rotary` by which they turn.
        metadata: their sequences and slots.
    """

    positions: torch.Tensor
    metadata: AttentionMetadata
    rotary: Rotation

    def windowed(self) -> AttentionInputs:
        """For a layer whose cache holds a window alone."""
        assert self.metadata.windowed is not None
        return self._replace(metadata=self.metadata.windowed)


class RotaryEmbedding(nn.Module):
    """What attention rotates its queries and keys by: the two halves of each head ("neox" style).

    With `interleaved`, the checkpoint's heads have pairs (x0, x1), (x2, x3), ... instead; they are
    returned as halves, which does not change products of queries and keys.

    The table covers the whole context that the engine serves. With "dynamic" scaling the base is
    that of the longest context served, unchanged if it is within the original one: the paper's base
    depends on the sequence's current length, but cached keys need one rotation per position. With
    "longrope" the factors are likewise those of the longest context served: the short ones if it is
    within the original context, the long ones otherwise, for short sequences, too.

    Args:
        rotary_dim: elements of each head that are rotated, the first; all if None.

    Attributes:
        cos_sin: [positions, rotary_dim] float32, cosines then sines.
        interleaved: as given.
        rope: the op.

    Raises:
        ValueError: for a rope type not in `SUPPORTED_ROPE_TYPES`, or parameters without finite
            frequencies.
    """

    cos_sin: torch.Tensor

    def __init__(
        self,
        config: PretrainedConfig,
        head_dim: int,
        context: LayerContext,
        interleaved: bool = False,
        rotary_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.interleaved = interleaved
        inv_freq, scaling = self._frequencies(config, rotary_dim or head_dim, context.max_model_len)
        if not bool(inv_freq.isfinite().all()):
            raise ValueError(f"rotating by {config.rope_parameters} turns infinitely fast")
        if context.device.type == "meta":
            # Without computing what has no values.
            table = torch.empty(context.max_model_len, 2 * len(inv_freq), device=context.device)
        else:
            positions = torch.arange(context.max_model_len, dtype=torch.float32)
            angles = positions[:, None] * inv_freq[None, :].float().cpu()
            table = torch.cat((angles.cos(), angles.sin()), dim=-1) * scaling
        self.register_buffer("cos_sin", table.to(context.device), persistent=False)
        self.rope: Rope = context.ops.resolve("rope", context.dtype, head_dim=head_dim)

    def of_step(self, model_input: ModelInput) -> AttentionInputs:
        """By which row of which table each of a step's tokens rotates."""
        return AttentionInputs(model_input.positions, model_input.attention, self)

    def _frequencies(
        self, config: PretrainedConfig, rotary_dim: int, max_model_len: int
    ) -> tuple[torch.Tensor, float]:
        return rope_frequencies(config, rotary_dim, max_model_len)


@dataclass(frozen=True)
class StepRotation:
    """A table with a row for each token of a step."""

    cos_sin: torch.Tensor
    interleaved: bool
    rope: Rope


class MRotaryEmbedding(RotaryEmbedding):
    """Rotates some pairs of a head by a token's time, some by its row, some by its column.

    In text all three are one number, so there it is what `RotaryEmbedding` is. With images each
    step has a table of its own, made of rows of this one, so that kernels know nothing of it.

    Args:
        sections: how many pairs turn by each of the three.
        mixed: whether pairs of all three come in turns, those of time last; else one section is
            behind the other.

    Raises:
        ValueError: for sections that are not the pairs of a head.
    """

    axes: torch.Tensor

    def __init__(
        self,
        config: PretrainedConfig,
        head_dim: int,
        context: LayerContext,
        sections: Sequence[int],
        *,
        mixed: bool,
        rotary_dim: int | None = None,
    ) -> None:
        super().__init__(config, head_dim, context, rotary_dim=rotary_dim)
        of_pairs = axes_of_pairs(sections, self.cos_sin.shape[1] // 2, mixed=mixed)
        self.register_buffer("axes", of_pairs.repeat(2).to(context.device), persistent=False)
        self._table = context.ops.resolve("mrope_table", torch.float32)

    def of_step(self, model_input: ModelInput) -> AttentionInputs:
        shifts = model_input.mrope_shifts
        if shifts is None:
            return super().of_step(model_input)
        table, rows = self._table(self.cos_sin, model_input.positions, shifts, self.axes)
        rotation = StepRotation(table, self.interleaved, self.rope)
        return AttentionInputs(rows, model_input.attention, rotation)


def axes_of_pairs(sections: Sequence[int], num_pairs: int, *, mixed: bool) -> torch.Tensor:
    """[num_pairs] int64: 0 for pairs that turn by time, 1 by row, 2 by column.

    Raises:
        ValueError: as `MRotaryEmbedding`.
    """
    counts = list(sections)
    if len(counts) != 3 or sum(counts) != num_pairs or min(counts) < 0:
        raise ValueError(
            f"mrope_section={counts} of a head with {num_pairs} pairs: expected three numbers "
            f"whose sum that is"
        )
    if not mixed:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    axes = torch.zeros(num_pairs, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * counts[axis] : 3] = axis
    if axes.bincount(minlength=3).tolist() != counts:
        raise ValueError(f"mrope_section={counts}: too few pairs of time to come in turns")
    return axes


class NoRotation(RotaryEmbedding):
    """For layers without positions: rotates by nothing, which returns what it gets."""

    def _frequencies(
        self, config: PretrainedConfig, rotary_dim: int, max_model_len: int
    ) -> tuple[torch.Tensor, float]:
        return torch.zeros(rotary_dim // 2), 1.0


def rope_frequencies(
    config: PretrainedConfig, rotary_dim: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """The inverse frequencies [rotary_dim / 2], and the factor on cos and sin.

    Scaled ones take the number of dimensions from the config.
    """
    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ValueError(
            f"rope type {rope_type!r} is not supported; supported are "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if rope_type == "default":
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    return _scaled_frequencies(config, rope_type, max_model_len)


def _scaled_frequencies(
    config: PretrainedConfig, rope_type: str, max_model_len: int
) -> tuple[torch.Tensor, float]:
    # Importing transformers takes a second.
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = config
    if not isinstance(config, PretrainedConfig):
        theirs = PretrainedConfig(**config.to_dict())
    compute = ROPE_INIT_FUNCTIONS[rope_type]
    inv_freq, factor = compute(theirs, torch.device("cpu"), seq_len=max_model_len)
    return inv_freq, float(factor)
