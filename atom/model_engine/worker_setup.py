"""What a worker is set up with besides its model: threads, grammars, a dtype, a context length."""

from __future__ import annotations

import logging
from functools import partial

import torch

from atom.config import MAX_SPECULATIVE_TOKENS, ConfigError, EngineConfig, ModelOptions
from atom.distributed.place import Place
from atom.graphs.capture import (
    GraphPlan,
    capture_backend,
    default_batch_sizes,
    default_context_bounds,
    query_lengths,
)
from atom.graphs.runner import GraphRunner
from atom.model_engine.cpu_threads import AdaptedThreads
from atom.model_loader.source import ModelSource
from atom.model_loader.tokenizer import load_tokenizer
from atom.models.base import CausalLM
from atom.platform import Platform, default_num_threads
from atom.spec_decode.base import Lookahead, Proposer
from atom.spec_decode.draft_graphs import DraftGraphs
from atom.structured_output.base import GrammarBackend
from atom.structured_output.cache import GrammarCache
from atom.structured_output.spelling import Spelling
from atom.structured_output.trial_client import TrialProcess
from atom.structured_output.tried_compiler import TriedCompiler
from atom.structured_output.vocabulary import read_vocabulary
from atom.structured_output.xgrammar_backend import XGrammarBackend
from atom.structured_output.xgrammar_import import INSTALL_HINT, missing_packages

logger = logging.getLogger(__name__)

DTYPES_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_dtype(name: str, source: ModelSource) -> torch.dtype:
    """The dtype of the `--dtype` option; `auto` means the checkpoint's."""
    if name == "auto":
        return source.default_dtype
    return DTYPES_BY_NAME[name]


def take_threads(config: EngineConfig, place: Place, platform: Platform) -> AdaptedThreads | None:
    """Set the number of CPU threads; None if it will not follow what other programs leave."""
    if config.parallel.num_threads is not None:
        torch.set_num_threads(config.parallel.num_threads)
    elif place.num_local > 1:
        torch.set_num_threads(max(default_num_threads() // place.num_local, 1))
    elif not platform.is_gpu:
        return AdaptedThreads()
    return None


def overlaps(config: EngineConfig, platform: Platform) -> bool:
    """Whether steps are launched before the results of the last one are read: on a GPU unless told
    otherwise, where they can.
    """
    if config.scheduler.overlap is not None or not platform.is_gpu:
        return bool(config.scheduler.overlap)
    if config.overlap_obstacle is not None:
        logger.info("steps do not overlap: %s", config.overlap_obstacle)
    return config.overlap_obstacle is None


def create_grammars(options: ModelOptions, source: ModelSource) -> GrammarCache:
    if missing := missing_packages():
        logger.warning(
            "requests for structured output will be refused: %s not installed; run: %s",
            " and ".join(missing),
            INSTALL_HINT,
        )
    create_backend = partial(_create_grammar_backend, options, source)
    return GrammarCache(TriedCompiler(create_backend, TrialProcess()))


def _create_grammar_backend(options: ModelOptions, source: ModelSource) -> GrammarBackend:
    vocab_size = source.hf_config.get_text_config().vocab_size
    tokenizer = load_tokenizer(source, options)
    vocabulary = read_vocabulary(tokenizer, vocab_size, source.eos_token_ids)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return XGrammarBackend(vocabulary, Spelling(vocabulary.tokens, encode))


def fit_context(
    config: EngineConfig, context_len: int, num_blocks: int, storage: torch.dtype
) -> int:
    """The context length, reduced to what the KV cache can hold.

    Raises:
        ConfigError: when the user asked for more than fits.
    """
    capacity = num_blocks * config.cache.block_size
    if capacity >= context_len:
        return context_len
    if config.model.max_model_len is not None:
        raise ConfigError(
            f"max_model_len={context_len} needs {context_len} tokens of KV cache and there is "
            f"memory for {capacity} in {dtype_name(storage)}; lower it, or raise --kv-cache-memory"
        )
    logger.warning(
        "the KV cache holds %d tokens in %s, so the context is that instead of %d",
        capacity,
        dtype_name(storage),
        context_len,
    )
    return capacity


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` of `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def create_graph_runner(
    config: EngineConfig,
    model: CausalLM,
    lookahead: Lookahead,
    platform: Platform,
    context_len: int,
) -> GraphRunner | None:
    """The graph runner, nothing captured yet; None if every step runs eagerly.

    Raises:
        ConfigError: for --cudagraph-capture-sizes on a device without graphs.
    """
    backend = None if config.graphs.enforce_eager else capture_backend(platform)
    sizes = config.graphs.capture_sizes
    if backend is None:
        if sizes is not None:
            raise ConfigError(
                f"cudagraph_capture_sizes={list(sizes)} has no effect on a {platform.kind}: "
                f"there are no graphs to capture; leave it out"
            )
        return None
    plan = GraphPlan(
        backend,
        sizes or default_batch_sizes(config.scheduler.max_num_seqs),
        default_context_bounds(context_len),
        config.cache.block_size,
        platform.device,
    )
    options, own = config.speculative, lookahead.num_tokens
    varying = options is not None and (options.adaptive or options.looks_up)
    lens = query_lengths(own, varying=varying)
    if options is not None and options.lookup:
        lens = tuple(sorted({1 + own, *query_lengths(MAX_SPECULATIVE_TOKENS, varying=True)}))
    return GraphRunner(model.forward, plan, lens)


def create_draft_graphs(
    config: EngineConfig, proposer: Proposer, target: GraphRunner | None
) -> DraftGraphs | None:
    """Where a proposer's graphs are kept; None if it runs eagerly."""
    most = proposer.lookahead.num_tokens
    if target is None or not proposer.reads_steps or not most:
        return None
    is_adaptive = config.speculative is not None and config.speculative.adaptive
    return DraftGraphs(target.plan.backend, (0, most) if is_adaptive else (most,))
