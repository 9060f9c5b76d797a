"""What a server says once it is ready: what runs where, and where to go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from atom.entrypoints.server_options import ServerOptions
from atom.model_engine.async_engine import AsyncEngine
from atom.options.speculative import SpeculativeOptions
from atom.version import __version__

if TYPE_CHECKING:
    from atom.pooling.engine import PoolingEngine


def banner(url: str, options: ServerOptions, engine: AsyncEngine) -> str:
    """A line for each thing that somebody who started the server looks for.

    Args:
        url: where the server listens.
    """
    limits = engine.limits
    parallel = engine.config.parallel
    context = f"{limits.num_kv_tokens:,} tokens in {limits.kv_cache_dtype}"
    root = f"{'' if options.uds else url}{options.root_path}"
    lines = {
        "model": f"{engine.model_name}{f', {limits.weights}' if limits.weights else ''}",
        "runs on": limits.runs_on,
        "processes": _count_processes(parallel.data_parallel_size, parallel.tensor_parallel_size),
        "speculation": _describe_drafts(engine.config.speculative),
        "KV cache": f"{context}; {limits.max_model_len:,} to a request",
        "playground": f"{root}/" if options.ui else "off",
        "APIs": f"{root}/v1 (OpenAI), {root}/v1/messages (Anthropic)",
        "metrics": f"{root}/metrics",
        "API key": "needed" if options.api_keys else "none: open to all who reach it",
    }
    return _table(lines)


def pooling_banner(url: str, options: ServerOptions, engine: PoolingEngine) -> str:
    """The same of a model that embeds or scores."""
    loaded = engine.loaded
    root = f"{'' if options.uds else url}{options.root_path}"
    most = f"{loaded.limits.max_model_len:,} tokens of an input"
    if loaded.embedding is None:
        does, routes = "scores pairs of texts", "score, rerank"
    else:
        does, routes = f"embeds, {loaded.embedding.dimension} numbers", "embeddings, score, rerank"
    lines = {
        "model": engine.model_name,
        "task": f"{does}; {most}",
        "runs on": loaded.runs_on,
        "APIs": f"{root}/v1/{{{routes}}}",
        "metrics": f"{root}/metrics",
        "API key": "needed" if options.api_keys else "none: open to all who reach it",
    }
    return _table(lines)


def _table(lines: Mapping[str, str]) -> str:
    rows = (f"  {name:<12} {text}" for name, text in lines.items())
    return "\n".join([f"ATOM {__version__}", *rows])


def _count_processes(engines: int, ranks: int) -> str:
    texts = (f"{engines} engine{'s' * (engines > 1)}", f"{ranks} rank{'s' * (ranks > 1)} each")
    return ", ".join(texts[: 1 + (ranks > 1)])


def _describe_drafts(options: SpeculativeOptions | None) -> str:
    if options is None:
        return "off"
    parts = [options.method]
    if options.lookup:
        parts.append("lookup")
    most = f"up to {options.num_speculative_tokens} drafts a step"
    return f"{' and '.join(parts)}, {most}{', as many as pay' if options.adaptive else ''}"
