"""`EngineArgs`: one dataclass, its command line flags, and the configuration it stands for."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from atom import config as cfg
from atom.model_engine.speculative_args import speculative_options
from atom.model_loader.drafts.shipped import SHIPPED_OPTIONS, shipped_draft_for

JsonObject = dict[str, Any]


def _arg(default: Any, help_text: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **extra})


def add_no_speculation(parser: argparse.ArgumentParser) -> None:
    """Add the flag that turns the shipped draft off, for `EngineArgs.choose_draft`."""
    parser.add_argument(
        "--no-speculation",
        action="store_true",
        help="do not use the draft that comes with the package, where there is one for the model",
    )


def add_show_ops(parser: argparse.ArgumentParser) -> None:
    """Add the flag that shows which kernels would run, for `show_ops.describe_ops`."""
    parser.add_argument(
        "--show-ops",
        "--show_ops",
        action="store_true",
        help="load the model, print which implementation runs each operation and why no better "
        "one does, and exit",
    )


def _is_speculative(name: str) -> bool:
    return name in ("method", "draft_model", "num_speculative_tokens") or name.startswith(
        ("ngram_", "speculative_")
    )


@dataclass(frozen=True)
class EngineArgs:
    """Every engine option. `LLM(**kwargs)` and the command line take exactly these."""

    model: str | None = _arg(None, "folder, .gguf file or hub id; the embedded model when omitted")
    tokenizer: str | None = _arg(None, "tokenizer folder or hub id, when not the model's own")
    revision: str | None = _arg(None, "branch, tag or commit on the hub")
    trust_remote_code: bool = _arg(False, "run code that the checkpoint carries")
    dtype: str = _arg("auto", "type of weights and activations", choices=cfg.DTYPES)
    load_format: str = _arg("auto", "how the weights are stored", choices=cfg.LOAD_FORMATS)
    safetensors_load_strategy: str = _arg(
        "lazy", "map weights lazily, or read files ahead", choices=cfg.LOAD_STRATEGIES
    )
    max_model_len: int | None = _arg(None, "context length; the model's own when omitted", type=int)
    block_size: int = _arg(16, "tokens of a KV block")
    kv_cache_dtype: str = _arg(
        "auto",
        "how keys and values are stored: as the model computes, in bfloat16, or in 8 bits, which "
        "take half of bfloat16's memory",
        choices=cfg.KV_CACHE_DTYPES,
    )
    gpu_memory_utilization: float | None = _arg(
        None,
        f"share of the GPU's memory to use ({cfg.DEFAULT_GPU_MEMORY_UTILIZATION}); on a CPU the "
        f"share of free memory for the KV cache ({cfg.DEFAULT_CPU_MEMORY_UTILIZATION})",
        type=float,
    )
    kv_cache_memory: str | int | None = _arg(None, "size of the KV cache, such as 2GiB", type=str)
    enable_prefix_caching: bool = _arg(True, "reuse the KV cache of shared prefixes")
    max_num_batched_tokens: int = _arg(2048, "tokens computed in one step")
    max_num_seqs: int = _arg(64, "sequences computed in one step")
    enable_chunked_prefill: bool = _arg(True, "compute long prompts in several steps")
    method: str | None = _arg(
        None, "how to propose drafts; none when omitted", choices=cfg.SPECULATIVE_METHODS
    )
    draft_model: str | None = _arg(None, "folder or hub id of the draft, for --method eagle3")
    num_speculative_tokens: int | None = _arg(None, "drafts per step, 1 to 15", type=int)
    ngram_max: int | None = _arg(
        None, "longest suffix to look up (4), for ngram and lookup", type=int
    )
    ngram_min: int | None = _arg(
        None, "shortest suffix to look up (1 for ngram, 2 for lookup beside a draft)", type=int
    )
    speculative_lookup: bool = _arg(
        False, "draft what followed the newest tokens before in the text, where there is such"
    )
    speculative_adaptive: bool = _arg(
        False, "measure what drafts cost and bring, and draft less where that is faster"
    )
    speculative_config: str | JsonObject | None = _arg(  # noqa: RUF009
        None, "the speculation options as one JSON object, instead of the flags", type=str
    )
    enforce_eager: bool = _arg(
        False, "capture no CUDA or HIP graphs; on a CPU there are none, so every step is eager"
    )
    cudagraph_capture_sizes: str | list[str | int] | None = _arg(  # noqa: RUF009
        None,
        "numbers of sequences to capture graphs for, such as 1,2,4; powers of two up to "
        "--max-num-seqs when omitted",
        nargs="+",
        action="extend",
    )
    tensor_parallel_size: int = _arg(1, "number of GPUs that share the model")
    num_threads: int | None = _arg(None, "CPU threads; all processors when omitted", type=int)
    device: str = _arg("auto", "where to run", choices=cfg.DEVICES)
    seed: int | None = _arg(None, "makes unseeded requests reproducible", type=int)
    max_logprobs: int = _arg(20, "most alternatives a request may ask for with logprobs")

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add a flag per field, in kebab and in snake spelling."""
        group = parser.add_argument_group("engine")
        for option in dataclasses.fields(EngineArgs):
            names = [f"--{option.name.replace('_', '-')}"]
            if "_" in option.name:
                names.append(f"--{option.name}")
            extra = {k: v for k, v in option.metadata.items() if k != "help"}
            if isinstance(option.default, bool):
                extra["action"] = argparse.BooleanOptionalAction
            elif isinstance(option.default, int):
                extra["type"] = int
            suffix = "" if option.default in (None, "") else " (default: %(default)s)"
            group.add_argument(
                *names, default=option.default, help=option.metadata["help"] + suffix, **extra
            )

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> EngineArgs:
        return cls(**{f.name: getattr(namespace, f.name) for f in dataclasses.fields(cls)})

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any]) -> EngineArgs:
        """Build from keyword arguments.

        Raises:
            TypeError: naming every unknown argument and the known ones.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(kwargs) - known)
        if unknown:
            raise TypeError(
                f"unknown engine argument(s) {', '.join(unknown)}; "
                f"known: {', '.join(sorted(known))}"
            )
        return cls(**kwargs)

    def without_speculation(self) -> EngineArgs:
        """The same engine, proposing no drafts."""
        options: JsonObject = {
            f.name: f.default for f in dataclasses.fields(self) if _is_speculative(f.name)
        }
        return dataclasses.replace(self, **options)

    @property
    def says_speculation(self) -> bool:
        """Whether any option about speculation was given."""
        return self != self.without_speculation()

    def with_shipped_draft(self) -> EngineArgs:
        """The same engine with the draft that comes with the package for its model.

        Unchanged when there is none, or when anything was said about speculation.
        """
        draft = shipped_draft_for(self.model)
        if draft is None or self.says_speculation:
            return self
        return dataclasses.replace(self, method="eagle3", draft_model=str(draft), **SHIPPED_OPTIONS)

    def choose_draft(self, no_speculation: bool) -> EngineArgs:
        """What programs run that speculate unless told not to.

        Args:
            no_speculation: the flag of `add_no_speculation`.

        Raises:
            ConfigError: when the flag contradicts another.
        """
        if no_speculation and self.says_speculation:
            raise cfg.ConfigError(
                "--no-speculation and the options of speculation contradict each other"
            )
        return self if no_speculation else self.with_shipped_draft()

    def create_config(self) -> cfg.EngineConfig:
        """Validate and group the options.

        Raises:
            ConfigError: saying what was given and what is expected.
        """
        memory = None if self.kv_cache_memory is None else cfg.parse_bytes(self.kv_cache_memory)
        sizes = self.cudagraph_capture_sizes
        return cfg.EngineConfig(
            model=cfg.ModelOptions(
                model=self.model,
                tokenizer=self.tokenizer,
                revision=self.revision,
                trust_remote_code=self.trust_remote_code,
                dtype=self.dtype,
                load_format=self.load_format,
                safetensors_load_strategy=self.safetensors_load_strategy,
                max_model_len=self.max_model_len,
            ),
            cache=cfg.CacheOptions(
                block_size=self.block_size,
                kv_cache_dtype=self.kv_cache_dtype,
                gpu_memory_utilization=self.gpu_memory_utilization,
                kv_cache_memory=memory,
                enable_prefix_caching=self.enable_prefix_caching,
            ),
            scheduler=cfg.SchedulerOptions(
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                enable_chunked_prefill=self.enable_chunked_prefill,
            ),
            parallel=cfg.ParallelOptions(
                tensor_parallel_size=self.tensor_parallel_size, num_threads=self.num_threads
            ),
            speculative=speculative_options(
                {
                    "method": self.method,
                    "model": self.draft_model,
                    "num_speculative_tokens": self.num_speculative_tokens,
                    "ngram_max": self.ngram_max,
                    "ngram_min": self.ngram_min,
                    "lookup": self.speculative_lookup or None,
                    "adaptive": self.speculative_adaptive or None,
                },
                self.speculative_config,
            ),
            graphs=cfg.GraphOptions(
                enforce_eager=self.enforce_eager,
                capture_sizes=None if sizes is None else cfg.parse_sizes(sizes),
            ),
            device=self.device,
            seed=self.seed,
            max_logprobs=self.max_logprobs,
        )
