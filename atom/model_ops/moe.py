"""Mixture of experts: the router, and the experts' weights in two tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from atom.config import ConfigError
from atom.model_ops.expert_parallel import HeldExperts, create_spread
from atom.model_ops.gates import SILU, ClampedGate, Gate, SiluGate, gate_shape
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.linear import share_of, stack
from atom.model_ops.quant.base import QuantConfig, QuantMethod, SplitsLayers
from atom.model_ops.quant.inputs import resolve_product, take_weights
from atom.model_ops.quant.rounding import InputRounding, QuantInputs, Rows
from atom.model_ops.quant.storage import Cut, MatrixStorage, Part
from atom.model_ops.quant.weights import held_bytes
from atom.model_ops.routing import Routing
from atom.model_ops.weights import copy_weight

# The checkpoint's module or tensor -> our matrix.
_MATRICES = {"gate_proj": "w13", "up_proj": "w13", "down_proj": "w2"}
_EXPERT = re.compile(r"((\d+)\.(\w+))\.(\w+)")
_SHARED = re.compile(r"shared_experts\.(\w+)\.(\w+)")
# The shard of a tensor of all experts, where it is not the whole parameter.
_ROUTED = "routed"
_STACKED = {"gate_up_proj": "w13", "down_proj": "w2"}
# What parameters of a shared expert that is stored otherwise begin with.
_PLAIN = "shared_"
_STACKED_TENSOR = re.compile(r"(gate_up_proj|down_proj)(?:_(\w+))?")


def expert_methods(
    quant: QuantConfig, prefix: str, experts: Sequence[str]
) -> dict[str, QuantMethod | None]:
    """How `w13` and `w2` of these experts are stored: alike, unless the checkpoint's format says of
    each matrix by itself how it is.

    Raises:
        ConfigError: when one is quantised and the other is not, or experts differ.
    """
    names: dict[str, list[str]] = {}
    for part, matrix in _MATRICES.items():
        names.setdefault(matrix, []).extend(f"{expert}.{part}" for expert in experts)
    every = [name for own in names.values() for name in own]
    if not (isinstance(quant, SplitsLayers) and quant.splits(every)):
        return dict.fromkeys(names, quant.method_for(prefix, every, "experts"))
    found = {matrix: quant.method_for(prefix, own, "experts") for matrix, own in names.items()}
    if plain := [matrix for matrix, method in found.items() if method is None]:
        raise ConfigError(
            f"{prefix}: {plain[0]} alone of w13 (gate and up) and w2 (down) is not quantised; both "
            f"have to be, or neither"
        )
    return found


def is_only_shared_plain(context: LayerContext, prefix: str, shared: str) -> bool:
    """Whether routed experts `prefix` are quantised, and the shared one is not."""
    quant = context.quant
    routed = expert_methods(quant, prefix, [f"{prefix}.0"])
    alone = (quant.method_for(f"{shared}.{part}") for part in _MATRICES)
    return all(routed.values()) and not any(alone)


class TopKRouter(nn.Module):
    """Chooses each token's experts; its sums and what follows are in float32."""

    def __init__(
        self, hidden_size: int, routing: Routing, has_correction_bias: bool, context: LayerContext
    ) -> None:
        super().__init__()
        precise = replace(context, dtype=torch.float32)
        self.routing = routing
        self.weight = context.empty(routing.num_experts, hidden_size)
        self.e_score_correction_bias = (
            precise.empty(routing.num_experts) if has_correction_bias else None
        )
        self._logits = context.ops.resolve(
            "logits", context.dtype, in_features=hidden_size, out_features=routing.num_experts
        )
        self._route = context.ops.resolve(
            "moe_route",
            torch.float32,
            num_experts=routing.num_experts,
            top_k=routing.top_k,
            num_groups=routing.num_groups,
            softmax=routing.scoring == "softmax",
            pair_scores=routing.group_score == "top2_sum",
            has_bias=has_correction_bias,
            has_shared=routing.has_shared,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] -> weights [T, k] float32, expert ids [T, k] int64 or int32; k is
        `routing.visits`.
        """
        logits = self._logits(x, self.weight)
        out: tuple[torch.Tensor, torch.Tensor] = self._route(
            logits, self.e_score_correction_bias, self.routing
        )
        return out


class FusedMoE(nn.Module):
    """The gated MLPs of all experts.

    The ranks of the layer's group split the intermediate dimension of every expert, unless those of
    `context.experts` hold whole ones.

    Args:
        visits: experts that a token visits, the shared one included.
        shared: the checkpoint's name of an expert that every token visits, as `routing.has_shared`
            says; its weights follow those of the others. None if it is a layer of its own. It is
            stored like the others, or not quantised where the op takes that (`OpChoice`).
        gate: what is between an expert's products.
        turned: whether tensors of all experts may be stored with inputs before outputs, as their
            shapes say then; those with a clamped gate are.

    Attributes:
        num_experts: of all ranks, without a shared one.
        w13_weight: [experts, 2 * inter, hidden], gate above up projection, if not quantised.
        w2_weight: [experts, hidden, inter], down projection, if not quantised.
        w13_bias, w2_bias: [experts, 2 * inter] and [experts, hidden], with a clamped gate.
        shared_w13_weight, shared_w2_weight: those of a shared expert that is stored otherwise.

    Raises:
        ValueError: when there are fewer experts than ranks to hold them, or the intermediate size
            does not split.
    """

    w13_weight: nn.Parameter
    w2_weight: nn.Parameter
    w13_bias: nn.Parameter
    w2_bias: nn.Parameter
    shared_w13_weight: nn.Parameter
    shared_w2_weight: nn.Parameter

    def __init__(
        self,
        num_experts: int,
        visits: int,
        hidden_size: int,
        intermediate_size: int,
        context: LayerContext,
        prefix: str,
        shared: str | None = None,
        gate: Gate = SILU,
        turned: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self._turned = turned
        self._has_shared = shared is not None
        self._dtype = context.dtype
        experts = [f"{prefix}.{i}" for i in range(num_experts)]
        self._has_plain = shared is not None and is_only_shared_plain(context, prefix, shared)
        if shared is not None and not self._has_plain:
            experts.append(shared)
        self._held = HeldExperts(len(experts), context.experts)
        self._spread = create_spread(self._held, context.experts, context.group)
        share = Cut.whole(intermediate_size)
        if context.experts.size == 1:
            share = share_of(context.group, intermediate_size, "moe_intermediate_size")
        self._parts = {
            **stack({"gate_proj": share, "up_proj": share}, hidden_size),
            "down_proj": Part(Cut.whole(hidden_size), share),
        }
        methods = expert_methods(context.quant, prefix, experts)
        count = self._held.count
        try:
            self._storages = {
                matrix: MatrixStorage(self, parts, methods[matrix], context, f"{matrix}_", count)
                for matrix, parts in self._matrices()
            }
            if self._has_plain:
                self._plain = {
                    matrix: MatrixStorage(self, parts, None, context, f"shared_{matrix}_")
                    for matrix, parts in self._matrices()
                }
        except ValueError as error:
            raise ValueError(f"{prefix}: {error}") from error
        self._gate = gate
        self._is_clamped = isinstance(gate, ClampedGate)
        # Of ranks that share every expert, one adds the bias.
        self._adds_bias = context.experts.size > 1 or context.group.rank == 0
        if self._is_clamped:
            self.w13_bias = context.empty(self._held.count, 2 * share.size)
            self.w2_bias = context.empty(self._held.count, hidden_size)
        form, down = (storage.format for storage in self._storages.values())
        self.choice = resolve_product(
            "moe_experts",
            form,
            context,
            None if down == form else down,
            num_experts=self._held.count + self._has_plain,
            top_k=visits,
            elsewhere=self._held.elsewhere,
            hidden_size=hidden_size,
            intermediate_size=share.size,
            **gate_shape(gate),
        )
        if self._has_plain and not self.choice.takes_plain:
            raise ValueError(f"{shared} is not quantised, which {self.choice.name} does not take")
        self._experts = self.choice.function
        self._prepared: tuple[Any, Any] | None = None

    def _matrices(self) -> tuple[tuple[str, list[Part]], ...]:
        gate, up, down = (self._parts[name] for name in _MATRICES)
        return ("w13", [gate, up]), ("w2", [down])

    def place_weight(self, name: str) -> tuple[str, str | None] | None:
        """`3.gate_proj.weight` is one expert's tensor, `gate_up_proj` that of all experts,
        `gate_up_proj_scales` their tensor `scales`, and `shared_experts.gate_proj.weight` that of
        the shared one.
        """
        if match := _STACKED_TENSOR.fullmatch(name):
            matrix, stored = _STACKED[match[1]], match[2] or "weight"
            shard = _ROUTED if self._has_shared else None
        elif self._has_shared and (match := _SHARED.fullmatch(name)):
            if match[1] not in _MATRICES:
                return None
            matrix, stored = _MATRICES[match[1]], match[2]
            shard = f"{self.num_experts}.{match[1]}"
            if self._has_plain:
                return (f"{_PLAIN}{matrix}_weight", shard) if stored == "weight" else None
        elif match := _EXPERT.fullmatch(name):
            if match[3] not in _MATRICES or int(match[2]) >= self.num_experts:
                return None
            matrix, stored, shard = _MATRICES[match[3]], match[4], match[1]
        else:
            return None
        is_stored = stored in self._storages[matrix].stored
        is_bias = stored == "bias" and self._is_clamped
        return (f"{matrix}_{stored}", shard) if is_stored or is_bias else None

    def weight_shards(self, name: str) -> tuple[str, ...]:
        """`0.gate_proj`, `0.up_proj`, `1.gate_proj`, ..."""
        if name.startswith(_PLAIN):
            return self._shards(name.removeprefix(_PLAIN), self.num_experts, 1)
        return self._shards(name, 0, self._held.count + self._held.elsewhere)

    def covers(self, name: str, shard: str) -> tuple[str, ...]:
        """A tensor of all experts is not the shared one's."""
        return self._shards(name, 0, self.num_experts) if shard == _ROUTED else (shard,)

    def _shards(self, name: str, first: int, count: int) -> tuple[str, ...]:
        matrix = name.partition("_")[0]
        parts = [part for part, of in _MATRICES.items() if of == matrix]
        return tuple(f"{i}.{part}" for i in range(first, first + count) for part in parts)

    @property
    def is_spread(self) -> bool:
        """Whether other ranks hold some of the experts."""
        return self._held.elsewhere > 0

    def holds(self, shard: str) -> bool:
        """Whether the shard's expert is one of this rank's."""
        return shard == _ROUTED or not self.is_spread or int(shard.partition(".")[0]) in self._held

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None) -> None:
        """Load one expert's tensor, or, without a shard, those of all experts, [experts, ...]."""
        if name.startswith(_PLAIN) and shard is not None:
            matrix, part = name.removeprefix(_PLAIN).partition("_")[0], shard.partition(".")[2]
            self._plain[matrix].load("weight", tensor, self._parts[part])
            return
        matrix, _, stored = name.partition("_")
        if stored == "bias" and self._is_clamped:
            self._load_bias(matrix, tensor, shard)
            return
        storage = self._storages[matrix]
        if shard == _ROUTED:
            for i, own in enumerate(self._of_all(tensor)):
                self._load_stacked(matrix, stored, own, i)
            return
        if shard is not None:
            expert, _, part = shard.partition(".")
            storage.load(stored, tensor, self._parts[part], int(expert) - self._held.first)
            return
        if self._held.elsewhere:
            tensor = self._of_all(tensor).narrow(0, self._held.first, self._held.count)
        self._load_stacked(matrix, stored, tensor)

    def stored_in(self, name: str) -> tuple[str, ...]:
        """The shards whose tensors, one behind another, are the parameter bit by bit; none where it
        is made of them otherwise.
        """
        matrix, _, stored = name.partition("_")
        storage = self._storages.get(matrix)
        if storage is None or stored not in storage.stored or self.is_spread:
            return ()
        return self.weight_shards(name) if storage.is_as_stored(stored) else ()

    def _load_bias(self, matrix: str, tensor: torch.Tensor, shard: str | None) -> None:
        bias = self.w13_bias if matrix == "w13" else self.w2_bias
        if shard is not None:
            number, _, name = shard.partition(".")
            expert = int(number) - self._held.first
            self._copy_bias(bias[expert : expert + 1], tensor[None], name)
            return
        rows = self._of_all(tensor).narrow(0, self._held.first, self._held.count)
        if matrix == "w2":
            self._copy_bias(bias, rows, "down_proj")
            return
        self._copy_bias(bias, rows[..., ::2], "gate_proj")
        self._copy_bias(bias, rows[..., 1::2], "up_proj")

    def _copy_bias(self, bias: torch.Tensor, rows: torch.Tensor, name: str) -> None:
        part = self._parts[name]
        cut = part.rows
        if rows.shape != (len(bias), cut.total):
            raise ValueError(
                f"the checkpoint holds {name}'s bias {list(rows.shape)}, the model wants "
                f"{[len(bias), cut.total]}"
            )
        mine = rows[:, cut.start : cut.start + cut.size]
        copy_weight(bias[:, part.offset : part.offset + cut.size], mine)

    def _load_stacked(
        self, matrix: str, stored: str, tensor: torch.Tensor, expert: int | None = None
    ) -> None:
        """Load both matrices of `w13`, or the one of `w2`, of one expert or of all held here."""
        storage = self._storages[matrix]
        is_turned = self._is_clamped and stored == "weight"
        if is_turned or (stored == "weight" and self._is_turned(matrix, tensor)):
            tensor = tensor.transpose(-1, -2)
        if matrix == "w2":
            storage.load(stored, tensor, self._parts["down_proj"], expert)
            return
        # Gate and up are split over the ranks separately.
        rows = tensor if expert is None else tensor[None]
        alternate = is_turned or storage.stored[stored].gate_up_alternate
        both = (rows[:, ::2], rows[:, 1::2]) if alternate else rows.chunk(2, dim=1)
        for part, half in zip(("gate_proj", "up_proj"), both, strict=True):
            own = half if expert is None else half[0]
            storage.load(stored, own, self._parts[part], expert)

    def _is_turned(self, matrix: str, tensor: torch.Tensor) -> bool:
        part = self._parts["down_proj" if matrix == "w2" else "gate_proj"]
        return self._turned and tensor.shape[-1] != part.columns.total

    def _of_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor [experts, ...] of all routed experts; any other is refused."""
        if not tensor.dim() or len(tensor) != self.num_experts:
            raise ValueError(
                f"the checkpoint holds shape {list(tensor.shape)}, the model wants one index for "
                f"each of {self.num_experts} experts in front"
            )
        return tensor

    @property
    def dequantised_bytes(self) -> int:
        """Of what takes the place of quantised weights; 0 if they stay quantised."""
        if not self.choice.dequantises:
            return 0
        sizes = (sum(s.rows) * s.columns for s in self._storages.values())
        return self._held.count * sum(sizes) * self._dtype.itemsize

    @property
    def quantised_bytes(self) -> int:
        """Of weights that are no parameters but in the form that the op made of quantised ones."""
        return 0 if self._storages["w13"].format is None else held_bytes(self._prepared)

    def prepared_from(self) -> str:
        """As `PreparedMatrix`; "" also where an expert is not quantised, or held elsewhere."""
        w13, w2 = self._storages.values()
        if w13.format is None or self._has_plain or self.is_spread:
            return ""
        return f"{self.choice.name} {self.choice.query} {w13.describe()} {w2.describe()}"

    @property
    def prepared(self) -> tuple[Any, ...]:
        """As `PreparedMatrix`."""
        return self._prepared or ()

    def restore(self, prepared: tuple[Any, ...]) -> frozenset[str]:
        """As `PreparedMatrix`."""
        w13, w2 = prepared
        self._prepared = w13, w2
        return frozenset[str]().union(*(each.drop() for each in self._storages.values()))

    def process_after_loading(self) -> None:
        """Convert quantised weights, and all to the layout that the op reads."""
        w13, w2 = self._storages.values()
        if self._is_clamped and not self._adds_bias:
            self.w2_bias.data.zero_()
        if self._prepared is not None:
            return
        if w13.format is not None:
            second = take_weights(w2, self.choice, is_down=True)
            self._prepared = take_weights(w13, self.choice), second
            if self.choice.prepare is not None:
                self._prepared = self.choice.prepare(*self._prepared, self._dtype)
            if self._has_plain:
                self._prepared = self._with_plain(*self._prepared)
        elif self.choice.prepare is not None:
            self._prepared = self.choice.prepare(self.w13_weight.data, self.w2_weight.data)
            self.w13_weight.data, self.w2_weight.data = self._prepared

    def _with_plain(self, w13: Any, w2: Any) -> tuple[Any, Any]:
        """Prepared weights that have the matrices of the shared expert, no parameters any more."""
        plain = self.shared_w13_weight.data, self.shared_w2_weight.data
        del self.shared_w13_weight, self.shared_w2_weight
        return replace(w13, plain=plain[0]), replace(w2, plain=plain[1])

    def rounding(self) -> InputRounding | None:
        """How a norm may round the inputs, once weights are loaded; None if it may not.

        It keeps the rows, which the router reads.
        """
        if not self.choice.takes_rounded or self.is_spread or self._prepared is None:
            return None
        rounding: InputRounding | None = self._prepared[0].rounding
        return rounding and replace(rounding, keeps_rows=True)

    def forward(
        self,
        x: Rows,
        weights: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, hidden], weights and expert ids [T, k] -> this rank's partial sum [T, hidden].

        Args:
            out: where the sum may be written, if the op can.
        """
        if out is not None and self.choice.into is not None and not self.is_spread:
            w13, w2 = self._weights()
            self.choice.into(x, w13, w2, weights, ids, self._held.elsewhere, self._gate, out)
            return out
        if isinstance(x, QuantInputs):
            return self._run(x, weights, ids)
        return self._spread(self._run, x, weights, ids)

    def _run(self, x: Rows, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The same with ids among this rank's experts; their number for one elsewhere."""
        w13, w2 = self._weights()
        out: torch.Tensor
        routed = weights, ids, self._held.elsewhere
        if self._is_clamped:
            biases = self.w13_bias, self.w2_bias
            out = self._experts(x, w13, w2, *routed, self._gate, biases)
        elif isinstance(self._gate, SiluGate):
            out = self._experts(x, w13, w2, *routed)
        else:
            out = self._experts(x, w13, w2, *routed, self._gate)
        return out

    def _weights(self) -> tuple[Any, Any]:
        """As the op reads them."""
        return self._prepared or (self.w13_weight, self.w2_weight)
