"""Which loads kernels.py measures, at which sizes, and in which order."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch
from _device import ROTATED_BYTES
from _kernel_loads import Case, LatentDecode, LatentPrefill, Load, PagedDecode
from _kernel_sizes import (
    TINY_EXPERTS,
    TINY_HEADS,
    TINY_LATENTS,
    TINY_PRODUCT,
    ChoiceSizes,
    ExpertSizes,
    HeadSizes,
    LatentSizes,
    ProductSizes,
)
from _product_loads import FORMATS, Experts, Product
from _token_loads import Choice

from atom.platform import Platform, free_memory_bytes

OPS = (
    "paged_attention",
    "mla_decode",
    "moe_experts",
    "linear",
    "quant_linear",
    "quant_experts",
    "mla_prefill",
    "choose_tokens",
)
STORAGES = ("auto", "fp8")
# Of the memory that is free, a pool takes so much at most: gathering it takes as much again.
_POOL_SHARE = 0.55
_TINY_ROTATED_BYTES = 1 << 16

# What makes a load, when its turn comes, and its cases.
Planned = tuple[Callable[[], Load], list[Case]]


class Plan:
    """The loads of one run.

    Args:
        args: as kernels.py parsed them.
    """

    def __init__(self, args: argparse.Namespace, platform: Platform) -> None:
        self._args, self._platform = args, platform
        self._dtype: torch.dtype = getattr(torch, args.dtype)
        self._rotated = _TINY_ROTATED_BYTES if args.tiny else ROTATED_BYTES
        self._latents = TINY_LATENTS if args.tiny else LatentSizes()

    def __iter__(self) -> Iterator[Planned]:
        yield from self._decodes()
        yield from self._products()
        yield from self._prefills()
        yield from self._choices()

    def _decodes(self) -> Iterator[Planned]:
        args, tiny = self._args, self._args.tiny
        cases = [Case(batch, context) for context in args.contexts for batch in args.batch_sizes]
        cases.insert(1, dataclasses.replace(cases[0], queries=args.queries))
        of_draft = [case for case in cases if case.context == args.contexts[0]]
        heads = TINY_HEADS if tiny else HeadSizes()
        draft = HeadSizes(2, 2, 32) if tiny else HeadSizes(8, 8, 128)
        for storage in self._storages():
            if "paged_attention" in args.ops:
                yield partial(self._paged, heads, storage, cases), cases
                yield partial(self._paged, draft, storage, cases), of_draft
            if "mla_decode" in args.ops:
                yield partial(self._latent, LatentDecode, storage, cases), cases

    def _prefills(self) -> Iterator[Planned]:
        """Whole prompts, the last part of a long one, and several side by side."""
        if "mla_prefill" not in self._args.ops:
            return
        cases = [Case(1, 8192, 8192), Case(1, 65536, 8192), Case(8, 1024, 1024)]
        if self._args.tiny:
            cases = [Case(1, 40, 40), Case(3, 40, 20)]
        for storage in self._storages():
            yield partial(self._latent, LatentPrefill, storage, cases), cases

    def _storages(self) -> Iterator[torch.dtype]:
        for name in self._args.kv_cache_dtypes:
            yield self._dtype if name == "auto" else self._platform.fp8_dtype

    def _paged(self, sizes: HeadSizes, storage: torch.dtype, cases: list[Case]) -> Load:
        token = 2 * sizes.kv_heads * sizes.head_dim * storage.itemsize
        return PagedDecode(sizes, *self._pool(storage, token, cases))

    def _latent(self, kind: type[LatentDecode], storage: torch.dtype, cases: list[Case]) -> Load:
        token = (self._latents.rank + self._latents.rope) * storage.itemsize
        return kind(self._latents, *self._pool(storage, token, cases))

    def _pool(
        self, storage: torch.dtype, token_bytes: int, cases: list[Case]
    ) -> tuple[Platform, torch.dtype, torch.dtype, int, int, int]:
        """The further arguments of loads with a cache, which has room for the largest case."""
        size: int = self._args.block_size
        largest = max(c.batch * -(-c.context // size) for c in cases) * size
        rotation = 2 * self._rotated // token_bytes
        most = int(_POOL_SHARE * free_memory_bytes(self._platform)) // token_bytes
        tokens = min(max(largest, rotation), most)
        return self._platform, self._dtype, storage, tokens, self._rotated, size

    def _products(self) -> Iterator[Planned]:
        """The last rows are those of one sequence that verifies drafts; quantised ones also get
        those of a prompt.
        """
        args, tiny = self._args, self._args.tiny
        rows = list(dict.fromkeys((*args.batch_sizes, args.queries)))
        prompt = 64 if tiny else 4096
        products = (TINY_PRODUCT,) if tiny else (ProductSizes(), ProductSizes(14336, 4096))
        experts = TINY_EXPERTS if tiny else ExpertSizes()
        common = self._platform, self._dtype, self._rotated
        batches = [Case(batch) for batch in args.batch_sizes]
        if "moe_experts" in args.ops:
            yield partial(Experts, experts, *common), batches
        if "linear" in args.ops:
            for product in products:
                yield partial(Product, product, *common), [Case(n) for n in rows]
        forms = [FORMATS[name] for name in args.formats]
        for form in forms if "quant_linear" in args.ops else ():
            for product in products:
                cases = [Case(n) for n in (*rows, prompt)]
                yield partial(Product, product, *common, form), cases
        for form in forms if "quant_experts" in args.ops else ():
            yield partial(Experts, experts, *common, form), [*batches, Case(prompt)]

    def _choices(self) -> Iterator[Planned]:
        """Without filters, with each of the two, and with both."""
        if "choose_tokens" not in self._args.ops:
            return
        vocab = 500 if self._args.tiny else ChoiceSizes().vocab_size
        cases = [Case(batch) for batch in self._args.batch_sizes]
        for filters in ({"top_k": 50, "top_p": 0.9}, {"top_k": 50}, {"top_p": 0.9}, {}):
            sizes = dataclasses.replace(ChoiceSizes(vocab), **filters)
            yield partial(Choice, sizes, self._platform, self._rotated), cases
