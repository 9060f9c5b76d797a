"""Layers of ours in the place of transformers'."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from atom.config import ConfigError
from atom.model_ops.embedding import OutputHead, VocabParallelEmbedding
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import RMSNorm
from atom.model_ops.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from atom.model_ops.rank_sums import resolve_plain_sum
from atom.model_ops.stacked import StackedMatrix
from atom.models.transformers.tries import has_own_numbers, is_same, numbers, rows
from atom.models.transformers.weights import Names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of transformers' styles of sharing a linear layer, those that are honoured.
_STYLES = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")
_REPLICATED = ("replicated_with_grad_allreduce", "embedding_rowwise")


class Embedding(VocabParallelEmbedding):
    """Takes [1, T] ids, and multiplies by `factor`."""

    def __init__(self, like: nn.Embedding, context: LayerContext, prefix: str) -> None:
        super().__init__(like.num_embeddings, like.embedding_dim, context, prefix)
        self.factor = 1.0
        if type(like) is not nn.Embedding:
            scale = getattr(like, "embed_scale", None)
            if scale is None:
                raise ConfigError(f"its input embedding is a {type(like).__name__}")
            self.factor = torch.tensor(float(scale), dtype=context.dtype).item()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[1, T] -> [1, T, hidden], or for a draft that shares it [T] -> [T, hidden] as stored."""
        rows = super().forward(input_ids.flatten())
        if input_ids.dim() > 1:
            rows = rows.view(*input_ids.shape, -1)
            rows = rows if self.factor == 1 else rows * self.factor
        return rows


class Head(nn.Module):
    """An output head for rows with any leading axes, and the bias that it may have."""

    def __init__(self, head: OutputHead, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.inner = head
        self.bias = bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., vocab] float32."""
        logits: torch.Tensor = self.inner(hidden.flatten(0, -2))
        if self.bias is not None:
            logits = logits + self.bias
        return logits.view(*hidden.shape[:-1], -1)


class Linear(nn.Module):
    """A linear layer for rows with any leading axes.

    Attributes:
        weight, bias: of the layer, which modelling code asks for their dtype; None if quantised.

    Args:
        like: transformers' layer, with the sizes of this rank.
        style: how ranks share it; None if each has all of it.
    """

    def __init__(
        self, like: nn.Linear, style: str | None, context: LayerContext, prefix: str
    ) -> None:
        super().__init__()
        rows, columns = like.out_features, like.in_features
        bias = like.bias is not None
        size = context.group.size
        self.inner: LinearBase
        self._sum: Any = None
        self._style, self._group = style, context.group
        if style == "colwise":
            self.inner = ColumnParallelLinear(columns, rows * size, bias, context, prefix)
        elif style == "colwise_gather_output":
            self.inner = ColumnParallelLinear(columns, rows, bias, context, prefix)
        elif style in ("rowwise", "rowwise_split_input"):
            whole = columns * size if style == "rowwise" else columns
            self.inner = RowParallelLinear(whole, rows, bias, context, prefix)
            self._sum = resolve_plain_sum(rows, context)
        else:
            self.inner = ReplicatedLinear(columns, rows, bias, context, prefix)
        self.in_features, self.out_features = columns, rows

    @property
    def weight(self) -> torch.Tensor:
        return self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self._style == "rowwise_split_input":
            x = x.chunk(self._group.size, -1)[self._group.rank]
        shape = x.shape
        # Not called as a module: that takes as long as small products.
        out = self.inner.forward(x.reshape(-1, shape[-1]))
        if self._sum is not None:
            out = self._sum(out, self._group)
        if self._style == "colwise_gather_output":
            out = self._group.all_gather(out)
        return out.view(*shape[:-1], out.shape[-1])


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, with gate and up as one product."""

    def __init__(
        self,
        like: nn.Module,
        plan: Mapping[str, str],
        context: LayerContext,
        name: str,
        prefix: str,
    ) -> None:
        super().__init__()
        gate, down = like.get_submodule("gate_proj"), like.get_submodule("down_proj")
        assert isinstance(gate, nn.Linear)
        assert isinstance(down, nn.Linear)
        rows = gate.out_features * context.group.size
        has_bias = gate.bias is not None
        self.gate_up_proj = MergedColumnParallelLinear(
            gate.in_features,
            {"gate_proj": rows, "up_proj": rows},
            has_bias,
            context,
            f"{prefix}.gate_up_proj",
        )
        style = plan.get(f"{name}.down_proj")
        self.down_proj = Linear(down, style, context, f"{prefix}.down_proj")
        self.act = context.ops.resolve("silu_and_mul", context.dtype, size=gate.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        both = self.gate_up_proj.forward(x.reshape(-1, x.shape[-1]))
        out = self.down_proj.forward(self.act(both))
        return out.view(x.shape)


def split(base: PreTrainedModel, context: LayerContext) -> dict[str, str]:
    """How ranks share each linear layer, by transformers' plan; sizes are this rank's afterwards.

    Raises:
        ConfigError: for what cannot be shared so.
    """
    size = context.group.size
    if size == 1:
        return {}
    stated = base.config.base_model_tp_plan
    if not stated:
        raise ConfigError("transformers has no plan to split it over ranks")
    plan = {}
    names = [*dict(base.named_modules()), *dict(base.named_parameters())]
    for name in names:
        style = next((s for pattern, s in stated.items() if fnmatchcase(name, pattern)), None)
        if style is None or style in _REPLICATED:
            continue
        module = base.get_submodule(name) if name in dict(base.named_modules()) else None
        if not isinstance(module, nn.Linear) or style not in _STYLES:
            raise ConfigError(f"{name} cannot be split over ranks as {style}")
        plan[name] = style
        rows, columns = module.out_features, module.in_features
        if style == "colwise":
            _resize(module, context.group.divide(rows, name), columns)
        elif style == "rowwise":
            _resize(module, rows, context.group.divide(columns, name))
    return plan


def replace_linears(
    base: PreTrainedModel, plan: Mapping[str, str], names: Names, context: LayerContext
) -> None:
    """Put layers of ours in the place of all linear layers but those that stay in float32."""
    for name, module in list(base.named_modules()):
        if type(module) is nn.Linear and not names.stays_float32(name, context.dtype):
            ours = Linear(module, plan.get(name), context, names.of_base(name))
            base.set_submodule(name, ours)


def replace_mlps(
    base: PreTrainedModel, plan: Mapping[str, str], names: Names, context: LayerContext
) -> None:
    """Put MLPs of ours in the place of those that compute the same, by a try."""
    for name, module in list(base.named_modules()):
        linears = [f"{name}.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
        if any(names.stays_float32(linear, context.dtype) for linear in linears):
            continue
        styles = [plan.get(linear) for linear in linears]
        if context.group.size > 1 and styles != ["colwise", "colwise", "rowwise"]:
            continue
        if _is_gated_mlp(module):
            ours = GatedMLP(module, plan, context, name, names.of_base(name))
            base.set_submodule(name, ours)


def _is_gated_mlp(module: nn.Module) -> bool:
    """Whether a module is three linear layers with silu, and computes what `GatedMLP` does."""
    linears = {part: module._modules.get(part) for part in ("gate_proj", "up_proj", "down_proj")}
    others = module._modules.keys() - linears.keys() - {"act_fn"}
    if others or has_own_numbers(module):
        return False
    if any(type(x) is not nn.Linear for x in linears.values()):
        return False
    has_bias = {part: getattr(linear, "bias", None) is not None for part, linear in linears.items()}
    if has_bias["gate_proj"] != has_bias["up_proj"]:
        return False
    tried = copy.copy(module)
    tried._modules = dict(module._modules)
    gate, up, down = (_small(has_bias[part], part == "down_proj") for part in linears)
    tried._modules.update(gate_proj=gate, up_proj=up, down_proj=down)
    up.weight.neg_()
    x = rows(8)
    with torch.inference_mode():
        expected = down(F.silu(gate(x)) * up(x))
        try:
            return is_same(tried(x.clone()), expected)
        except (TypeError, RuntimeError, AttributeError):
            return False


def _small(has_bias: bool, is_down: bool) -> nn.Linear:
    linear = nn.Linear(*((6, 8) if is_down else (8, 6)), bias=has_bias, device="meta")
    for name, parameter in list(linear.named_parameters()):
        value = numbers(*parameter.shape)
        linear.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return linear


def replace_norms(base: PreTrainedModel, names: Names, context: LayerContext) -> None:
    """Put norms of ours in the place of those that compute the same, by a try."""
    for name, module in list(base.named_modules()):
        eps = _rms_epsilon(module)
        if eps is not None and not names.stays_float32(name, context.dtype):
            size = int(module.get_parameter("weight").shape[0])
            base.set_submodule(name, RMSNorm(size, eps, context))


def _rms_epsilon(module: nn.Module) -> float | None:
    """The number that an RMS norm adds; None for other modules."""
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if "Norm" not in type(module).__name__ or len(parameters) != 1 or weight is None:
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight.dim() != 1 or not isinstance(eps, float):
        return None
    size = weight.shape[0]
    tried = copy.deepcopy(module)
    weights = torch.linspace(0.5, 1.5, size)
    tried.register_parameter("weight", nn.Parameter(weights, requires_grad=False))
    x = rows(size)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weights
    with torch.inference_mode():
        return eps if is_same(tried(x.clone()), expected) else None


def materialise(root: nn.Module, names: Names, context: LayerContext) -> None:
    """Give memory to parameters that are no layers' of ours, and make parameters of the buffers
    that a checkpoint has.
    """
    # With the parameters that are replaced, whose ids would be given to others.
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module_name, module in root.named_modules():
        if isinstance(module, StackedMatrix):
            continue
        for name, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            if name in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(context.device)
            else:
                del module._buffers[name]
                module._parameters[name] = nn.Parameter(buffer.to("meta"), requires_grad=False)
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            dtype = parameter.dtype
            if dtype.is_floating_point:
                keeps = names.stays_float32(f"{module_name}.{name}", context.dtype)
                dtype = torch.float32 if keeps else context.dtype
            if id(parameter) not in made:
                data = torch.empty(parameter.shape, dtype=dtype, device=context.device)
                made[id(parameter)] = parameter, nn.Parameter(data, requires_grad=False)
            module._parameters[name] = made[id(parameter)][1]


def _resize(linear: nn.Linear, rows: int, columns: int) -> None:
    """Change the sizes of a linear layer without memory."""
    linear.out_features, linear.in_features = rows, columns
    linear.weight = nn.Parameter(linear.weight.new_empty(rows, columns), requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.new_empty(rows), requires_grad=False)
