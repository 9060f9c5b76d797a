"""How the modelling code of transformers attends, found by a dry run."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from atom.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Where the text network is in the base of a model that sees.
LANGUAGE_MODEL = "language_model"
# Names of attention in transformers' tables: with and without masks.
PAGED, PROBED = "atom_paged", "atom_probed"
# Arguments of the attention function that change nothing beside those that are read.
_HARMLESS = {
    "cache",
    "cache_position",
    "dropout",
    "is_causal",
    "layer_idx",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "scaling",
    "sliding_window",
    "use_cache",
}
# A position beyond all windows, whose mask is read.
_FAR = 1 << 20
# Numbers of a tensor that is no buffer.
_LARGE = 1 << 26
_PATCHING = threading.Lock()


class AttentionCall(Protocol):
    """What all attention calls of one forward pass are given as the argument `atom`."""

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """q [1, H, T, d], k [1, Hkv, T, d], v [1, Hkv, T, dv], rotated -> [1, T, H, dv]."""
        ...


@dataclass(frozen=True)
class LayerCall:
    """How a layer calls its attention.

    Attributes:
        scale: of the scores.
        mask: as the modelling code has it.
        others: names of further arguments, which change what is computed.
    """

    scale: float
    mask: torch.Tensor | None
    others: tuple[str, ...]


@dataclass(frozen=True)
class LayerFacts:
    """Attributes:
    module: that calls attention.
    window: in tokens, with the query's own; None for full attention.
    """

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    atom: AttentionCall | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention by transformers' interface."""
    if atom is None:
        raise ConfigError("its layers do not pass arguments on to their attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    unknown = tuple(sorted(k for k in others if others[k] is not None and k not in _HARMLESS))
    call = LayerCall(scale, attention_mask, unknown)
    return atom.attend(module, query, key, value, call), None


def _window_as_mask(q_length: int, kv_length: int, mask_function: Any, **_: Any) -> torch.Tensor:
    """A mask whose numbers are all the window of `mask_function`: 0 for none, -1 if it is neither
    causal nor a window.
    """

    def seen(position: int) -> tuple[int, bool]:
        """How many keys a query sees, and whether they are the last ones."""
        keys = torch.arange(position + 2)
        query = torch.tensor(position)
        zero = torch.tensor(0)
        mask = torch.as_tensor(mask_function(zero, zero, query, keys)).expand(len(keys))
        count = int(mask.sum())
        return count, bool(mask[position + 1 - count : position + 1].all()) and not mask[-1]

    near = [seen(position) for position in (0, 3)]
    far = [seen(position) for position in (_FAR, _FAR - 1, _FAR - 7)]
    window = -1
    if all(last for _, last in near + far):
        counts = [count for count, _ in far]
        if counts == [_FAR + 1, _FAR, _FAR - 6]:
            window = 0
        elif len(set(counts)) == 1 and [count for count, _ in near] == [1, min(4, counts[0])]:
            window = counts[0]
    return torch.full((1, 1, q_length, kv_length), window)


for _name in (PAGED, PROBED):
    ALL_ATTENTION_FUNCTIONS.register(_name, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBED, _window_as_mask)


class _Probe:
    """Notes how layers call attention, and returns nothing of use."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerFacts] = {}

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise ConfigError(f"{type(module).__name__} does not know the number of its layer")
        if layer in self.layers:
            raise ConfigError(f"layer {layer} attends more than once")
        if call.others:
            raise ConfigError(f"its attention takes {', '.join(call.others)}")
        if not getattr(module, "is_causal", True):
            raise ConfigError("its layers attend to tokens behind a token")
        if call.mask is None or call.mask.dim() != 4 or call.mask.is_floating_point():
            raise ConfigError("it makes masks of its own")
        window = int(call.mask.flatten()[0])
        if window < 0 or bool((call.mask != window).any()):
            raise ConfigError(f"layer {layer} attends neither to all tokens nor to a window")
        if q.shape[2] != k.shape[2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
            raise ConfigError(f"layer {layer} has keys of other tokens than its queries")
        self.layers[layer] = LayerFacts(
            module, q.shape[1], k.shape[1], q.shape[3], v.shape[3], call.scale, window or None
        )
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


@torch.inference_mode()
def probe(base: PreTrainedModel) -> list[LayerFacts]:
    """How each layer attends: one dry run, on the meta device if the parameters are there.

    Raises:
        ConfigError: saying what is not honoured.
    """
    call = _Probe()
    config = base.config
    number = int(config.num_hidden_layers)
    device = next(base.parameters()).device
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    config._attn_implementation = PROBED
    with _buffers_on(base, device), _experts_skipped(base):
        positions = torch.arange(2, device=device)[None]
        # With a mask nobody looks at the values of positions.
        try:
            mask = torch.ones_like(ids)
            run(base, call, input_ids=ids, position_ids=positions, attention_mask=mask)
        except NotImplementedError as error:
            told = str(error).splitlines()[0][:100]
            raise ConfigError(f"what it computes depends on values of weights ({told})") from error
    config._attn_implementation = PAGED
    if missing := [str(i) for i in range(number) if i not in call.layers]:
        raise ConfigError(f"layers {', '.join(missing)} of {number} never call attention")
    if len(call.layers) > number:
        raise ConfigError(f"{len(call.layers)} layers call attention, and it has {number}")
    return [call.layers[i] for i in range(number)]


def run(base: PreTrainedModel, call: AttentionCall, **arguments: Any) -> torch.Tensor:
    """The hidden states after the final norm, [1, T, hidden]."""
    out = base(use_cache=False, return_dict=True, atom=call, **arguments)
    hidden: torch.Tensor = out[0]
    return hidden


@contextlib.contextmanager
def _buffers_on(model: nn.Module, device: torch.device) -> Iterator[None]:
    """In here buffers are on the device of the parameters."""
    kept = [(module, dict(module._buffers)) for module in model.modules()]
    for module, buffers in kept:
        for name, buffer in buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    try:
        yield
    finally:
        for module, buffers in kept:
            module._buffers.update(buffers)


@contextlib.contextmanager
def _experts_skipped(model: nn.Module) -> Iterator[None]:
    """In here experts return zeros: which tokens they take cannot be known without values."""
    hooks = []
    for module in model.modules():
        if _has_experts_name(module):
            module.forward = _no_experts
            hooks.append(module)
    try:
        yield
    finally:
        for module in hooks:
            del module.forward


def _no_experts(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros_like(hidden_states)


def is_experts(module: nn.Module) -> bool:
    """Whether a module has the weights of several experts in one parameter."""
    own = module.parameters(recurse=False)
    return _has_experts_name(module) and any(p.dim() == 3 for p in own)


def _has_experts_name(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Experts")


class _LargeOnMeta(TorchFunctionMode):
    """Makes what only parameters are as large as without memory, not even for a moment."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if function is torch.empty and given.get("device") is None:
            shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
            if math.prod(shape) > _LARGE:
                given["device"] = "meta"
        return function(*args, **given)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """In here parameters are made without memory, and buffers with their values; only this
    thread's.
    """
    thread = threading.get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and threading.get_ident() == thread:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    with _PATCHING, _LargeOnMeta():
        register = nn.Module.register_parameter
        nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


class _Hidden(BaseModelOutputWithPast):  # type: ignore[misc]  # transformers is untyped
    """A base model's output that has hidden states alone."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Given(nn.Module):
    """Stands for the base model in front of the head: returns the hidden states it is given."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        return _Hidden(last_hidden_state=inputs_embeds)

    @property
    def decoder(self) -> Given:
        """The part of some base models that some heads call alone."""
        return self


def take_base(model: PreTrainedModel) -> PreTrainedModel:
    """The base of a model with a head, in which `Given` takes its place.

    Raises:
        ConfigError: when it has none.
    """
    name = model.base_model_prefix
    base = model._modules.get(name)
    if base is None:
        raise ConfigError(f"it has no base model named {name!r}")
    model._modules[name] = Given()
    return base


def text_network(base: PreTrainedModel) -> PreTrainedModel:
    """The text network of a base model, which may be all of it.

    Raises:
        ConfigError: when it is nowhere that is known.
    """
    if base.config.get_text_config() is base.config:
        return base
    found: PreTrainedModel | None = base._modules.get(LANGUAGE_MODEL)
    if found is None:
        raise ConfigError(f"its base model has no {LANGUAGE_MODEL}")
    return found


def head_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """[R, hidden] -> [R, vocab], by a model whose base was taken."""
    logits: torch.Tensor = model(inputs_embeds=hidden[None], use_cache=False).logits[0]
    return logits


def decoder_layers(base: nn.Module, facts: Sequence[LayerFacts]) -> list[nn.Module] | None:
    """The list of decoder layers, one for each attention; None if there is none."""
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(facts):
            inside = zip(module, facts, strict=True)
            if all(any(m is fact.module for m in layer.modules()) for layer, fact in inside):
                return list(module)
    return None
