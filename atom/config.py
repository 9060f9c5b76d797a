"""The engine's configuration: frozen, validated at construction, plain data.

Each option is one field: command line flags, the keyword arguments of `LLM`, JSON and help follow
from it (`atom.options.fields`). Nothing here is found out at run time; what is (the number of KV
blocks, say) lives in objects of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atom.options.fields import ConfigError as ConfigError
from atom.options.fields import Options, check_at_least, option
from atom.options.parallel import ParallelOptions as ParallelOptions
from atom.options.quantizations import QUANTIZATIONS, STORED_QUANTIZATIONS
from atom.options.speculative import AUX_LAYER_CONVENTIONS as AUX_LAYER_CONVENTIONS
from atom.options.speculative import SpeculativeOptions as SpeculativeOptions
from atom.options.speculative import without_foreign_keys

DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_SPELLINGS = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}
TASKS = ("auto", "generate", "embed", "score")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
MODEL_IMPLS = ("auto", "atom", "transformers")
LOAD_STRATEGIES = ("lazy", "prefetch")
CANARIES = ("log", "raise")
KV_CACHE_DTYPES = ("auto", "bf16", "fp8")
STATE_DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
ACTIVATIONS = ("auto", "int8", "float")
DEFAULT_MAX_LOGPROBS = 20
DEFAULT_MAX_IMAGES = 999

# Shares of memory when the user names none: of the whole device on a GPU, of the memory
# that is free on a CPU, where other programs live too.
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
DEFAULT_CPU_MEMORY_UTILIZATION = 0.3
DEFAULT_STATE_SLOTS = 32


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


def parse_count(text: str | int) -> int:
    """`"4096"`, `"8k"` (8000), `"8K"` (8192), `"1m"` or a number as an integer.

    Raises:
        ConfigError: when the text is none of these.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmM]?)\s*", text)
    if match is None or ("." in match[1] and not match[2]):
        raise ConfigError(f"expected a number such as 4096, 8k (8000) or 8K (8192), got {text!r}")
    unit = {"": 1, "k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}[match[2]]
    return int(float(match[1]) * unit)


def parse_sizes(value: str | Sequence[str | int]) -> tuple[int, ...]:
    """`"1,2,4"`, `"[1,2,4]"`, `["1", "2,4"]` or `[1, 2, 4]` as integers, in the order given.

    Raises:
        ConfigError: when a part is no integer.
    """
    items = [value] if isinstance(value, str) else value
    parts = [part for item in items for part in str(item).strip(" []").split(",")]
    if not all(re.fullmatch(r"\s*-?\d+\s*", part) for part in parts):
        raise ConfigError(f"expected integers such as 1,2,4, got {value!r}")
    return tuple(int(part) for part in parts)


def parse_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """`"a"` or `["a", "b"]` as names, in the order given.

    Raises:
        ConfigError: when one is no text, or empty.
    """
    names = (value,) if isinstance(value, str) else tuple(value)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"expected names such as model.layers.0.mlp, got {value!r}")
    return names


def check_pattern(name: str, pattern: str) -> None:
    """Raises:
    ConfigError: when what follows `re:` is no regular expression.
    """
    try:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except re.error as error:
        raise ConfigError(f"{name}: {pattern} is no regular expression: {error}") from error


def parse_object(value: str | Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object, as text or as what it stands for.

    Raises:
        ConfigError: when it is neither.
    """
    try:
        content = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ConfigError(f"expected a JSON object, got {value!r}: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"expected a JSON object, got {value!r}")
    return dict(content)


def parse_mm_limits(value: str | Mapping[str, Any]) -> dict[str, int]:
    """`"image=4,video=1"`, or a JSON object such as `{"image": 4}` or `{"image": {"count": 4}}`.

    Raises:
        ConfigError: for anything else, and for kinds of input that nothing reads.
    """
    given: Mapping[str, Any]
    if isinstance(value, str) and "=" in value and "{" not in value:
        given = dict(part.strip().split("=", 1) for part in value.split(",") if "=" in part)
    else:
        given = parse_object(value)
    limits = {}
    for kind, limit in given.items():
        count = limit.get("count") if isinstance(limit, Mapping) and len(limit) == 1 else limit
        if isinstance(count, str) and count.isdecimal():
            count = int(count)
        if type(count) is not int or count < 0:
            raise ConfigError(
                f"limit_mm_per_prompt: expected a number such as image=4, got {kind}={limit!r}"
            )
        if kind not in ("image", "video") and count:
            raise ConfigError(
                f"limit_mm_per_prompt: {kind}={count}, and only images and videos are read"
            )
        limits[kind] = count
    return limits


@dataclass(frozen=True)
class ModelOptions(Options):
    """Which model, and how its weights are read."""

    model: str | None = option(
        None, "folder, .gguf file or hub id; the embedded model when omitted"
    )
    task: str = option(
        "auto",
        "what the model does: generate text, embed texts or score pairs of them; auto is what its "
        "files say",
        choices=TASKS,
        spellings={"embedding": "embed", "classify": "score"},
    )
    tokenizer: str | None = option(None, "tokenizer folder or hub id, when not the model's own")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    trust_remote_code: bool = option(False, "run code that the checkpoint carries")
    model_impl: str = option(
        "auto",
        "whose code computes the model: atom, transformers (any causal language model that it has, "
        "after a try with a small copy; slower), or auto: atom where it has the architecture",
        choices=MODEL_IMPLS,
        nearest={"vllm": "atom", "hf": "transformers"},
    )
    dtype: str = option(
        "auto", "type of weights and activations", choices=DTYPES, spellings=DTYPE_SPELLINGS
    )
    load_format: str = option(
        "auto",
        "how the weights are stored",
        choices=LOAD_FORMATS,
        nearest={"fastsafetensors": "safetensors"},
    )
    quantization: str = option(
        "auto",
        "auto: weights as they are stored; none: those of a GGUF file in --dtype; others: quantise "
        "the weights of a floating-point checkpoint, or of a GGUF file, when they are loaded",
        short="-q",
        choices=QUANTIZATIONS,
        nearest=dict.fromkeys(STORED_QUANTIZATIONS, "auto"),
    )
    activations: str = option(
        "auto",
        "inputs of products with quantised integer weights, where the checkpoint does not round "
        "them: int8 (CPUs only) or float; auto rounds them where a CPU has kernels for it",
        choices=ACTIVATIONS,
    )
    quantization_ignore: tuple[str, ...] | None = option(
        None,
        "modules that --quantization leaves as they are: names or globs, which stand for all "
        "modules below them, too, or re: and a regular expression that matches from the start",
        parse=parse_names,
    )
    safetensors_load_strategy: str = option(
        "lazy", "map weights lazily, or read files ahead", choices=LOAD_STRATEGIES
    )
    max_model_len: int | None = option(
        None,
        "context length, such as 4096, 8k (8000) or 8K (8192); the model's own when omitted",
        parse=parse_count,
        at_least=2,
    )
    limit_mm_per_prompt: dict[str, int] | None = option(  # noqa: RUF009
        None,
        "most images and videos of a prompt, such as image=4,video=1 or '{\"image\": 4}'; with "
        "image=0 the model is loaded without what reads them, if videos are not named",
        parse=parse_mm_limits,
    )
    is_matryoshka: bool = option(
        False,
        "the vectors of an embedding model may be cut (dimensions of requests), although its "
        "config.json does not say so",
    )
    generation_config: str = option(
        "auto",
        "where sampling parameters come from that requests leave out: auto (the model's "
        "generation_config.json), none, or a folder with such a file",
    )
    override_generation_config: dict[str, Any] | None = option(  # noqa: RUF009
        None,
        "sampling parameters beside or instead of those, such as '{\"temperature\": 0.6}'",
        parse=parse_object,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantization_ignore is None:
            return
        if not self.quantises:
            raise ConfigError("quantization_ignore has no effect without quantization")
        for pattern in self.quantization_ignore:
            check_pattern("quantization_ignore", pattern)

    @property
    def max_images(self) -> int:
        """Most images of a prompt."""
        return (self.limit_mm_per_prompt or {}).get("image", DEFAULT_MAX_IMAGES)

    @property
    def max_videos(self) -> int:
        """Most videos of a prompt, where the model reads any."""
        unnamed = DEFAULT_MAX_IMAGES if self.max_images else 0
        return (self.limit_mm_per_prompt or {}).get("video", unnamed)

    @property
    def reads_images(self) -> bool:
        """Whether what reads images and videos is loaded."""
        return self.max_images > 0 or self.max_videos > 0

    @property
    def quantises(self) -> bool:
        """Whether `quantization` names a format."""
        return self.quantization not in ("auto", "none")


@dataclass(frozen=True)
class CacheOptions(Options):
    """The paged KV cache.

    Attention computes in the model's type whatever `kv_cache_dtype` is; `fp8` is the device's
    8-bit float with a scale per tensor. `kv_cache_memory` (bytes) overrides
    `gpu_memory_utilization`.
    """

    block_size: int = option(16, "tokens of a KV block", at_least=1, on_gpu=64)
    kv_cache_dtype: str = option(
        "auto",
        "how keys and values are stored: as the model computes, in bfloat16, or in 8 bits, which "
        "take half of bfloat16's memory",
        choices=KV_CACHE_DTYPES,
        spellings={"bfloat16": "bf16", "fp8_e4m3": "fp8"},
    )
    gpu_memory_utilization: float | None = option(
        None,
        f"share of the GPU's memory to use ({DEFAULT_GPU_MEMORY_UTILIZATION}); on a CPU the "
        f"share of free memory for the KV cache ({DEFAULT_CPU_MEMORY_UTILIZATION})",
    )
    kv_cache_memory: int | None = option(
        None, "size of the KV cache, such as 2GiB", parse=parse_bytes, at_least=1
    )
    mm_cache_memory: int = option(
        256 << 20,
        "memory for what the encoder made of images, such as 512MiB; equal images are encoded once "
        "as long as they are kept",
        parse=parse_bytes,
        at_least=0,
        on_gpu=2 << 30,
    )
    enable_prefix_caching: bool = option(True, "reuse the KV cache of shared prefixes")
    mamba_ssm_cache_dtype: str = option(
        "float32",
        "type of the matrices that hybrid models keep as recurrent states; bfloat16 takes half of "
        "the memory and rounds them after every token",
        choices=STATE_DTYPES,
        spellings={"auto": "float32", "bf16": "bfloat16", "fp32": "float32"},
    )
    state_slots: int | None = option(
        None,
        f"recurrent states of hybrid models that are kept for prefix caching "
        f"({DEFAULT_STATE_SLOTS}); each takes what a sequence without drafts does",
        at_least=0,
    )
    debug_kv_canary: str | None = option(
        None,
        "check at random places that sequences read the KV that was written for them; a wrong read "
        "is logged, or ends the engine (raise). For finding defects: steps become slower",
        choices=CANARIES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share < 1:
            raise ConfigError(f"gpu_memory_utilization must be between 0 and 1, got {share}")


@dataclass(frozen=True)
class SchedulerOptions(Options):
    """How much work one step takes.

    Prompts longer than a step are computed in chunks, or refused without
    `enable_chunked_prefill`.
    """

    max_num_batched_tokens: int = option(
        2048, "tokens computed in one step", at_least=1, on_gpu=8192
    )
    max_num_seqs: int = option(64, "sequences computed in one step", at_least=1, on_gpu=256)
    enable_chunked_prefill: bool = option(True, "compute long prompts in several steps")
    long_prefill_token_threshold: int = option(
        0, "most tokens of one prompt in a step, so that others share it (0: all)", at_least=0
    )
    overlap: bool | None = option(
        None,
        "launch each step before the results of the one before it are read (by default on GPUs, "
        "unless engines share experts)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} cuts prompts, "
                f"and chunked prefill is off; give one or the other"
            )


@dataclass(frozen=True)
class GraphOptions(Options):
    """Replaying captured work instead of launching each kernel.

    `capture_sizes` ascend.
    """

    enforce_eager: bool = option(
        False, "capture no CUDA or HIP graphs, and record no steps on a CPU: run op by op"
    )
    capture_sizes: tuple[int, ...] | None = option(
        None,
        "numbers of sequences to capture graphs for, such as 1,2,4; 1, 2, 4, 8, 16, 24, 32, 48, "
        "... up to --max-num-seqs when omitted",
        name="cudagraph_capture_sizes",
        parse=parse_sizes,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
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
            check_at_least("cudagraph_capture_sizes", size, 1)
        if list(self.capture_sizes) != sorted(set(self.capture_sizes)):
            raise ConfigError(
                f"cudagraph_capture_sizes must ascend, got {_listed(self.capture_sizes)}"
            )


@dataclass(frozen=True)
class EngineConfig(Options):
    """Everything an engine is built from; without `speculative` it makes no drafts."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    speculative: SpeculativeOptions | None = option(  # noqa: RUF009
        None,
        "the speculation options as one JSON object, instead of the flags",
        name="speculative_config",
        parse=without_foreign_keys,
    )
    graphs: GraphOptions = field(default_factory=GraphOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    device: str = option("auto", "where to run", choices=DEVICES)
    seed: int | None = option(None, "makes unseeded requests reproducible")
    batch_invariant: bool = option(
        False,
        "a row's bits depend neither on its batch nor on how its sequence was cut into steps: in "
        "bfloat16, too, a request gets the same tokens in any batch, with and without drafts, at "
        "the cost of speed on a GPU (C++ kernels on a CPU are so in any case)",
        alias="enable_deterministic_inference",
    )
    max_logprobs: int = option(
        DEFAULT_MAX_LOGPROBS,
        "most alternatives a request may ask for with logprobs; -1 is the whole vocabulary, and "
        "no memory is kept free for it",
        at_least=-1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
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
        self._check_draft_ranks()
        if self.scheduler.overlap and self.overlap_obstacle is not None:
            raise ConfigError(f"overlap: {self.overlap_obstacle}; leave --overlap out")
        if self.cache.debug_kv_canary is not None and self.synthetic_acceptance_length is not None:
            raise ConfigError(
                "debug_kv_canary: drafts that are accepted at random leave the KV of other tokens "
                "than the answer's; leave --debug-kv-canary or the synthetic acceptance out"
            )

    @property
    def synthetic_acceptance_length(self) -> float | None:
        return None if self.speculative is None else self.speculative.synthetic_acceptance_length

    @property
    def sums_in_order(self) -> bool:
        """Whether sums over the ranks have a fixed order: a library's depends on the shape."""
        return self.parallel.deterministic_collectives or self.batch_invariant

    @property
    def overlap_obstacle(self) -> str | None:
        """Why steps cannot overlap; None if they can."""
        if self.parallel.couples_engines:
            return "engines that share experts meet on the host in the middle of each step"
        return None

    def _check_draft_ranks(self) -> None:
        ranks = self.parallel.tensor_parallel_size
        own = self.speculative and self.speculative.draft_tensor_parallel_size
        if own not in (None, 1, ranks):
            raise ConfigError(
                f"draft_tensor_parallel_size={own} must be 1 or tensor_parallel_size={ranks}"
            )


def _listed(sizes: Sequence[int]) -> str:
    return ",".join(str(size) for size in sizes)
