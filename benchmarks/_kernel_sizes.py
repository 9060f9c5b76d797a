"""Sizes of the layers that kernels.py measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadSizes:
    """Llama-3-8B's attention, unless told otherwise."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"


@dataclass(frozen=True)
class LatentSizes:
    """Kimi-K2.5's attention on one rank of eight."""

    heads: int = 8
    rank: int = 512
    rope: int = 64
    nope: int = 128
    v: int = 128

    def __str__(self) -> str:
        return f"{self.heads} heads, latent {self.rank} + {self.rope}"


@dataclass(frozen=True)
class ExpertSizes:
    """Kimi-K2.5's routed experts on one rank of eight."""

    experts: int = 384
    top_k: int = 8
    hidden: int = 7168
    intermediate: int = 256

    def __str__(self) -> str:
        return f"{self.experts} experts, top {self.top_k}, {self.hidden} x {self.intermediate}"


@dataclass(frozen=True)
class ProductSizes:
    """Llama-3-8B's projection of attention's queries, keys and values, unless told otherwise."""

    inputs: int = 4096
    outputs: int = 6144

    def __str__(self) -> str:
        return f"{self.inputs} to {self.outputs}"


@dataclass(frozen=True)
class ChoiceSizes:
    """Kimi-K2.5's vocabulary, with the filters that a request may ask for."""

    vocab_size: int = 163840
    top_k: int | None = None
    top_p: float | None = None

    def __str__(self) -> str:
        filters = {"top-k": self.top_k, "top-p": self.top_p}
        shown = [f"{name} {value}" for name, value in filters.items() if value is not None]
        return ", ".join([f"{self.vocab_size} tokens", *shown])


TINY_HEADS, TINY_LATENTS = HeadSizes(4, 2, 32), LatentSizes(2, 32, 16, 16, 16)
TINY_EXPERTS, TINY_PRODUCT = ExpertSizes(8, 2, 128, 128), ProductSizes(256, 128)
