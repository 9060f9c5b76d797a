"""How the inputs of a product with quantised weights are rounded: `--activations`."""

from __future__ import annotations

from dataclasses import replace

from atom.config import ConfigError
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.quant.storage import MatrixStorage
from atom.model_ops.quant.weights import Activations, QuantWeights, WeightFormat
from atom.model_ops.registry import OpChoice, OpUnavailableError

_GROUP = 32
_OF_QUANTISED = {
    "linear": "quant_linear",
    "logits": "quant_logits",
    "moe_experts": "quant_experts",
}
_INTEGERS = ("int4", "int6", "int8")


def resolve_product(
    op: str,
    form: WeightFormat | None,
    context: LayerContext,
    down: WeightFormat | None = None,
    /,
    **shape: int,
) -> OpChoice:
    """The choice for `op`, or for that of weights which are quantised to `form`.

    Its query has the format with the inputs as they are rounded. `auto` rounds them on a CPU
    where integer weights are multiplied as integers then: to 15 bits, those of int4 to 12. One
    scale per token is enough then to lose nothing.

    Args:
        down: that of experts' second matrices where it is another one.
        shape: as the op has it.

    Raises:
        ConfigError: when `context.activations` cannot be honoured.
        OpUnavailableError: when no implementation runs.
    """
    ops, dtype, wanted = context.ops, context.dtype, context.activations
    if form is None:
        return ops.resolve_weights(op, dtype, None, **shape)
    op = _OF_QUANTISED[op]
    forms = [form] if down is None else [form, down]
    if wanted == "int8":
        forms = [_with_int8(each, ops.platform.kind) for each in forms]
    elif wanted == "float":
        for each in forms:
            _check_float(each)
    elif wanted == "auto" and ops.platform.kind == "cpu" and all(map(_is_weight_only, forms)):
        rounded = [replace(each, activations=wide_inputs(each)) for each in forms]
        if _keeps_codes(op, rounded, context, **shape):
            forms = rounded
    return ops.resolve_weights(op, dtype, *forms, **shape)


def take_weights(storage: MatrixStorage, choice: OpChoice, is_down: bool = False) -> QuantWeights:
    """The converted weights of a layer, with the inputs of the choice that was made for it.

    Args:
        is_down: whether they are experts' second matrices.
    """
    weights = storage.take()
    query = choice.query
    form = (query.down_weights if is_down else None) or query.weights
    assert form is not None
    return replace(weights, format=replace(weights.format, activations=form.activations))


def int8_inputs(form: WeightFormat) -> WeightFormat:
    """Weights of integers with inputs in int8, 32 of which share a scale: one scale for all inputs
    of a token costs ten times as much likelihood.
    """
    return replace(form, activations=Activations("int8", _GROUP))


def wide_inputs(form: WeightFormat) -> Activations:
    """What `auto` rounds inputs to."""
    return Activations("int12" if form.codes == "int4" else "int16")


def _keeps_codes(
    op: str, forms: list[WeightFormat], context: LayerContext, /, **shape: int
) -> bool:
    """Whether such weights would be multiplied as they are stored."""
    try:
        return not context.ops.consider(op, context.dtype, *forms, **shape).dequantises
    except OpUnavailableError:  # with --batch-invariant, say
        return False


def _check_float(form: WeightFormat) -> None:
    if form.activations is not None:
        raise ConfigError(
            f"the checkpoint says that its inputs are rounded to {form.activations}; leave "
            f"--activations float out"
        )


def _is_weight_only(form: WeightFormat) -> bool:
    return form.activations is None and form.codes in _INTEGERS


def _with_int8(form: WeightFormat, platform: str) -> WeightFormat:
    if form.activations is not None and form.activations.codes == "int8":
        return form
    if not _is_weight_only(form):
        raise ConfigError(f"weights in {form} are not multiplied with int8 inputs")
    if platform != "cpu":
        raise ConfigError(
            f"inputs of weights in {form} are rounded to int8 on a CPU only, not on {platform}; "
            f"leave --activations int8 out"
        )
    return int8_inputs(form)
