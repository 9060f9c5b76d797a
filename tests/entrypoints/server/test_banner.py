"""What a server says once it is ready."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from atom.config import SpeculativeOptions
from atom.entrypoints.server.banner import banner
from atom.entrypoints.server_options import ServerOptions
from atom.messages import EngineLimits
from atom.version import __version__

URL = "http://127.0.0.1:8000"
LIMITS = EngineLimits(
    max_model_len=8192,
    num_blocks=100,
    block_size=16,
    vocab_size=9,
    max_logprobs=0,
    kv_cache_dtype="bfloat16",
    weights="Q4_1 weights",
    runs_on="bfloat16 on cpu (avx512); kernels: native 18",
)


def engine(speculative: SpeculativeOptions | None, replicas: int = 1, ranks: int = 1) -> Any:
    parallel = SimpleNamespace(data_parallel_size=replicas, tensor_parallel_size=ranks)
    config = SimpleNamespace(parallel=parallel, speculative=speculative)
    return SimpleNamespace(config=config, limits=LIMITS, model_name="Model")


def test_what_runs_where_and_where_to_go() -> None:
    options = SpeculativeOptions(
        method="eagle3", num_speculative_tokens=3, model="draft", lookup=True, adaptive=True
    )
    assert banner(URL, ServerOptions(root_path="/llm"), engine(options)).splitlines() == [
        f"ATOM {__version__}",
        "  model        Model, Q4_1 weights",
        "  runs on      bfloat16 on cpu (avx512); kernels: native 18",
        "  processes    1 engine",
        "  speculation  eagle3 and lookup, up to 3 drafts a step, as many as pay",
        "  KV cache     1,600 tokens in bfloat16; 8,192 to a request",
        f"  playground   {URL}/llm/",
        f"  APIs         {URL}/llm/v1 (OpenAI), {URL}/llm/v1/messages (Anthropic)",
        f"  metrics      {URL}/llm/metrics",
        "  API key      none: open to all who reach it",
    ]


@pytest.mark.parametrize(
    ("replicas", "ranks", "processes"),
    [(8, 1, "8 engines"), (2, 4, "2 engines, 4 ranks each"), (1, 8, "1 engine, 8 ranks each")],
)
def test_what_is_off_and_how_many_there_are(replicas: int, ranks: int, processes: str) -> None:
    said = banner(
        URL, ServerOptions(ui=False, given_api_keys=("k",)), engine(None, replicas, ranks)
    )
    assert "  speculation  off\n" in said
    assert "  playground   off\n" in said
    assert said.endswith("  API key      needed")
    assert f"  processes    {processes}\n" in said


def test_a_socket_has_paths_alone() -> None:
    assert "playground   /\n" in banner("unix:/s", ServerOptions(uds="/s"), engine(None))


def test_a_description_travels_with_the_limits() -> None:
    packed = msgspec.msgpack.encode(LIMITS)
    assert msgspec.msgpack.decode(packed, type=EngineLimits).runs_on == LIMITS.runs_on
