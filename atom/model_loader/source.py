"""Resolves a model name to a local Hugging Face folder and its configuration."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atom.config import ConfigError, ModelOptions
from atom.environment import cache_dir
from atom.messages import ModelFacts
from atom.model_loader.checkpoint import has_weights, list_tensors, stored_dtype
from atom.model_loader.generation_config import sampling_defaults
from atom.model_loader.gguf.cache import recall, remember, wishes_of
from atom.model_loader.gguf.content import forget_hashed_ahead, hash_ahead
from atom.model_loader.gguf.split import only_file, split_paths
from atom.model_loader.locate import EMBEDDED_MODEL_NAME, embedded_model, locate_model
from atom.model_loader.pooling_task import encoder_hint, pooling_task
from atom.model_loader.quantization import choose_quantization, config_levels
from atom.model_loader.read_files import check_folder
from atom.model_loader.safetensors.reader import CheckpointTensor, map_tensor
from atom.model_loader.tokenizers.end_tokens import end_token_ids
from atom.model_ops.quant.base import QuantConfig, UnquantizedConfig
from atom.models.config.check import check_config, check_layers
from atom.models.config.file import check_regular, is_there, read_json_object
from atom.models.config.hf_configs import built_in_config, is_built_in
from atom.models.config.model_config import ModelConfig
from atom.models.registry import Implementation, choose_implementation
from atom.processors import default_num_threads

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

# Checkpoints that say that their output head is the embedding, and hold another head.

_EMBEDDING = re.compile(r"(?:.*\.)?model\.embed_tokens\.weight")
_HEAD = re.compile(r"(?:.*\.)?lm_head\.weight")
_ROWS_AT_ONCE = 4096


def tie_absent_head(config: PretrainedConfig, folder: Path) -> None:
    """Make a text model's configuration say that its head is the embedding, where that around it
    says so and the files hold no head.

    Raises:
        WeightError: when a weight file is damaged.
    """
    text = config.get_text_config()
    if not config.tie_word_embeddings or text.tie_word_embeddings or not has_weights(folder):
        return
    if _find(_HEAD, list_tensors(folder)) is None:
        text.tie_word_embeddings = True


def untie_different_head(config: PretrainedConfig, folder: Path) -> None:
    """Make `config` say that the head is a weight of its own, where the files hold another one.

    transformers computes the same: it ties only what is absent or equal.

    Args:
        config: of the language model.

    Raises:
        WeightError: when a weight file is damaged.
    """
    if not config.tie_word_embeddings or not has_weights(folder):
        return
    tensors = list_tensors(folder)
    embedding, head = _find(_EMBEDDING, tensors), _find(_HEAD, tensors)
    if embedding is None or head is None or _are_equal(embedding, head):
        return
    logger.warning(
        "%s says tie_word_embeddings, and %s holds other values than %s: the head of the file is "
        "used",
        folder / "config.json",
        head.name,
        embedding.name,
    )
    config.tie_word_embeddings = False


def _find(name: re.Pattern[str], tensors: Sequence[CheckpointTensor]) -> CheckpointTensor | None:
    return next((tensor for tensor in tensors if name.fullmatch(tensor.name)), None)


def _are_equal(a: CheckpointTensor, b: CheckpointTensor) -> bool:
    """By value, some rows at a time."""
    if a.shape != b.shape:
        return False
    rows_of_a, rows_of_b = map_tensor(a), map_tensor(b)
    return all(
        torch.equal(
            rows_of_a[start : start + _ROWS_AT_ONCE].double(),
            rows_of_b[start : start + _ROWS_AT_ONCE].double(),
        )
        for start in range(0, a.shape[0], _ROWS_AT_ONCE)
    )


# A GGUF file has no generation config; this one has the temperature and top_p of the model's card.
_EMBEDDED_CONFIG = Path(__file__).parents[1] / "assets" / "smollm2-135m-instruct"

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    # float64 is pointless on all devices, and float32 suffices for weights.
    "float64": torch.float32,
}


@dataclass(frozen=True)
class ModelSource:
    """Attributes:
    path: local folder in Hugging Face format.
    name: as the user gave it.
    eos_token_ids: tokens that end a generation.
    default_dtype: what `--dtype auto` means for this checkpoint.
    sampling_defaults: `SamplingParams` fields for requests that do not give them.
    quantization: how the weights are stored.
    implementation: what computes the model; None if nothing was chosen.
    """

    path: Path
    name: str
    hf_config: PretrainedConfig
    eos_token_ids: frozenset[int]
    default_dtype: torch.dtype
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    quantization: QuantConfig = field(default_factory=UnquantizedConfig)
    implementation: Implementation | None = None

    @property
    def model_type(self) -> str:
        kind: str = self.hf_config.model_type
        return kind

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            folder=str(self.path),
            name=self.name,
            model_type=self.model_type,
            sampling_defaults=self.sampling_defaults,
            sees=self.implementation is not None and self.implementation.sees,
        )


def resolve_model(options: ModelOptions) -> ModelSource:
    """Find the model: a local folder, a hub repository or the embedded model. Converts GGUF files.

    Raises:
        ConfigError: when there is no such model or it is not supported.
        WeightError: when a GGUF or safetensors file is damaged.
    """
    name = options.model or EMBEDDED_MODEL_NAME
    location = embedded_model() if options.model is None else locate_model(options.model, options)
    _refuse_pooling(location, options)
    gguf = _gguf_file(location, options)
    if gguf is None:
        raw = _read_config(location, options)
        _refuse_unsupported(location, raw, options)
        dtype = default_dtype(location, raw)
        folder = location
    else:
        folder, dtype = from_gguf(gguf, options)
        raw = _read_config(folder, options)
    quantization = choose_quantization(folder, raw, options)
    implementation = _choose_implementation(raw, options)
    config = _load_config(folder, raw, options, implementation)
    _try_implementation(implementation, config, folder)
    text = config.get_text_config()
    if not hasattr(text, "tie_word_embeddings"):  # the whole model's, where it also sees
        text.tie_word_embeddings = config.tie_word_embeddings
    if options.load_format != "dummy":
        tie_absent_head(config, folder)
        untie_different_head(text, folder)
    vocab_size = text.vocab_size
    eos_token_ids = end_token_ids(folder, raw, options, vocab_size)
    defaults = sampling_defaults(_EMBEDDED_CONFIG if options.model is None else folder, options)
    return ModelSource(
        folder,
        name,
        config,
        eos_token_ids,
        dtype,
        defaults,
        quantization,
        implementation,
    )


def _gguf_file(location: Path, options: ModelOptions) -> Path | None:
    """The GGUF file to load; None for a Hugging Face folder with safetensors."""
    wanted = options.load_format
    if location.is_file():
        if wanted == "safetensors":
            raise ConfigError(f"load_format is safetensors, but {location} is a GGUF file")
        return location
    is_hugging_face = is_there(location / "config.json")
    if is_hugging_face and (wanted == "dummy" or (wanted != "gguf" and has_weights(location))):
        return None
    if wanted != "safetensors" and (found := only_file(location)):
        return found
    raise ConfigError(_what_is_missing(location, wanted, is_hugging_face))


def _what_is_missing(location: Path, wanted: str, is_hugging_face: bool) -> str:
    if wanted == "gguf":
        return f"load_format is gguf, but {location} holds no .gguf file"
    if not is_hugging_face:
        return (
            f"{location} holds no config.json, so it is no Hugging Face model folder; if it is a "
            f"hub repository of GGUF files, name one of them, like OWNER/NAME:Q4_K_M"
        )
    pickled = any([*location.glob("*.bin"), *location.glob("*.pt"), *location.glob("*.pth")])
    if pickled:
        return (
            f"{location} holds its weights as pickle files (.bin, .pt, .pth), which can run code "
            f"when they are read; convert them to safetensors first"
        )
    return f"{location} holds no *.safetensors files; --load-format dummy runs without weights"


def from_gguf(path: Path, options: ModelOptions) -> tuple[Path, torch.dtype]:
    """The Hugging Face folder that a file is converted to, and the dtype that `auto` means.

    Raises:
        ConfigError, WeightError: as `resolve_model`.
    """
    check_regular(path)
    cache = cache_dir() / "gguf"
    wishes = wishes_of(options)
    if (known := recall(path, wishes, cache)) is not None:
        return known[0], _DTYPES[known[1]]
    # Reading and converting files takes modules that a start with a converted one does without.
    from atom.model_loader.gguf.convert import converted_folder
    from atom.model_loader.gguf.file import read_gguf
    from atom.model_loader.gguf.tensors import automatic_dtype, has_blocks

    hash_ahead(split_paths(path), cache, default_num_threads())
    try:
        file = read_gguf(path)
        automatic = automatic_dtype(file)
        dtype = automatic if options.dtype == "auto" else _DTYPES[options.dtype]
        folder = converted_folder(
            file,
            dtype,
            with_tokenizer=options.tokenizer is None,
            keeps_blocks=options.quantization == "auto" and has_blocks(file),
        )
    finally:
        forget_hashed_ahead()
    remember(file.identity, wishes, cache, folder, str(automatic).removeprefix("torch."))
    return folder, automatic


def _read_config(folder: Path, options: ModelOptions) -> dict[str, Any]:
    """The content of config.json, checked together with the folder's other files."""
    check_folder(folder)
    path = folder / "config.json"
    raw = read_json_object(path)
    try:
        _choose_implementation(raw, options)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}{encoder_hint(raw)}") from None
    check_config(raw, f"{path} of type {raw.get('model_type')}")
    return raw


def _choose_implementation(raw: dict[str, Any], options: ModelOptions) -> Implementation:
    return choose_implementation(
        raw.get("architectures"), raw.get("model_type"), options.model_impl
    )


def _try_implementation(
    implementation: Implementation, config: PretrainedConfig, folder: Path
) -> None:
    """Try a small copy of what transformers' code is to compute."""
    if implementation.kind != "transformers":
        return
    import transformers

    from atom.models.transformers.check import check_model

    try:
        check_model(getattr(transformers, implementation.name), config, folder)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from None


def _refuse_pooling(folder: Path, options: ModelOptions) -> None:
    """Refuse to generate with what embeds or scores."""
    if (task := pooling_task(folder, options)) is not None:
        raise ConfigError(
            f"{folder} is a model to {task} texts, which the server and LLM run; here it would "
            f"generate. task generate (--task) does so, if it can"
        )
    if options.is_matryoshka:
        raise ConfigError(f"is_matryoshka is of embedding models, and {folder} generates text")


def _refuse_unsupported(folder: Path, raw: dict[str, Any], options: ModelOptions) -> None:
    model_type = raw.get("model_type")
    if "auto_map" not in raw or options.trust_remote_code or is_built_in(model_type):
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"{folder} is of type {model_type!r}, which transformers does not know, and brings "
            f"its own code; --trust-remote-code runs that code, if you trust it"
        )


def _load_config(
    folder: Path, raw: dict[str, Any], options: ModelOptions, implementation: Implementation
) -> PretrainedConfig:
    path, kind = folder / "config.json", raw.get("model_type", "(none)")
    try:
        if implementation.kind == "atom" and is_built_in(raw.get("model_type")):
            config = built_in_config(raw)
        else:
            config = _auto_config(folder, options)
        complete, text_config = config.to_dict(), config.get_text_config()
    except Exception as error:  # each configuration class raises its own kinds
        raise ConfigError(f"{path} of type {kind}: {error}") from error
    if not _is_config(text_config) or not isinstance(raw.get("text_config", {}), dict):
        raise ConfigError(f"{path}: text_config={raw.get('text_config')!r} is none of {kind}")
    check_config(complete, f"{path} of type {kind}")
    check_layers(text_config.to_dict(), f"{path} of type {kind}")
    return config


def _is_config(value: object) -> bool:
    if isinstance(value, ModelConfig):
        return True
    from transformers import PretrainedConfig

    return isinstance(value, PretrainedConfig)


def _auto_config(folder: Path, options: ModelOptions) -> PretrainedConfig:
    # Imports torch's compiler, so only for what needs it.
    from transformers import AutoConfig, DeepseekV3Config

    class KimiK2Config(DeepseekV3Config):  # type: ignore[misc]  # transformers is untyped
        model_type = "kimi_k2"

    AutoConfig.register(KimiK2Config.model_type, KimiK2Config, exist_ok=True)
    return AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)


def default_dtype(folder: Path, raw: Mapping[str, Any]) -> torch.dtype:
    """What `--dtype auto` means: the configuration's, else the one of most weights."""
    for level in config_levels(raw):
        stated = level.get("dtype") or level.get("torch_dtype")
        if stated is not None:
            break
    else:
        stated = stored_dtype(folder) or "float32"
    if not isinstance(stated, str) or stated not in _DTYPES:
        raise ConfigError(f"{folder} is stored as {stated}; supported are {', '.join(_DTYPES)}")
    return _DTYPES[stated]
