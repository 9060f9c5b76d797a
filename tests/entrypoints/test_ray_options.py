"""The arguments of the Ray Serve application, which need no Ray."""

from __future__ import annotations

from typing import Any

import pytest

from atom.config import ConfigError
from atom.entrypoints.ray_options import ScalingOptions, read_args
from atom.entrypoints.server_options import OptionError


def test_text_and_values_say_the_same() -> None:
    text = {"model": "m", "data_parallel_size": "2", "enforce_eager": "true", "max-replicas": "3"}
    values: dict[str, Any] = {**text, "data_parallel_size": 2, "enforce_eager": True}
    values |= {"max-replicas": 3, "api_key": ["a", "b"]}
    plain, typed = read_args(text), read_args(values)
    assert plain.config == typed.config
    assert plain.config.parallel.data_parallel_size == 2
    assert plain.config.graphs.enforce_eager
    assert plain.scaling == typed.scaling == ScalingOptions(max_replicas=3)
    assert typed.server.api_keys == ("a", "b")


def test_what_a_replica_takes() -> None:
    options = read_args({"model": "m", "tensor_parallel_size": 2, "data_parallel_size": 2})
    assert options.num_gpus == 4
    assert options.batch_size == 2 * options.config.scheduler.max_num_seqs
    assert read_args({"model": "m", "device": "cpu"}).num_gpus == 0


def test_api_keys_share_no_recent_outputs_unless_allowed() -> None:
    """The server's own command line is read by the same function."""
    cached = {"method": "suffix", "num_speculative_tokens": 3, "suffix_cache_tokens": 9}
    several = {**cached, "api_key": ["a", "b"]}
    with pytest.raises(OptionError, match=r"any of 2 API keys.*--suffix-cache-across-api-keys"):
        read_args(several)
    allowed = read_args({**several, "suffix_cache_across_api_keys": True})
    alone = read_args({**cached, "api_key": ["a"]})
    for found in (allowed, alone, read_args({**several, "suffix_cache_tokens": 0})):
        assert found.config.speculative is not None


def test_the_embedded_model_has_its_draft() -> None:
    assert read_args({}).config.speculative is not None
    assert read_args({"no_speculation": "true"}).config.speculative is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"port": 1, "host": "h"}, "host, port: not for Ray Serve"),
        ({"modle": "m"}, "unknown option modle; did you mean model"),
        ({"max_num_seqs": "many"}, "invalid int value: 'many'"),
        ({"device": "tpu"}, "invalid choice: 'tpu'"),
        ({"min_replicas": 2}, "max_replicas=1 is less than min_replicas=2"),
        ({"target_ongoing_requests": 0}, "at least 1"),
        ({"distributed_executor_backend": "ray", "data_parallel_size": 2}, "one machine's"),
        ({"nnodes": 2, "data_parallel_size": 2, "master_addr": "h"}, "one machine's"),
    ],
)
def test_what_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_args(args)
