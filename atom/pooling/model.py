"""The models: transformers' own code for the layers, and what makes one row of their output.

Inputs of a batch are padded at their ends. In a causal model no token sees what is behind it, and
in the others an attention mask hides the padding.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from atom.config import ConfigError, ModelOptions
from atom.model_loader.checkpoint import has_weights, list_adapters, list_tensors
from atom.model_loader.errors import WeightError, name_some
from atom.model_loader.hub import download_dense
from atom.model_loader.safetensors.reader import map_tensor
from atom.model_ops.finite import check_finite
from atom.models.config.file import is_there
from atom.platform import Platform, total_memory_bytes
from atom.pooling.inputs import PoolingInput
from atom.pooling.recipe import Dense, EmbeddingRecipe, LogitScore
from atom.pooling.source import PoolingSource

logger = logging.getLogger(__name__)

_GB = 1e9
# Of a body that the head of the checkpoint does not read.
_UNREAD = "pooler."


class PoolingModel(ABC):
    """Layers and what reads their output.

    Attributes:
        body: the layers, transformers' class.
    """

    body: nn.Module

    @abstractmethod
    def compute(self, batch: Sequence[PoolingInput]) -> list[np.ndarray]:
        """A row [size] in float32 for each input."""

    @property
    def config(self) -> Any:
        return self.body.config

    @property
    def vocab_size(self) -> int:
        """Rows of the token table."""
        table: Any = self.body.get_input_embeddings()  # type: ignore[operator]
        return int(table.num_embeddings)

    @property
    def most_positions(self) -> int | None:
        """Tokens that the model has positions for; None if nothing says."""
        for name, module in self.body.named_modules():
            if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
                padding = module.padding_idx
                # RoBERTa counts from behind the padding's own position.
                return module.num_embeddings - (0 if padding is None else padding + 1)
        stated = getattr(self.config, "max_position_embeddings", None)
        return None if stated is None else int(stated)


class EmbeddingModel(PoolingModel):
    """Hidden states, pooled to one vector, which is not yet normalised: a request decides that.

    Attributes:
        dimension: of the vectors.
    """

    def __init__(self, body: nn.Module, recipe: EmbeddingRecipe, denses: Mapping[Dense, nn.Linear]):
        self.body = body
        self._recipe = recipe
        self._denses = denses
        self.dimension = int(self.config.hidden_size) * len(recipe.poolings)
        for step in recipe.steps:
            if isinstance(step, Dense):
                if step.in_features != self.dimension:
                    raise ConfigError(
                        f"{step.folder}: in_features={step.in_features}, and what comes before it "
                        f"has {self.dimension}"
                    )
                self.dimension = step.out_features

    def compute(self, batch: Sequence[PoolingInput]) -> list[np.ndarray]:
        hidden = _forward(self.body, batch).last_hidden_state
        rows = torch.stack(
            [
                self._pool(states[: len(each.token_ids)].float())
                for states, each in zip(hidden, batch, strict=True)
            ]
        )
        for step in self._recipe.computed:
            if isinstance(step, Dense):
                rows = self._denses[step](rows)
                rows = rows.tanh() if step.activation == "tanh" else rows
            else:
                rows = functional.normalize(rows, dim=-1)
        return list(rows.cpu().numpy())

    def _pool(self, states: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [hidden], several side by side."""
        return torch.cat([_POOLINGS[name](states) for name in self._recipe.poolings])


class ClassifierModel(PoolingModel):
    """A head with one output on the first token, or in a causal model on the last one."""

    def __init__(self, model: nn.Module, is_causal: bool) -> None:
        self._model = model
        self._is_causal = is_causal
        base: Any = model.base_model
        self.body = base

    def compute(self, batch: Sequence[PoolingInput]) -> list[np.ndarray]:
        if not self._is_causal:
            logits = _forward(self._model, batch).logits
        else:
            head: Any = self._model.score
            logits = head(_last_states(self.body, batch))
        return list(logits.float().cpu().numpy())


class TokenScoreModel(PoolingModel):
    """Logits of one or two tokens behind the last one of a language model."""

    def __init__(self, model: nn.Module, tokens: LogitScore) -> None:
        base: Any = model.base_model
        self.body = base
        ids = [tokens.true_token_id]
        ids += [] if tokens.false_token_id is None else [tokens.false_token_id]
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        if max(ids) >= head.weight.shape[0] or min(ids) < 0:
            raise ConfigError(f"the tokens {ids} of a score are outside the vocabulary")
        self._rows = head.weight[ids].detach().clone()

    def compute(self, batch: Sequence[PoolingInput]) -> list[np.ndarray]:
        logits = (_last_states(self.body, batch) @ self._rows.T).float()
        scores = logits[:, :1] - logits[:, 1:] if logits.shape[1] > 1 else logits
        return list(scores.cpu().numpy())


def _weighted_mean(states: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, len(states) + 1, device=states.device, dtype=states.dtype)
    return weights @ states / weights.sum()


_POOLINGS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda states: states[0],
    "max": lambda states: states.amax(0),
    "mean": lambda states: states.mean(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean": _weighted_mean,
    "lasttoken": lambda states: states[-1],
}


def _forward(model: nn.Module, batch: Sequence[PoolingInput]) -> Any:
    """What `model` returns for a batch, padded at the ends of its inputs."""
    lengths = [len(each.token_ids) for each in batch]
    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    config: Any = model.config
    padding = config.pad_token_id or 0
    device = table.weight.device
    shape = (len(batch), max(lengths))
    tokens = torch.full(shape, padding, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.long)
    types = torch.zeros(shape, dtype=torch.long)
    for row, each in enumerate(batch):
        tokens[row, : lengths[row]] = torch.tensor(each.token_ids)
        mask[row, : lengths[row]] = 1
        if each.token_type_ids is not None:
            types[row, : lengths[row]] = torch.tensor(each.token_type_ids)
    kwargs: dict[str, Any] = {}
    if batch[0].token_type_ids is not None:
        kwargs["token_type_ids"] = types.to(device)
    return model(input_ids=tokens.to(device), attention_mask=mask.to(device), **kwargs)


def _last_states(body: nn.Module, batch: Sequence[PoolingInput]) -> torch.Tensor:
    """The last token's hidden state of each input, [B, hidden]."""
    hidden = _forward(body, batch).last_hidden_state
    last = [len(each.token_ids) - 1 for each in batch]
    states: torch.Tensor = hidden[torch.arange(len(batch)), last]
    return states


def load_body(
    factory: Any, source: PoolingSource, options: ModelOptions, dtype: torch.dtype
) -> nn.Module:
    """Load a checkpoint into the class that transformers has for it.

    Args:
        factory: one of transformers' Auto classes.

    Raises:
        ConfigError: when it is no class of transformers, or not of this kind.
        WeightError: for weights that are missing, damaged or not finite.
    """
    if source.raw.get("quantization_config") is not None:
        raise ConfigError(f"{source.path}: models that {source.task} are not read quantised")
    for name in ("attn_implementation", "_attn_implementation"):  # may name code of a hub
        if source.raw.get(name) not in (None, "eager", "sdpa"):
            raise ConfigError(f"{source.path}: {name}={source.raw[name]!r} is not done here")
    if is_there(source.path / "adapter_config.json") or list_adapters(source.path):
        raise ConfigError(f"{source.path} is an adapter; merge it into its model")
    try:
        with _without_bar():
            model, info = factory.from_pretrained(
                source.path,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=options.trust_remote_code,
                output_loading_info=True,
            )
    except Exception as error:  # each class raises its own kinds
        kind = source.raw.get("architectures")
        raise ConfigError(f"{source.path} of architecture {kind}: {error}") from error
    _check_loading(info, source, keeps_pooler=factory.__name__ != "AutoModel")
    for name, parameter in model.named_parameters():
        try:
            check_finite(parameter.data)
        except ValueError as error:
            raise WeightError(f"{source.path}: {name}: {error}") from error
    body: nn.Module = model
    return body


@contextmanager
def _without_bar() -> Iterator[None]:
    """transformers shows a bar for each of its loads."""
    from transformers.utils import logging as loading

    shows = loading.is_progress_bar_enabled()
    loading.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            loading.enable_progress_bar()


def _check_loading(info: Mapping[str, Any], source: PoolingSource, keeps_pooler: bool) -> None:
    missing = [
        name for name in sorted(info["missing_keys"]) if keeps_pooler or not _is_unread(name)
    ]
    if missing:
        raise WeightError(f"{source.path} lacks tensors: {name_some(missing)}")
    if unexpected := sorted(info["unexpected_keys"]):
        logger.info("%s: tensors that nothing reads: %s", source.path, name_some(unexpected))


def _is_unread(name: str) -> bool:
    return name.startswith(_UNREAD) or f".{_UNREAD}" in name


def check_weights(source: PoolingSource, platform: Platform, dtype: torch.dtype) -> None:
    """Check the headers of weight files, and that the weights fit, before anything is read.

    Raises:
        ConfigError: without safetensors files, or without enough memory.
        WeightError: for a damaged file.
    """
    if not has_weights(source.path):
        raise ConfigError(
            f"{source.path} holds no *.safetensors files; weights in pickle files (.bin) can run "
            f"code when they are read: convert them first"
        )
    elements = sum(int(np.prod(tensor.shape)) for tensor in list_tensors(source.path))
    num_bytes, room = elements * dtype.itemsize, total_memory_bytes(platform)
    if num_bytes > room:
        raise ConfigError(
            f"{source.path}: the weights take {num_bytes / _GB:.1f} GB in "
            f"{str(dtype).removeprefix('torch.')}, and the {platform.kind} has {room / _GB:.1f} GB"
        )


def load_denses(
    recipe: EmbeddingRecipe, source: PoolingSource, options: ModelOptions, device: torch.device
) -> dict[Dense, nn.Linear]:
    """The linear layers behind the pooling, in float32.

    Raises:
        WeightError: for tensors that are missing, unexpected or of another shape.
    """
    steps = [step for step in recipe.steps if isinstance(step, Dense)]
    is_of_hub = source.path != Path(source.name).expanduser()
    if is_of_hub and any(not has_weights(step.folder) for step in steps):
        download_dense(source.name, options)
    denses = {}
    for step in steps:
        layer = nn.Linear(step.in_features, step.out_features, step.bias)
        tensors = {tensor.name: tensor for tensor in list_tensors(step.folder)}
        shapes = {f"linear.{name}": p.shape for name, p in layer.named_parameters()}
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != {
            name: tuple(shape) for name, shape in shapes.items()
        }:
            raise WeightError(
                f"{step.folder} should hold {', '.join(f'{n} {[*s]}' for n, s in shapes.items())}"
            )
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(map_tensor(tensors[f"linear.{name}"]))
        denses[step] = layer.to(device).eval()
    return denses
