"""The bytes of a model on one rank, counted on the model itself.

The model is built on the meta device, as rank 0 of a group: the same classes that serve it say how
its weights are stored and cut, and what its attention layers cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from atom.distributed.parallel_state import ParallelGroup
from atom.kv_cache.builders import attention_layers
from atom.kv_cache.paged import PagedCache
from atom.kv_cache.state_pool import StatePool, recurrent_layers
from atom.model_loader.sketch import create_sketch
from atom.model_loader.source import ModelSource
from atom.model_ops.embedding import VocabParallelEmbedding
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.moe import FusedMoE
from atom.models.registry import create_model
from atom.platform import cpu_platform

_BLOCK = 16


@dataclass(frozen=True)
class RankSizes:
    """One rank's share of a model; bytes.

    Attributes:
        embedding: of the input embedding, of which a step reads single rows.
        expert: of one expert in all layers with experts together.
        num_experts, top_k: experts of a layer, and those that a token visits; 0 without experts.
        encoder: of the image encoder, which steps without images do not read.
        rest: all other weights, which every step reads.
        cached_token: KV cache of one token.
        num_layers: of decoder layers.
        hidden_size, vocab_size: of the whole model.
        state: recurrent states of one sequence that has no drafts.
        state_of_draft: what each draft adds to them.
    """

    embedding: int
    expert: int
    num_experts: int
    top_k: int
    encoder: int
    rest: int
    cached_token: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    state: int = 0
    state_of_draft: int = 0

    @property
    def weights(self) -> int:
        return self.embedding + self.num_experts * self.expert + self.encoder + self.rest


def rank_sizes(
    source: ModelSource,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    num_ranks: int,
    state_dtype: torch.dtype = torch.float32,
) -> RankSizes:
    """The sizes on one of `num_ranks` ranks that split every layer.

    Raises:
        ConfigError: when the model is not supported, or does not split so.
    """
    context = replace(
        LayerContext.create(dtype, 1, cpu_platform()),
        group=ParallelGroup(0, num_ranks),
        quant=source.quantization,
        images=True,
        state_dtype=state_dtype,
    )
    wanted = "auto" if source.implementation is None else source.implementation.kind
    model = create_sketch(partial(create_model, source.hf_config, wanted=wanted), source, context)
    text = source.hf_config.get_text_config()
    experts = [module for module in model.modules() if isinstance(module, FusedMoE)]
    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    of_experts, of_embeddings = _bytes_of(*experts), _bytes_of(*embeddings)
    of_encoder = 0 if model.image_encoder is None else _bytes_of(model.image_encoder)
    num_experts = experts[0].num_experts if experts else 0
    is_tied = not any(True for _ in model.output_head.parameters())
    meta = torch.device("meta")
    cache = PagedCache(attention_layers(model), _BLOCK, cache_dtype, meta)
    layers = recurrent_layers(model)
    states = [StatePool(layers, 1, drafts, meta).row_bytes for drafts in (0, 1)]
    return RankSizes(
        embedding=0 if is_tied else of_embeddings,
        expert=of_experts // num_experts if experts else 0,
        num_experts=num_experts,
        top_k=int(text.num_experts_per_tok) if experts else 0,
        encoder=of_encoder,
        rest=_bytes_of(model) - of_experts - of_encoder - (0 if is_tied else of_embeddings),
        cached_token=cache.compute_block_bytes() // _BLOCK,
        num_layers=int(text.num_hidden_layers),
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        state=states[0],
        state_of_draft=states[1] - states[0],
    )


def _bytes_of(*modules: nn.Module) -> int:
    return sum(parameter.nbytes for module in modules for parameter in module.parameters())
