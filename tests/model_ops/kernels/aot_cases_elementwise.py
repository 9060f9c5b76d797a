"""Norms, rotation, activation and sampling of Llama-3, SmolLM2 and Kimi-K2.5."""

from __future__ import annotations

from collections.abc import Callable

import torch
from aot_case import Case

from atom.model_ops.attention.metadata import SamplingMetadata
from atom.model_ops.kernels.torch.carried import CarriedInputs, CarriedTokens
from atom.model_ops.registry import OpQuery

Arguments = Callable[[OpQuery], tuple[object, ...]]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _norm(size: int, tokens: int, adds: bool, dtype: torch.dtype = BF16) -> Case:
    def arguments(query: OpQuery) -> tuple[object, ...]:
        x = torch.empty(tokens, size, dtype=query.dtype)
        weight = torch.empty(size, dtype=query.dtype)
        return (x, x, weight, 1e-5) if adds else (x, weight, 1e-5)

    op = "add_rms_norm" if adds else "rms_norm"
    return Case(f"{op}/{size} of {tokens} {dtype}", op, arguments, {"size": size}, dtype=dtype)


def _latent_norm(query: OpQuery) -> tuple[object, ...]:
    """The latent, beside the rotated part of the key."""
    both = torch.empty(64, 512 + 64, dtype=query.dtype)
    return both[:, :512], torch.empty(512, dtype=query.dtype), 1e-6


def _head_norm(query: OpQuery) -> tuple[object, ...]:
    """Queries normalised head by head, beside keys and values."""
    heads = torch.empty(64, 48, 128, dtype=query.dtype)
    return heads[:, :32], torch.empty(128, dtype=query.dtype), 1e-6


def _rope(
    name: str, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype = BF16
) -> Case:
    def arguments(query: OpQuery) -> tuple[object, ...]:
        qkv = torch.empty(64, heads + 2 * kv_heads, head_dim, dtype=query.dtype)
        table = torch.empty(8192, rotary_dim)
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        return torch.empty(64, dtype=torch.int64), q, k, table, False

    return Case(f"rope/{name}", "rope", arguments, {"head_dim": head_dim}, dtype=dtype)


def _latent_rope(query: OpQuery) -> tuple[object, ...]:
    """Kimi-K2.5 at TP8: the rotated parts of 8 heads and of the one key."""
    q = torch.empty(64, 8, 128 + 64, dtype=query.dtype)[..., 128:]
    k = torch.empty(64, 1, 512 + 64, dtype=query.dtype)[..., 512:]
    return torch.empty(64, dtype=torch.int64), q, k, torch.empty(8192, 64), True


def _silu(size: int, dtype: torch.dtype = BF16) -> Case:
    def arguments(query: OpQuery) -> tuple[object, ...]:
        return (torch.empty(64, 2 * size, dtype=query.dtype),)

    name = f"silu_and_mul/{size} {dtype}"
    return Case(name, "silu_and_mul", arguments, {"size": size}, dtype=dtype)


def _situ(query: OpQuery) -> tuple[object, ...]:
    return torch.empty(64, 2 * 3072, dtype=query.dtype), 4.0, 25.0


def _mixture(query: OpQuery) -> tuple[object, ...]:
    closed, *rows = (torch.empty(*n, 64, 7168, dtype=query.dtype) for n in ((8,), ()))
    weight = torch.empty(7168, dtype=query.dtype)
    return closed, *rows, weight, weight[None], 1e-5


def _choose(vocab_size: int, *options: str, dtype: torch.dtype = BF16) -> Case:
    if options:
        options += ("temperature", "seeds", "positions")

    def of(rows: int) -> Arguments:
        integers = torch.empty(rows, dtype=torch.int64)
        every = {
            "temperature": torch.empty(rows),
            "seeds": integers,
            "positions": integers,
            "min_p": torch.empty(rows),
            "top_k": torch.empty(rows, dtype=torch.int32),
            "top_p": torch.empty(rows),
        }

        def arguments(query: OpQuery) -> tuple[object, ...]:
            metadata = SamplingMetadata(**{name: every[name] for name in options})
            return torch.empty(rows, vocab_size, dtype=query.dtype), metadata

        return arguments

    name = f"choose_tokens/{vocab_size} {dtype} {' '.join(options[:-3]) or 'greedy'}"
    shape, batches = {"vocab_size": vocab_size}, (of(1), of(17))
    return Case(name, "choose_tokens", of(256), shape, dtype=dtype, batches=batches)


def _drafts(vocab_size: int, *filters: str) -> Case:
    rows = 64
    integers = torch.empty(rows, dtype=torch.int64)
    every = {
        "min_p": torch.empty(rows),
        "top_k": torch.empty(rows, dtype=torch.int32),
        "top_p": torch.empty(rows),
    }
    race = SamplingMetadata(
        temperature=torch.empty(rows),
        seeds=integers,
        positions=integers,
        **{name: every[name] for name in filters},
    )
    token_ids = torch.empty(vocab_size, dtype=torch.int32)

    def arguments(_: OpQuery) -> tuple[object, ...]:
        return torch.empty(rows, vocab_size), race, token_ids, 0.8, 2, True

    name = f"choose_drafts/{vocab_size} {' '.join(filters)}"
    return Case(name, "choose_drafts", arguments, {"vocab_size": vocab_size}, dtype=FP32)


def _masks(vocab_size: int, all_rows: bool) -> Case:
    def arguments(_: OpQuery) -> tuple[object, ...]:
        words = torch.empty(64, -(-vocab_size // 32), dtype=torch.int32)
        rows = None if all_rows else torch.empty(64, dtype=torch.int64)
        return torch.empty(64 if all_rows else 256, vocab_size), words, rows

    name = f"mask_tokens/{vocab_size} {'all' if all_rows else 'some'} rows"
    return Case(name, "mask_tokens", arguments, {"vocab_size": vocab_size}, dtype=FP32)


def _integers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def _take_carried(num_drafts: int) -> Case:
    """One kernel for any number of tokens, and of sequences ahead."""

    def of(sequences: int, newest: int) -> Arguments:
        def arguments(_: OpQuery) -> tuple[object, ...]:
            rows = num_drafts + 1
            drafts = _integers(sequences, num_drafts) if num_drafts else None
            count = sequences * rows
            after = _integers(count) if num_drafts else None
            lens = _integers(sequences, dtype=torch.int32)
            tokens = [_integers(count) for _ in range(3)]
            inputs = CarriedInputs(*tokens, lens, after, _integers(count), drafts)
            kept = CarriedTokens(_integers(256, rows), _integers(256))
            tables = _integers(256, 512, dtype=torch.int32)
            return kept, inputs, _integers(6, count), newest, tables, 16

        return arguments

    name, batches = "take_carried", (of(1, 1), of(17, 16), of(5, 3))
    return Case(f"{name}/{num_drafts}", name, of(64, 64), {}, dtype=FP32, batches=batches)


def _leave_carried(num_drafts: int) -> Case:
    def of(sequences: int, made: int) -> Arguments:
        def arguments(_: OpQuery) -> tuple[object, ...]:
            kept = CarriedTokens(_integers(256, num_drafts + 1), _integers(256))
            drafts = _integers(sequences, made) if made else None
            tokens, positions = _integers(sequences, made + 1), _integers(sequences * (made + 1))
            counts = _integers(sequences)
            return kept, _integers(2, sequences), tokens, counts, positions, drafts

        return arguments

    name, batches = "leave_carried", (of(1, num_drafts), of(17, num_drafts), of(64, 0), of(5, 1))
    if not num_drafts:
        batches = batches[:3]
    first = of(64, num_drafts)
    return Case(f"{name}/{num_drafts}", name, first, {}, dtype=FP32, batches=batches)


CASES: tuple[Case, ...] = (
    *(_take_carried(n) for n in (0, 3)),
    *(_leave_carried(n) for n in (0, 3)),
    *(_norm(size, 64, adds) for size in (576, 4096, 7168) for adds in (False, True)),
    _norm(576, 64, True, FP32),
    _norm(4096, 64, True, FP16),
    Case("rms_norm/latent", "rms_norm", _latent_norm, {"size": 512}),
    Case("rms_norm/heads", "rms_norm", _head_norm, {"size": 128}),
    _rope("llama", 32, 8, 128, 128),
    _rope("smollm2 fp32", 9, 3, 64, 64, FP32),
    _rope("partial", 32, 2, 128, 64, FP16),
    Case("rope/kimi tp8", "rope", _latent_rope, {"head_dim": 64}),
    _silu(1536, FP32),
    _silu(14336),
    _silu(2048, FP16),
    Case("situ_and_mul/3072", "situ_and_mul", _situ, {"size": 3072}),
    Case("mix_residuals/8 of 7168", "mix_residuals", _mixture, {"size": 7168}),
    _choose(163840, "min_p", "top_k", "top_p"),
    _choose(163840),
    _choose(163840, "min_p"),
    _choose(49152, "top_k", "top_p"),
    _choose(49152, "top_p", dtype=FP32),
    _choose(49152, "top_k", dtype=FP16),
    _drafts(32000, "min_p", "top_k", "top_p"),
    _masks(163840, True),
    _masks(49152, False),
)
