"""From hidden states to one vector, as sentence-transformers' files of a checkpoint say.

Source: its `modules.json`, `sentence_bert_config.json`, `1_Pooling/config.json`,
`2_Dense/config.json` and `config_sentence_transformers.json`, of all versions up to 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from atom.config import ConfigError
from atom.model_loader.pooling_task import Module, read_modules
from atom.models.config.file import is_there, read_json_object

# In the order in which several are put side by side, by their names in the files of version 5.
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SIZES = ("word_embedding_dimension", "embedding_dimension")
_ACTIVATIONS: Mapping[str, Literal["identity", "tanh"]] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
}
# Of config_sentence_transformers.json: what there is of some fields.
_STATED = {
    "similarity_fn_name": ("cosine", "dot"),
    "model_type": ("SentenceTransformer", "CrossEncoder"),
}
_CHAIN_FIELDS = ("transformer_task", "modality_config", "module_output_name")
# What the first module does, what it reads of the model's answer, and what it calls that.
_TASKS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
}


@dataclass(frozen=True)
class Dense:
    """A linear layer behind the pooling, and what it ends with."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: Literal["identity", "tanh"]


@dataclass(frozen=True)
class Normalize:
    """A vector is divided by its length."""


@dataclass(frozen=True)
class TextOptions:
    """What becomes of a text before it is tokenised.

    Attributes:
        max_seq_length: in tokens; None where the files say nothing.
        prompts: texts to put before others, by name.
        default_prompt_name: of the one that is put before a text for which none is named.
        similarity: how two vectors are compared.
        activation: of a score; None where config.json says.
        transformer_task: what the first module does; None in older files.
        model_type: sentence-transformers' class; None in older files.
    """

    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: Literal["cosine", "dot"] = "cosine"
    activation: str | None = None
    transformer_task: str | None = None
    model_type: str | None = None


@dataclass(frozen=True)
class EmbeddingRecipe:
    """Attributes:
    poolings: names of `POOLINGS`.
    steps: what follows the pooling.
    """

    poolings: tuple[str, ...]
    steps: tuple[Dense | Normalize, ...]

    @property
    def is_normalized(self) -> bool:
        return bool(self.steps) and isinstance(self.steps[-1], Normalize)

    @property
    def computed(self) -> tuple[Dense | Normalize, ...]:
        """The steps but the last normalisation."""
        return self.steps[:-1] if self.is_normalized else self.steps


@dataclass(frozen=True)
class LogitScore:
    """A score is the logit of a token, less that of another."""

    true_token_id: int
    false_token_id: int | None


def read_text_options(folder: Path) -> TextOptions:
    """Raises:
    ConfigError: for what is not done here.
    """
    settings: dict[str, Any] = {}
    for path in sorted(folder.glob("sentence_*_config.json")):
        settings = read_json_object(path)
        _check_settings(path, settings)
    path = folder / "config_sentence_transformers.json"
    stated = read_json_object(path) if is_there(path) else {}
    prompts = stated.get("prompts") or {}
    default = stated.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise ConfigError(f"{path}: prompts should be texts by name, got {prompts!r}")
    if default is not None and default not in prompts:
        raise ConfigError(f"{path}: there is no prompt {default!r}, which default_prompt_name says")
    known = ("__version__", "prompts", "default_prompt_name", *_STATED, "activation_fn")
    if unknown := [name for name, value in stated.items() if value and name not in known]:
        raise ConfigError(f"{path}: {', '.join(unknown)} is not done here")
    for name, allowed in _STATED.items():
        if stated.get(name) not in (None, *allowed):
            raise ConfigError(
                f"{path}: {name}={stated[name]!r} is not done here; {' and '.join(allowed)} are"
            )
    return TextOptions(
        settings.get("max_seq_length"),
        bool(settings.get("do_lower_case")),
        prompts,
        default,
        stated.get("similarity_fn_name") or "cosine",
        stated.get("activation_fn"),
        settings.get("transformer_task"),
        stated.get("model_type"),
    )


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    length = settings.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(f"{path}: max_seq_length should be a positive integer, got {length!r}")
    known = ("max_seq_length", "do_lower_case", "unpad_inputs", *_CHAIN_FIELDS)
    if unknown := [name for name, value in settings.items() if value and name not in known]:
        raise ConfigError(f"{path}: {', '.join(unknown)} is not known here")
    if not any(settings.get(name) for name in _CHAIN_FIELDS):
        return
    task, modalities, output = (settings.get(name) for name in _CHAIN_FIELDS)
    text = modalities.get("text") if isinstance(modalities, dict) else None
    read, called = _TASKS.get(str(task), (None, None))
    expected = {"method": "forward", "method_output_name": read}
    if read is None or text != expected or output != called:
        raise ConfigError(
            f"{path}: transformer_task={task!r} with {text!r} of texts as {output!r} is not done "
            f"here"
        )


def read_recipe(folder: Path) -> EmbeddingRecipe:
    """How a model embeds.

    Raises:
        ConfigError: naming the file and what it says that is not done here.
    """
    first, *others = _chain(folder)
    if not others or others[0].kind != "Pooling":
        raise ConfigError(
            f"{folder}: behind {first.kind}, modules.json should have a Pooling, and has "
            f"{others[0].kind if others else 'nothing'}"
        )
    steps = tuple(_read_step(module) for module in others[1:])
    return EmbeddingRecipe(_read_poolings(others[0].folder / "config.json"), steps)


def read_logit_score(folder: Path) -> LogitScore | None:
    """The tokens that tell a score, where the files name them.

    Raises:
        ConfigError: as `read_recipe`.
    """
    _, *others = _chain(folder) or (None,)
    if not others:
        return None
    kinds = [module.kind for module in others]
    if kinds != ["LogitScore"]:
        raise ConfigError(f"{folder}: modules.json has {', '.join(kinds)}, which is not done here")
    path = others[0].folder / "config.json"
    stated = read_json_object(path)
    true, false = stated.get("true_token_id"), stated.get("false_token_id")
    if type(true) is not int or not (false is None or type(false) is int):
        raise ConfigError(f"{path} should have a true_token_id, and a false_token_id or null")
    return LogitScore(true, false)


def _chain(folder: Path) -> tuple[Module, ...]:
    modules = read_modules(folder)
    if modules and (modules[0].kind != "Transformer" or modules[0].folder != folder):
        raise ConfigError(
            f"{folder}: modules.json should begin with a Transformer in the folder itself, and has "
            f"{modules[0].kind} in {modules[0].folder}"
        )
    return modules


def _read_poolings(path: Path) -> tuple[str, ...]:
    stated = read_json_object(path)
    if stated.get("include_prompt") is False:
        raise ConfigError(f"{path}: include_prompt is false, which is not done here")
    mode = stated.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else list(mode or ())
    modes += [name for flag, name in _FLAGS.items() if stated.get(flag)]
    known = {*_FLAGS, *_SIZES, "include_prompt", "pooling_mode"}
    unknown = [name for name, value in stated.items() if value and name not in known]
    unknown += [str(name) for name in modes if name not in POOLINGS]
    if unknown:
        raise ConfigError(f"{path}: {', '.join(unknown)} is not done here")
    if not modes:
        raise ConfigError(f"{path} names no pooling_mode")
    return tuple(name for name in POOLINGS if name in modes)


def _read_step(module: Module) -> Dense | Normalize:
    if module.kind == "Normalize":
        return Normalize()
    if module.kind != "Dense":
        raise ConfigError(f"{module.folder.parent}: the module {module.kind} is not done here")
    path = module.folder / "config.json"
    stated = read_json_object(path)
    activation = _ACTIVATIONS.get(str(stated.get("activation_function")))
    sizes: list[Any] = [stated.get("in_features"), stated.get("out_features")]
    if activation is None:
        raise ConfigError(
            f"{path}: activation_function={stated.get('activation_function')!r} is not done here; "
            f"{' and '.join(_ACTIVATIONS)} are"
        )
    if not all(type(size) is int and 1 <= size <= 1 << 18 for size in sizes):
        raise ConfigError(f"{path}: in_features and out_features should be sizes, got {sizes}")
    known = ("activation_function", "in_features", "out_features", "bias")
    defaults = {"module_input_name": "sentence_embedding", "module_output_name": None}
    for name, value in stated.items():
        if name not in known and value not in (None, defaults.get(name), "sentence_embedding"):
            raise ConfigError(f"{path}: {name}={value!r} is not done here")
    return Dense(module.folder, sizes[0], sizes[1], bool(stated.get("bias", True)), activation)
