"""Attention of ours in the place of modules that rotate halves of heads, attend, and no more."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from atom.model_ops.layer_context import LayerContext
from atom.model_ops.linear import MergedColumnParallelLinear
from atom.models.transformers.layers import Linear
from atom.models.transformers.probe import AttentionCall, LayerCall, LayerFacts
from atom.models.transformers.tries import (
    LENGTH,
    POSITIONS,
    has_own_numbers,
    is_same,
    numbers,
    rows,
)
from atom.models.transformers.weights import Names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INPUTS = ("q_proj", "k_proj", "v_proj")
_OUTPUT = "o_proj"
_STYLES = ["colwise", "colwise", "colwise", "rowwise"]


class RotatingCall(AttentionCall, Protocol):
    """Attention that rotates by itself."""

    def rotate_and_attend(
        self, layer: int, qkv: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Rows of all heads, not rotated, cos and sin [1, T, d] -> [T, H * d]."""
        ...


class PlainAttention(nn.Module):
    """Queries, keys and values as one product, rotated where they are cached."""

    def __init__(
        self,
        facts: LayerFacts,
        layer: int,
        plan: Mapping[str, str],
        context: LayerContext,
        name: str,
        prefix: str,
    ) -> None:
        super().__init__()
        q, k, v, o = _linears(facts.module)
        self._layer = layer
        self._sizes = [q.out_features, k.out_features, v.out_features]
        rows = {
            part: size * context.group.size for part, size in zip(_INPUTS, self._sizes, strict=True)
        }
        has_bias = q.bias is not None
        self.qkv_proj = MergedColumnParallelLinear(
            q.in_features, rows, has_bias, context, f"{prefix}.qkv_proj"
        )
        style = plan.get(f"{name}.{_OUTPUT}")
        self.o_proj = Linear(o, style, context, f"{prefix}.{_OUTPUT}")

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *_: object,
        atom: RotatingCall,
        **__: object,
    ) -> tuple[torch.Tensor, None]:
        """By transformers' interface: [1, T, hidden] -> [1, T, hidden]."""
        both = self.qkv_proj.forward(hidden_states.view(-1, hidden_states.shape[-1]))
        qkv = both.split_with_sizes(self._sizes, -1)
        out = self.o_proj.forward(atom.rotate_and_attend(self._layer, qkv, *position_embeddings))
        return out.view(hidden_states.shape), None


def replace_attentions(
    base: PreTrainedModel,
    facts: list[LayerFacts],
    plan: Mapping[str, str],
    names: Names,
    context: LayerContext,
) -> None:
    """Put attention of ours in the place of modules that compute the same, by a try."""
    if not _rotates_halves(base):
        return
    known = {module: name for name, module in base.named_modules()}
    for layer, each in enumerate(facts):
        name = known[each.module]
        linears = [f"{name}.{part}" for part in (*_INPUTS, _OUTPUT)]
        if any(names.stays_float32(linear, context.dtype) for linear in linears):
            continue
        if context.group.size > 1 and [plan.get(linear) for linear in linears] != _STYLES:
            continue
        if _is_plain(each):
            ours = PlainAttention(each, layer, plan, context, name, names.of_base(name))
            base.set_submodule(name, ours)


def _linears(module: nn.Module) -> list[nn.Linear]:
    found = [module._modules.get(part) for part in (*_INPUTS, _OUTPUT)]
    return [linear for linear in found if type(linear) is nn.Linear]


def _rotates_halves(base: PreTrainedModel) -> bool:
    """Whether the model's cosines and sines are the same for both halves of a head."""
    rotary = base._modules.get("rotary_emb")
    if rotary is None:
        return False
    try:
        found = rotary(torch.zeros(1, 3, 1), position_ids=torch.tensor([[0, 1, 5]]))
        return len(found) == 2 and all(torch.equal(*x.chunk(2, -1)) for x in found)
    except (TypeError, RuntimeError, AttributeError, ValueError):
        return False


def _is_plain(facts: LayerFacts) -> bool:
    """Whether a module is four linear layers, and between them rotates halves of each head of
    queries and keys, and attends.
    """
    module, linears = facts.module, _linears(facts.module)
    if len(linears) != 4 or len(module._modules) != 4 or has_own_numbers(module):
        return False
    if len({linear.bias is None for linear in linears[:3]}) != 1 or facts.key_size % 2:
        return False
    if facts.key_size != facts.value_size:
        return False
    hidden = rows(linears[0].in_features, 0.5)
    given = [_Given(linear.out_features) for linear in linears]
    tried = copy.copy(module)
    tried._modules = dict(zip((*_INPUTS, _OUTPUT), given, strict=True))
    cos, sin = (numbers(1, LENGTH, facts.key_size // 2).repeat(1, 1, 2) + x for x in (0, 1))
    call = _Noted()
    try:
        with torch.inference_mode():
            found = tried(
                hidden_states=hidden.clone(),
                position_embeddings=(cos, sin),
                attention_mask=None,
                position_ids=torch.tensor([POSITIONS]),
                atom=call,
            )
    except (TypeError, RuntimeError, AttributeError, ValueError, LookupError):
        return False
    if not (isinstance(found, tuple) and len(found) == 2 and found[1] is None):
        return False
    rotated = [_rotated(_heads(x.rows, facts.key_size), cos, sin) for x in given[:2]]
    expected = [*rotated, _heads(given[2].rows, facts.key_size), *[hidden] * 3, found[0]]
    seen = [*call.seen, *(x.seen for x in given[:3]), given[3].rows]
    same = len(seen) == len(expected) and all(map(is_same, seen, expected))
    heads = given[3].seen
    return (
        same
        and call.scale == facts.scale
        and heads is not None
        and torch.equal(heads.flatten(), call.out.flatten())
    )


class _Given(nn.Module):
    """In the place of a linear layer: returns rows of its own, and keeps what it is given. What is
    written into either later changes neither.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.rows = rows(columns)
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.clone()
        return self.rows.clone()


class _Noted:
    """Attention that keeps what it is given, and returns numbers."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.scale = 0.0
        self.out = torch.empty(0)

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        self.seen += [q, k, v]
        # With a mask or further arguments it is something else.
        self.scale = 0.0 if call.others or call.mask is not None else call.scale
        self.out = numbers(1, q.shape[2], q.shape[1], v.shape[3])
        return self.out.clone()


def _heads(x: torch.Tensor, size: int) -> torch.Tensor:
    """[1, T, H * d] -> [1, H, T, d]."""
    return x.view(1, LENGTH, -1, size).transpose(1, 2)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
