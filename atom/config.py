"""The engine's configuration: frozen, validated at construction, plain data.

This file is the only reader of environment variables. Nothing here is found out at run
time; what is (the number of KV blocks, say) lives in objects of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
LOAD_STRATEGIES = ("lazy", "prefetch")
KV_CACHE_DTYPES = ("auto", "bf16", "fp8")
DEVICES = ("auto", "cpu", "cuda")
SPECULATIVE_METHODS = ("eagle3", "mtp", "ngram")
MAX_SPECULATIVE_TOKENS = 15

# Shares of memory when the user names none: of the whole device on a GPU, of the memory
# that is free on a CPU, where other programs live too.
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
DEFAULT_CPU_MEMORY_UTILIZATION = 0.3


class ConfigError(ValueError):
    """An engine option is wrong; the message says what was given and what is expected."""


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how its weights are read.

    Attributes:
        model: folder, `.gguf` file or hub id; None is the embedded model.
        tokenizer: folder or hub id when it differs from the model's.
    """

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    load_format: str = "auto"
    safetensors_load_strategy: str = "lazy"
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("safetensors_load_strategy", self.safetensors_load_strategy, LOAD_STRATEGIES)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)


@dataclass(frozen=True)
class CacheOptions:
    """The paged KV cache.

    Attributes:
        block_size: tokens of a block.
        kv_cache_dtype: how keys and values are stored. `auto` is the model's type; `bf16` rounds
            to bfloat16 on writing; `fp8` is the device's 8-bit float, with a scale per tensor.
            Attention computes in the model's type whatever the storage.
        gpu_memory_utilization: share of the device's memory that the engine may take in all;
            on a CPU the share of the free memory that the KV pool may take.
        kv_cache_memory: bytes of the KV pool; overrides the share.
    """

    block_size: int = 16
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float | None = None
    kv_cache_memory: int | None = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share < 1:
            raise ConfigError(f"gpu_memory_utilization must be between 0 and 1, got {share}")
        if self.kv_cache_memory is not None:
            _at_least("kv_cache_memory", self.kv_cache_memory, 1)


@dataclass(frozen=True)
class SchedulerOptions:
    """How much work one step takes.

    Attributes:
        max_num_batched_tokens: tokens of a step; longer prompts are computed in chunks.
        max_num_seqs: sequences of a step.
        enable_chunked_prefill: when false a prompt is computed in one step or refused.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    enable_chunked_prefill: bool = True

    def __post_init__(self) -> None:
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)


@dataclass(frozen=True)
class GraphOptions:
    """Replaying captured work on a GPU instead of launching each kernel.

    Attributes:
        enforce_eager: capture nothing. On a CPU there is nothing to capture.
        capture_sizes: numbers of sequences to capture, ascending; None takes powers of two up to
            max_num_seqs.
    """

    enforce_eager: bool = False
    capture_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.capture_sizes is None:
            return
        if self.enforce_eager:
            raise ConfigError(
                f"enforce_eager captures no graphs, so cudagraph_capture_sizes="
                f"{_listed(self.capture_sizes)} would have no effect; give one or the other"
            )
        if not self.capture_sizes:
            raise ConfigError(
                "cudagraph_capture_sizes names no size; use enforce_eager to capture nothing"
            )
        for size in self.capture_sizes:
            _at_least("cudagraph_capture_sizes", size, 1)
        if list(self.capture_sizes) != sorted(set(self.capture_sizes)):
            raise ConfigError(
                f"cudagraph_capture_sizes must ascend, got {_listed(self.capture_sizes)}"
            )


@dataclass(frozen=True)
class ParallelOptions:
    """Attributes:
    tensor_parallel_size: ranks of the target; only 1 runs today.
    num_threads: CPU threads of the model; None takes every processor.
    """

    tensor_parallel_size: int = 1
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} is not supported yet; use 1"
            )
        if self.num_threads is not None:
            _at_least("num_threads", self.num_threads, 1)


@dataclass(frozen=True)
class SpeculativeOptions:
    """How drafts are proposed.

    Attributes:
        method: `eagle3` (a draft model), `mtp` (the target's own prediction layers) or `ngram`
            (lookup in the text so far).
        num_speculative_tokens: drafts per step, 1 to 15.
        model: folder or hub id of the draft; for `eagle3` alone.
        ngram_max, ngram_min: longest and shortest suffix to look up, for `ngram` and `lookup`;
            without one the shortest is 1 for `ngram` and 2 beside a draft.
        lookup: what occurred in the text before comes before the draft's own drafts; for
            `eagle3` and `mtp`.
        adaptive: ask for fewer drafts, or none, where more would cost time.
        draft_tensor_parallel_size: ranks of the draft; only 1 runs today.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    ngram_max: int = 4
    ngram_min: int | None = None
    lookup: bool = False
    adaptive: bool = False
    draft_tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        _one_of("method", self.method, SPECULATIVE_METHODS)
        k = self.num_speculative_tokens
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens must be 1 to {MAX_SPECULATIVE_TOKENS}, got {k!r}; leave "
                "the method out to run without speculation"
            )
        if (self.method == "eagle3") != (self.model is not None):
            raise ConfigError(
                "method eagle3 needs a draft model"
                if self.model is None
                else f"method {self.method} takes no draft model, got {self.model!r}"
            )
        _boolean("lookup", self.lookup)
        _boolean("adaptive", self.adaptive)
        if self.lookup and self.method == "ngram":
            raise ConfigError(
                "lookup goes beside a draft (eagle3 or mtp); method ngram is a lookup already"
            )
        _at_least("ngram_min", self.shortest_ngram, 1)
        _at_least("ngram_max", self.ngram_max, self.shortest_ngram)
        if self.draft_tensor_parallel_size != 1:
            raise ConfigError(
                f"draft_tensor_parallel_size={self.draft_tensor_parallel_size} is not supported "
                "yet; use 1"
            )

    @property
    def shortest_ngram(self) -> int:
        """The shortest suffix to look up."""
        if self.ngram_min is not None:
            return self.ngram_min
        return 1 if self.method == "ngram" else 2


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from.

    Attributes:
        speculative: None runs without speculation.
        seed: seeds the generator that draws the seeds of requests without one; None is random.
        max_logprobs: the most alternatives a request may ask for.
    """

    model: ModelOptions
    cache: CacheOptions
    scheduler: SchedulerOptions
    parallel: ParallelOptions
    speculative: SpeculativeOptions | None = None
    graphs: GraphOptions = field(default_factory=GraphOptions)
    device: str = "auto"
    seed: int | None = None
    max_logprobs: int = 20

    def __post_init__(self) -> None:
        _one_of("device", self.device, DEVICES)
        _at_least("max_logprobs", self.max_logprobs, 0)
        if self.scheduler.max_num_batched_tokens < self.scheduler.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.scheduler.max_num_batched_tokens}) must be at "
                f"least max_num_seqs ({self.scheduler.max_num_seqs})"
            )
        sizes = self.graphs.capture_sizes
        if sizes is not None and sizes[-1] > self.scheduler.max_num_seqs:
            raise ConfigError(
                f"cudagraph_capture_sizes={_listed(sizes)}: no step has more than "
                f"max_num_seqs={self.scheduler.max_num_seqs} sequences"
            )


def parse_bytes(text: str | int) -> int:
    """`"1.5GiB"`, `"800MB"`, `"2g"` or plain bytes as a number of bytes.

    Raises:
        ConfigError: when the text is none of these.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?\s*", text.lower())
    if match is None:
        raise ConfigError(f"expected a size such as 2GiB, 800MB or 1000000, got {text!r}")
    number, unit, binary = match.groups()
    power = " kmgt".index(unit) if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def parse_sizes(value: str | Sequence[str | int]) -> tuple[int, ...]:
    """`"1,2,4"`, `["1", "2,4"]` or `[1, 2, 4]` as integers, in the order given.

    Raises:
        ConfigError: when a part is no integer.
    """
    items = [value] if isinstance(value, str) else value
    parts = [part for item in items for part in str(item).split(",")]
    if not all(re.fullmatch(r"\s*-?\d+\s*", part) for part in parts):
        raise ConfigError(f"expected integers such as 1,2,4, got {value!r}")
    return tuple(int(part) for part in parts)


def cache_dir() -> Path:
    """Where converted checkpoints are kept: `$ATOM_CACHE`, else the user's cache folder."""
    if configured := os.environ.get("ATOM_CACHE"):
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "atom"


def api_key_from_environment() -> str | None:
    """`$ATOM_API_KEY`: the server's key when `--api-key` is not given."""
    return os.environ.get("ATOM_API_KEY") or None


def cxx_compiler() -> str | None:
    """`$CXX`: the C++ compiler of the CPU kernels, when the usual names do not find it."""
    return os.environ.get("CXX") or None


def triton_is_interpreted() -> bool:
    """`$TRITON_INTERPRET`, Triton's own variable, which it reads when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def op_override(op: str) -> str | None:
    """`$ATOM_OP_<NAME>`: the implementation that the user wants for one op."""
    return os.environ.get(f"ATOM_OP_{op.upper()}") or None


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")


def _boolean(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")


def _listed(sizes: Sequence[int]) -> str:
    return ",".join(str(size) for size in sizes)
