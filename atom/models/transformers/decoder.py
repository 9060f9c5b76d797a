"""A decoder of ours in the place of one whose modelling code computes the same, found by tries.

Modules of ours that were put into it before are replaced by stand-ins with rows of their own; what
each is given, and what comes out, must be what our decoder would give it and return.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from atom.model_ops.attention.metadata import ModelInput
from atom.model_ops.attention.mha import Attention
from atom.model_ops.kernels.torch.elementwise import Rope
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import Reader, ResidualRMSNorm, RMSNorm, Sublayer
from atom.model_ops.linear import LinearBase, by_head
from atom.model_ops.quant.rounding import Rows
from atom.model_ops.rotary import AttentionInputs
from atom.models.llama import Decoder, DecoderLayer
from atom.models.transformers.attention import PlainAttention
from atom.models.transformers.layers import Embedding, GatedMLP, Head, Linear
from atom.models.transformers.probe import run
from atom.models.transformers.tries import POSITIONS, has_own_numbers, is_same, rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens of a try.
_IDS = (1, 0, 2, 3)
# Of a decoder layer: how many, and what.
_PARTS = {
    "attention": (1, "attentions that only rotate halves of heads"),
    "mlp": (1, "MLPs that gate by silu"),
    "norm": (2, "RMS norms"),
}
_OURS = (RMSNorm, PlainAttention, GatedMLP, Linear, Embedding, Head)
_RAISED = (TypeError, RuntimeError, AttributeError, ValueError, LookupError)


class DiffersError(Exception):
    """Why a part of a model is not what ours computes."""


class PlainAttentionSublayer(Sublayer):
    """The attention of a module, by the interface of our decoder layers."""

    def __init__(self, module: PlainAttention, attention: Attention) -> None:
        super().__init__()
        # In a tuple, so that they are not registered as submodules again.
        self._parts = module.qkv_proj, attention, module.o_proj.inner
        self._heads = [attention.num_heads, attention.num_kv_heads, attention.num_kv_heads]

    @property
    def reader(self) -> LinearBase:
        return self._parts[0]

    def forward(self, x: Rows, inputs: AttentionInputs) -> torch.Tensor:
        """[T, hidden] -> this rank's part of a sum [T, hidden]."""
        qkv_proj, attention, o_proj = self._parts
        q, k, v = by_head(qkv_proj(x), attention.head_dim, self._heads)
        out: torch.Tensor = o_proj(attention(q, k, v, inputs))
        return out


class GatedSublayer(Sublayer):
    """The MLP of a module, by the interface of our decoder layers."""

    def __init__(self, module: GatedMLP) -> None:
        super().__init__()
        self._parts = module.gate_up_proj, module.act, module.down_proj.inner

    @property
    def reader(self) -> LinearBase:
        return self._parts[0]

    def forward(self, x: Rows) -> torch.Tensor:
        """[T, hidden] -> this rank's part of a sum [T, hidden]."""
        gate_up_proj, act, down_proj = self._parts
        out: torch.Tensor = down_proj(act(gate_up_proj(x)))
        return out


@dataclass(frozen=True)
class RotationTable:
    """What a module of transformers rotates by, for all positions."""

    cos_sin: torch.Tensor
    interleaved: bool
    rope: Rope

    def of_step(self, model_input: ModelInput) -> AttentionInputs:
        """By which row of which table each of a step's tokens rotates."""
        return AttentionInputs(model_input.positions, model_input.attention, self)


class FoundLayer(DecoderLayer):
    """A decoder layer of ours around the modules of one of transformers'."""

    def __init__(
        self, attention: Sublayer, mlp: Sublayer, norms: Sequence[ResidualRMSNorm]
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = norms


class FoundDecoder(Decoder):
    """A decoder of ours around the modules of one of transformers'."""

    norm: ResidualRMSNorm

    def __init__(
        self,
        embedding: Embedding,
        layers: Sequence[FoundLayer],
        norm: ResidualRMSNorm,
        rotation: RotationTable,
        context: LayerContext,
    ) -> None:
        super().__init__()
        self.embed_tokens, self.norm = embedding, norm
        self.aux_layer_ids = ()
        self._layers = tuple(layers)
        self._rotaries = (rotation,)
        self._rotary_of_layer = (0,) * len(layers)
        self._embedding_scale, self._scale = embedding.factor, None
        if embedding.factor != 1:
            self._scale = context.ops.resolve("scale", context.dtype)


@dataclass(frozen=True)
class _LayerParts:
    """Names of the modules of a decoder layer, in the order in which they are called."""

    norm: str
    attention: str
    mlp_norm: str
    mlp: str


def find_decoder(
    base: PreTrainedModel,
    layers: Sequence[nn.Module] | None,
    attentions: Sequence[Attention],
    context: LayerContext,
) -> FoundDecoder:
    """A decoder with the modules of ours that are in `base`, whose norms take the residual.

    Args:
        base: with its buffers in memory.
        layers: of the base; None if they are no list.
        attentions: of each layer.

    Raises:
        DiffersError: saying what is not as ours.
    """
    if layers is None:
        raise DiffersError("its layers are no list")
    with _ours_raise(base):
        norm, given = _try_base(base, layers)
        parts = [_try_layer(i, layer, given) for i, layer in enumerate(layers)]
    table = _table(base, context)
    found = []
    for layer, names, attention in zip(layers, parts, attentions, strict=True):
        plain, mlp = layer.get_submodule(names.attention), layer.get_submodule(names.mlp)
        assert isinstance(plain, PlainAttention)
        assert isinstance(mlp, GatedMLP)
        sublayers = PlainAttentionSublayer(plain, attention), GatedSublayer(mlp)
        norms = [
            _take_residual(layer, name, context, sublayer.reader)
            for name, sublayer in zip((names.norm, names.mlp_norm), sublayers, strict=True)
        ]
        found.append(FoundLayer(*sublayers, norms))
    embedding = base.get_input_embeddings()
    assert isinstance(embedding, Embedding)
    rope = context.ops.resolve("rope", context.dtype, head_dim=attentions[0].head_dim)
    rotation = RotationTable(table, False, rope)
    return FoundDecoder(embedding, found, _take_residual(base, norm, context), rotation, context)


def only_multiplies(model: PreTrainedModel, head: str, columns: tuple[int, int]) -> bool:
    """Whether a model whose base was taken computes its head alone, by a try.

    Args:
        head: its name.
        columns: of hidden states, and of logits.
    """
    if head not in model._modules:
        return False
    given = _Given(columns[1], 0)
    tried = _with(model, {head: given})
    hidden = rows(columns[0])
    try:
        with _ours_raise(model), torch.inference_mode():
            logits = tried(inputs_embeds=hidden.clone(), use_cache=False).logits
    except _RAISED:
        return False
    return given.count == 1 and is_same(given.seen, hidden) and is_same(logits, given.rows)


def _take_residual(
    root: nn.Module, name: str, context: LayerContext, reader: Reader | None = None
) -> ResidualRMSNorm:
    norm = root.get_submodule(name)
    assert isinstance(norm, RMSNorm)
    ours = ResidualRMSNorm(len(norm.weight), norm.eps, context, reader)
    root.set_submodule(name, ours)
    return ours


def _try_base(base: PreTrainedModel, layers: Sequence[nn.Module]) -> tuple[str, Mapping[str, Any]]:
    """The name of the final norm, and what each layer is given beside rows.

    Raises:
        DiffersError: when it does more than embed, run its layers and norm.
    """
    children = base._modules
    embedding = base.get_input_embeddings()
    norms = [name for name, module in children.items() if type(module) is RMSNorm]
    lists = [
        name
        for name, module in children.items()
        if isinstance(module, nn.ModuleList) and list(module) == list(layers)
    ]
    embeddings = [name for name, module in children.items() if module is embedding]
    if [len(names) for names in (norms, lists, embeddings)] != [1, 1, 1]:
        raise DiffersError("it is no list of layers between an embedding and an RMS norm")
    size = embedding.in_features
    first, *between, last = (_Given(size, phase) for phase in range(len(layers) + 2))
    stand_ins = {embeddings[0]: first, lists[0]: nn.ModuleList(between), norms[0]: last}
    others = [name for name in children if name not in stand_ins and name != "rotary_emb"]
    if has_own_numbers(base) or any(_has_numbers(children[name]) for name in others):
        raise DiffersError(f"it has further parts: {', '.join(others) or 'its own numbers'}")
    if _is_loaded(children.get("rotary_emb")):
        raise DiffersError("its cosines and sines depend on numbers of the checkpoint")
    ids = torch.tensor([_IDS])
    positions = torch.tensor([POSITIONS])
    call = _Nothing()
    try:
        with torch.inference_mode():
            found = run(_with(base, stand_ins), call, input_ids=ids, position_ids=positions)
    except _RAISED as error:
        raise DiffersError(f"it cannot be tried ({type(error).__name__})") from None
    chain = [first, *between, last]
    entering = [ids, *(module.rows for module in chain[:-1])]
    is_chain = all(is_same(one.seen, x) for one, x in zip(chain, entering, strict=True))
    if not (is_chain and all(one.count == 1 for one in chain) and is_same(found, last.rows)):
        raise DiffersError("it does more than run its layers one after another")
    return norms[0], _same_of_all(base, between, positions)


def _same_of_all(
    base: PreTrainedModel, layers: Sequence[_Given], positions: torch.Tensor
) -> Mapping[str, Any]:
    """What all layers are given beside rows.

    Raises:
        DiffersError: when it is not the same, or no rotation by positions.
    """
    given = layers[0].others
    for layer in layers:
        same = layer.others.keys() == given.keys() and all(
            value is given[name] for name, value in layer.others.items()
        )
        if not same or layer.positional:
            raise DiffersError("its layers are not all given the same")
    pair = given.get("position_embeddings")
    if not isinstance(pair, tuple) or len(pair) != 2 or given.get("attention_mask") is not None:
        raise DiffersError("its layers are given no cosines and sines, or masks")
    expected = _cos_sin(base, max(POSITIONS) + 1)
    if not all(is_same(x, y[:, positions[0]]) for x, y in zip(pair, expected, strict=True)):
        raise DiffersError("its cosines and sines are not those of the given positions")
    return given


def _try_layer(number: int, layer: nn.Module, given: Mapping[str, Any]) -> _LayerParts:
    """Raises:
    DiffersError: when it is not attention and a gated MLP with norms before them.
    """
    where = f"layer {number}"
    kinds: dict[str, list[str]] = {"attention": [], "mlp": [], "norm": [], "other": []}
    for name, module in layer._modules.items():
        kinds[_kind(module)].append(name)
    others = [name for name in kinds["other"] if _has_numbers(layer._modules[name])]
    counts = {kind: len(kinds[kind]) for kind in _PARTS}
    for kind, (count, what) in _PARTS.items():
        if counts[kind] != count:
            raise DiffersError(f"{where} has {counts[kind]} of the expected {count} {what}")
    if has_own_numbers(layer) or others:
        raise DiffersError(f"{where} has further parts: {', '.join(others) or 'its own numbers'}")
    (attention,), (mlp,) = kinds["attention"], kinds["mlp"]
    plain = layer.get_submodule(attention)
    assert isinstance(plain, PlainAttention)
    size = plain.qkv_proj.in_features
    attended, ran = _Given(size, 0, pair=True), _Given(size, 1)
    normed = {name: _Given(size, phase) for phase, name in enumerate(kinds["norm"], 2)}
    hidden = rows(size, 0.5)
    tried = _with(layer, {attention: attended, mlp: ran, **normed})
    try:
        with torch.inference_mode():
            found = tried(hidden.clone(), **given)
    except _RAISED as error:
        raise DiffersError(f"{where} cannot be tried ({type(error).__name__})") from None
    between = hidden + attended.rows
    for norm, mlp_norm in (kinds["norm"], kinds["norm"][::-1]):
        seen = [normed[norm], attended, normed[mlp_norm], ran]
        expected = [hidden, normed[norm].rows, between, normed[mlp_norm].rows]
        chained = all(is_same(one.seen, x) for one, x in zip(seen, expected, strict=True))
        rotates = attended.others.get("position_embeddings") is given["position_embeddings"]
        passes = attended.others.get("atom") is given["atom"] and not ran.others
        if chained and rotates and passes and is_same(_first(found), between + ran.rows):
            return _LayerParts(norm, attention, mlp_norm, mlp)
    raise DiffersError(f"{where} does more than add attention and MLP of norms to its input")


def _kind(module: nn.Module | None) -> str:
    if isinstance(module, PlainAttention):
        return "attention"
    if isinstance(module, GatedMLP):
        return "mlp"
    return "norm" if type(module) is RMSNorm else "other"


def _table(base: PreTrainedModel, context: LayerContext) -> torch.Tensor:
    """[positions, d] float32, cosines then sines."""
    if context.device.type == "meta":
        size = _cos_sin(base, 1)[0].shape[-1]
        return torch.empty(context.max_model_len, size, device=context.device)
    cos, sin = _cos_sin(base, context.max_model_len)
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), -1).to(context.device)


def _cos_sin(base: PreTrainedModel, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the first positions, [1, count, d] each.

    Raises:
        DiffersError: when they depend on more.
    """
    try:
        rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]] = base.get_submodule("rotary_emb")
        with torch.inference_mode():
            cos, sin = rotary(torch.zeros(1, count, 1), position_ids=torch.arange(count)[None])
    except _RAISED:
        raise DiffersError("its cosines and sines depend on more than positions") from None
    return cos, sin


class _Given(nn.Module):
    """In the place of a module: returns rows of its own, and keeps what it is given. What is
    written into either later changes neither.

    Args:
        phase: gives each its own rows.
        pair: whether something comes with the rows.
    """

    def __init__(self, columns: int, phase: int, pair: bool = False) -> None:
        super().__init__()
        self.rows = rows(columns, 0.1 * phase)
        self.seen: torch.Tensor | None = None
        self.count = 0
        self.positional: tuple[Any, ...] = ()
        self.others: dict[str, Any] = {}
        self._pair = pair

    def forward(self, *args: Any, **others: Any) -> Any:
        self.count += 1
        x = args[0] if args else others.pop("hidden_states", None)
        self.seen = x.clone() if isinstance(x, torch.Tensor) else None
        self.positional, self.others = args[1:], others
        returned = self.rows.clone()
        return (returned, None) if self._pair else returned


@contextlib.contextmanager
def _ours_raise(root: nn.Module) -> Iterator[None]:
    """In here modules of ours raise, which kernels would not where there is no memory: what calls
    one by another way than its parent's name for it is not tried.
    """
    ours = [module for module in root.modules() if isinstance(module, _OURS)]
    for module in ours:
        module.forward = _not_replaced  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in ours:
            del module.forward


def _not_replaced(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("a module of ours was called in a try")


class _Nothing:
    """Attention that nobody may call."""

    def attend(self, *_: Any) -> torch.Tensor:
        raise RuntimeError("attention outside of layers")


def _with(module: nn.Module, children: Mapping[str, nn.Module]) -> Any:
    """A shallow copy with other children."""
    tried = copy.copy(module)
    tried._modules = {**module._modules, **children}
    return tried


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _has_numbers(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in (*module.parameters(), *module.buffers()))


def _is_loaded(module: nn.Module | None) -> bool:
    """Whether a checkpoint has numbers of a module."""
    return module is not None and bool(module.state_dict())
