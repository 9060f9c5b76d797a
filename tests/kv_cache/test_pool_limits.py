"""Pools that are too large for an implementation: the log names a size that is not."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from spec_decode import engines
from transformers import PreTrainedTokenizerFast

from atom.model_ops.op_table.ops import OPS
from atom.model_ops.op_table.pool_limits import PoolLimit
from atom.model_ops.registry import Implementation, OpQuery, OpTable, always
from atom.platform import Platform

MI300X = Platform("rocm", "gfx942", True)
BF16 = torch.bfloat16
BLOCKS = 10


def too_large(query: OpQuery) -> str | None:
    blocks = query.shape["num_blocks"]
    return f"reads {BLOCKS} blocks, not {blocks}" if blocks > BLOCKS else None


def wrong_heads(query: OpQuery) -> str | None:
    return "has 8 heads" if query.shape["num_heads"] != 8 else None


def either(query: OpQuery) -> str | None:
    return too_large(query) or wrong_heads(query)


def test_only_what_fewer_blocks_would_let_run(monkeypatch: pytest.MonkeyPatch) -> None:
    last = Implementation("torch", always, object)
    entries = {
        "first": (Implementation("aiter", too_large, object), last),
        "second": (Implementation("aiter", either, object), last),
        "demanded": (Implementation("aiter", too_large, object), last),
        "refused": (Implementation("aiter", wrong_heads, object), last),
        "product": (Implementation("aiter", lambda _: "is slow", object), last),
    }
    monkeypatch.setenv("ATOM_OP_DEMANDED", "torch")
    table = OpTable(MI300X, entries)
    for op in ("first", "second", "demanded", "refused"):
        for heads in (4, 8):
            table.resolve(op, BF16, num_blocks=BLOCKS, num_heads=heads)
    table.resolve("product", BF16, in_features=4)
    assert table.pool_limits() == []
    for op in ("first", "second", "demanded", "refused"):
        table.resolve(op, BF16, num_blocks=12, num_heads=4)
    reason = f"reads {BLOCKS} blocks, not 12"
    assert table.pool_limits() == [PoolLimit("aiter", ("first",), reason, BLOCKS)]
    table.resolve("second", BF16, num_blocks=12, num_heads=8)
    assert table.pool_limits() == [PoolLimit("aiter", ("first", "second"), reason, BLOCKS)]


def test_a_start_names_the_option(
    tmp_path: Path,
    byte_level_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With what it says, the implementation runs."""
    torch_decode = next(i for i in OPS["mla_decode"] if i.name == "torch")
    limited = Implementation("native", too_large, torch_decode.load)
    monkeypatch.setitem(OPS, "mla_decode", (limited, torch_decode))
    target = engines.write_target("deepseek_v3", tmp_path, byte_level_tokenizer)
    start = {"method": "mtp", "num_speculative_tokens": 2, "enforce_eager": True}

    def warnings(memory: int | str) -> tuple[list[str], str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="atom"):
            engine = engines.create_engine(
                target, max_model_len=32, kv_cache_memory=memory, **start
            )
        blocks = engine.engine.core.stats.num_blocks
        levels = [r for r in caplog.records if r.levelno >= logging.WARNING]
        return [r.getMessage() for r in levels if "native" in r.getMessage()], str(blocks)

    (message,), blocks = warnings("1MB")
    found = re.fullmatch(
        rf"native does not run mla_decode: reads {BLOCKS} blocks, not {blocks}; with "
        rf"--kv-cache-memory (\d+) \({BLOCKS} blocks of 4 tokens\) it does",
        message,
    )
    assert found is not None, message
    assert warnings(int(found[1])) == ([], str(BLOCKS))
    (message,), blocks = warnings(int(found[1]) * (BLOCKS + 1) // BLOCKS)
    assert blocks == str(BLOCKS + 1)
