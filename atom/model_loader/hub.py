"""Downloads models and tokenizers from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from atom.config import ConfigError, ModelOptions
from atom.model_loader.gguf.split import split_paths

_TOKENIZER_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# Duplicates of the weights in other formats or layouts.
_IGNORED_PATTERNS = ("original/*", "consolidated*", "onnx/*", "openvino/*", "*/*.safetensors")


def looks_like_path(model: str) -> bool:
    """Whether this can only be a path, not a hub id `name` or `owner/name`."""
    return (
        model.startswith((".", "/", "~"))
        or model.endswith((".gguf", ".safetensors", "/"))
        or model.count("/") > 1
        or "\\" in model
    )


def download(model: str, options: ModelOptions) -> Path:
    """The local folder of a hub repository, downloaded if it is not cached.

    Raises:
        ConfigError: when repository, revision, permission or connection is missing.
    """
    patterns = list(_TOKENIZER_PATTERNS)
    if options.load_format != "dummy":
        patterns.append("*.safetensors")
    return _download(model, options, options.revision, patterns)


def download_gguf(model: str, wanted: str, options: ModelOptions) -> Path:
    """The GGUF file of a hub repository whose name ends in `wanted`, such as `Q4_K_M`, or that lies
    in a folder of this name; the first, if the model is split.

    Raises:
        ConfigError: as `download`, and when there is none or several.
    """
    patterns = [
        pattern
        for name in dict.fromkeys((wanted, wanted.upper(), wanted.lower()))
        for pattern in (f"*{name}.gguf", f"*{name}-*-of-*.gguf", f"*{name}/*.gguf")
    ]
    folder = _download(model, options, options.revision, patterns)
    found = dict.fromkeys(
        split_paths(path)[0]
        for path in sorted(folder.rglob("*.gguf"))
        if any(fnmatchcase(str(path.relative_to(folder)), pattern) for pattern in patterns)
        and "mmproj" not in path.name
    )
    if not found:
        raise ConfigError(f"{model} has no GGUF file whose name ends in {wanted}")
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in found)
        raise ConfigError(f"{model} has several GGUF files for {wanted}: {names}")
    return next(iter(found))


def download_tokenizer(model: str, options: ModelOptions) -> Path:
    """Like `download`, without weights."""
    return _download(model, options, None, list(_TOKENIZER_PATTERNS))


def download_dense(model: str, options: ModelOptions) -> Path:
    """The layers behind the pooling of an embedding model, in folders beside its own weights."""
    return _download(
        model, options, options.revision, ["[0-9]*_Dense/model.safetensors"], ignored=()
    )


def _download(
    model: str,
    options: ModelOptions,
    revision: str | None,
    patterns: list[str],
    ignored: Sequence[str] = _IGNORED_PATTERNS,
) -> Path:
    # Not above: it takes as long to import as a small model to load.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if options.trust_remote_code:
        patterns = [*patterns, "*.py"]
    at = f" at revision {revision}" if revision else ""
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=list(ignored),
        )
    except HFValidationError as error:
        raise ConfigError(f"{model!r} is neither a path nor a hub id: {error}") from error
    except GatedRepoError as error:
        raise ConfigError(f"the hub wants a login or a licence for {model}: {error}") from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ConfigError(
            f"there is no folder {model} here, and no repository {model}{at} on the hub that you "
            f"may read"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"there is no folder {model} here, {model}{at} is not in the hub's local cache, and "
            f"the hub cannot be reached (or is switched off by HF_HUB_OFFLINE)"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot fetch {model}{at} from the hub: {error}") from error
    return Path(folder)
