"""From a checkpoint to a model that embeds or scores, with what writes its inputs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from atom.config import ConfigError, EngineConfig, ModelOptions
from atom.model_engine.rank import DTYPES_BY_NAME
from atom.model_loader.read_files import read_tokenizer
from atom.model_loader.source import default_dtype
from atom.model_loader.tokenizers.tokenizer import locate_tokenizer
from atom.platform import select_platform
from atom.pooling.inputs import (
    InputLimits,
    LockedTokenizer,
    PairEncoder,
    PoolingInput,
    Qwen3Template,
    TextEncoder,
    TwoTexts,
)
from atom.pooling.model import (
    ClassifierModel,
    EmbeddingModel,
    PoolingModel,
    TokenScoreModel,
    check_weights,
    load_body,
    load_denses,
)
from atom.pooling.recipe import (
    LogitScore,
    TextOptions,
    read_logit_score,
    read_recipe,
    read_text_options,
)
from atom.pooling.source import PoolingSource

logger = logging.getLogger(__name__)

_EMBEDS = "feature-extraction"
Activation = Literal["sigmoid", "identity"]
_ACTIVATIONS: dict[object, Activation] = {
    None: "sigmoid",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
}


@dataclass(frozen=True)
class Scoring:
    """How a model scores pairs.

    Attributes:
        pairs: writes them.
        activation: what the model's answer is passed through.
    """

    pairs: PairEncoder
    activation: Activation


@dataclass(frozen=True)
class Embedding:
    """How a model embeds.

    Attributes:
        dimension: of its vectors.
        dimensions: that they may be cut to; None for any, empty for none.
        similarity: how two vectors are compared.
        is_normalized: whether they have length 1, cut ones too, unless a request says otherwise.
    """

    dimension: int
    dimensions: tuple[int, ...] | None
    is_normalized: bool
    similarity: Literal["cosine", "dot"]

    def allows(self, size: int) -> bool:
        """Whether vectors may have so many numbers."""
        if self.dimensions is None:
            return 1 <= size <= self.dimension
        return size in (*self.dimensions, self.dimension)

    @property
    def allowed(self) -> str:
        """What `allows` does, in words."""
        if self.dimensions is None:
            return f"1 to {self.dimension}"
        if self.dimensions:
            return " or ".join(str(size) for size in sorted({*self.dimensions, self.dimension}))
        return (
            f"{self.dimension} alone: its config.json has neither is_matryoshka nor "
            f"matryoshka_dimensions, and the engine was started without --is-matryoshka"
        )


@dataclass(frozen=True)
class LoadedModel:
    """A model, and how it is used: one of `embedding` and `scoring` is None.

    Attributes:
        texts: writes single texts.
        runs_on: device, dtype and class, in words.
    """

    model: PoolingModel
    limits: InputLimits
    texts: TextEncoder
    tokenizer: Any
    embedding: Embedding | None
    scoring: Scoring | None
    runs_on: str


@dataclass(frozen=True)
class _Parts:
    """What a model is loaded with."""

    options: ModelOptions
    source: PoolingSource
    dtype: torch.dtype
    device: torch.device
    tokenizer: Any
    locked: LockedTokenizer
    texts: TextOptions

    def load(self, factory: Any) -> nn.Module:
        """The class that one of transformers' Auto classes finds, on the device."""
        return load_body(factory, self.source, self.options, self.dtype).to(self.device)


@torch.inference_mode()
def load_model(config: EngineConfig, source: PoolingSource) -> LoadedModel:
    """Load and try it.

    Raises:
        ConfigError: for files that say what is not done here, or a context that is too long.
        WeightError: for weights that are missing or damaged.
    """
    options, platform = config.model, select_platform(config.device)
    name = options.dtype
    dtype = default_dtype(source.path, source.raw) if name == "auto" else DTYPES_BY_NAME[name]
    check_weights(source, platform, dtype)
    folder = locate_tokenizer(source.path, options)
    tokenizer = read_tokenizer(folder, options.trust_remote_code)
    parts = _Parts(
        options,
        source,
        dtype,
        torch.device("cuda", 0) if platform.is_gpu else torch.device("cpu"),
        tokenizer,
        LockedTokenizer(tokenizer),
        read_text_options(source.path),
    )
    embedding = scoring = None
    model: PoolingModel
    if source.task == "embed":
        model, embedding = _load_embedding(parts)
    else:
        model, scoring = _load_scorer(parts)
    limits = InputLimits(_max_model_len(parts, model), model.vocab_size)
    _try(model, source)
    device = "GPU" if platform.is_gpu else "CPU"
    number = str(dtype).removeprefix("torch.")
    return LoadedModel(
        model,
        limits,
        TextEncoder(parts.locked, parts.texts, limits),
        parts.tokenizer,
        embedding,
        scoring,
        f"{device}, {number}, transformers' {type(model.body).__name__}",
    )


def _load_embedding(parts: _Parts) -> tuple[PoolingModel, Embedding]:
    from transformers import AutoModel

    texts = parts.texts
    if texts.model_type == "CrossEncoder" or texts.transformer_task not in (None, _EMBEDS):
        raise ConfigError(
            f"{parts.source.path}: a {texts.model_type or 'model'} with a Pooling, whose "
            f"transformer_task is {texts.transformer_task}, is not done here"
        )
    recipe = read_recipe(parts.source.path)
    body = parts.load(AutoModel)
    denses = load_denses(recipe, parts.source, parts.options, parts.device)
    model = EmbeddingModel(body, recipe, denses)
    dimensions = _dimensions(parts.source, model.dimension, parts.options.is_matryoshka)
    return model, Embedding(model.dimension, dimensions, recipe.is_normalized, texts.similarity)


def _load_scorer(parts: _Parts) -> tuple[PoolingModel, Scoring]:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.modeling_layers import GenericForSequenceClassification

    source = parts.source
    if parts.options.is_matryoshka:
        raise ConfigError(f"is_matryoshka is of embedding models, and {source.path} scores pairs")
    tokens = read_logit_score(source.path)
    if tokens is None and "ForCausalLM" in str(source.raw.get("architectures")):
        tokens = _yes_and_no(parts)
    if tokens is not None:
        pairs: PairEncoder = _qwen3_pairs(parts, tokens)
        model = TokenScoreModel(parts.load(AutoModelForCausalLM), tokens)
        return model, Scoring(pairs, _activation(parts))
    whole = parts.load(AutoModelForSequenceClassification)
    config: Any = whole.config
    if config.num_labels != 1:
        raise ConfigError(
            f"{source.path} tells {config.num_labels} classes apart; models with one, which score "
            f"pairs, are served"
        )
    is_causal = isinstance(whole, GenericForSequenceClassification)
    pairs = _qwen3_pairs(parts, None) if is_causal else _two_texts(parts)
    return ClassifierModel(whole, is_causal), Scoring(pairs, _activation(parts))


def _dimensions(source: PoolingSource, most: int, is_told: bool) -> tuple[int, ...] | None:
    """What vectors may be cut to; None for anything."""
    listed = source.raw.get("matryoshka_dimensions")
    if listed is not None:
        path = source.path / "config.json"
        if not isinstance(listed, list) or not all(
            type(size) is int and 1 <= size <= most for size in listed
        ):
            raise ConfigError(f"{path}: matryoshka_dimensions should be sizes up to {most}")
        return tuple(listed)
    return None if is_told or source.raw.get("is_matryoshka") is True else ()


def _yes_and_no(parts: _Parts) -> LogitScore:
    """The tokens by which Qwen3-Reranker answers."""
    ids = [parts.tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    if any(len(tokens) != 1 for tokens in ids):
        raise ConfigError(
            f"{parts.source.path}: yes and no are no tokens of its tokenizer, so it is no "
            f"Qwen3-Reranker"
        )
    return LogitScore(ids[0][0], ids[1][0])


def _qwen3_pairs(parts: _Parts, tokens: LogitScore | None) -> PairEncoder:
    """Of decoders, only Qwen3-Reranker is known to want its pairs written in some way.

    Args:
        tokens: that it answers by; None where it has a head of its own.
    """
    source, texts = parts.source, parts.texts
    if source.model_type != "qwen3" or tokens not in (None, _yes_and_no(parts)):
        raise ConfigError(
            f"{source.path}: how this {source.model_type} model wants pairs written is not known; "
            f"of decoders, Qwen3-Reranker scores pairs here"
        )
    default = texts.default_prompt_name
    return Qwen3Template(parts.tokenizer, None if default is None else texts.prompts[default])


def _two_texts(parts: _Parts) -> PairEncoder:
    if parts.texts.default_prompt_name is not None or parts.texts.do_lower_case:
        raise ConfigError(
            f"{parts.source.path}: a default prompt, or do_lower_case, of a model that scores "
            f"pairs is not done here"
        )
    return TwoTexts(parts.locked)


def _activation(parts: _Parts) -> Activation:
    """That of sentence-transformers' CrossEncoder: a sigmoid unless the files name another."""
    source = parts.source
    section = source.raw.get("sentence_transformers")
    named = section.get("activation_fn") if isinstance(section, dict) else None
    named = parts.texts.activation or named
    named = named or source.raw.get("sbert_ce_default_activation_function")
    if named not in _ACTIVATIONS:
        raise ConfigError(
            f"{source.path}: the activation {named!r} is not done here; Sigmoid and Identity are"
        )
    return _ACTIVATIONS[named]


def _max_model_len(parts: _Parts, model: PoolingModel) -> int:
    """What --max-model-len says, else what the files do."""
    most, wanted = model.most_positions, parts.options.max_model_len
    if wanted is not None:
        if most is not None and wanted > most:
            raise ConfigError(f"max_model_len={wanted}: the model has {most} positions")
        return wanted
    known = [most, parts.texts.max_seq_length]
    # Tokenizers without a limit have one of 1e30.
    if parts.texts.max_seq_length is None and parts.tokenizer.model_max_length < 1e9:
        known.append(parts.tokenizer.model_max_length)
    limits = [limit for limit in known if limit is not None]
    if not limits:
        raise ConfigError("nothing says how many tokens the model takes; give --max-model-len")
    return int(min(limits))


def _try(model: PoolingModel, source: PoolingSource) -> None:
    """Compute two short inputs: what a class cannot do shows at the start."""
    try:
        rows = model.compute([PoolingInput([0, 0, 0]), PoolingInput([0])])
    except Exception as error:
        raise ConfigError(
            f"{source.path}: transformers' {type(model.body).__name__} does not compute what is "
            f"asked of it: {type(error).__name__}: {error}"
        ) from error
    if isinstance(model, EmbeddingModel) and len(rows[0]) != model.dimension:
        raise ConfigError(
            f"{source.path}: transformers' {type(model.body).__name__} gives vectors of "
            f"{len(rows[0])}, and config.json says {model.dimension}"
        )
