"""The decoder layers of a block drafter."""

from __future__ import annotations

import torch
from torch import nn

from atom.model_ops.attention.block import BlockAttention, BlockMLAAttention
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import ResidualRMSNorm, RMSNorm
from atom.model_ops.linear import (
    ColumnParallelLinear,
    KVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from atom.model_ops.rotary import AttentionInputs
from atom.models.block_draft.config import BlockConv, BlockDraftConfig
from atom.models.config.model_config import PretrainedConfig
from atom.models.llama import LlamaMLP
from atom.models.moe.deepseek_v2 import DeepseekV2Attention


class BlockDraftAttention(nn.Module):
    """Qwen3's attention, whose context is projected from other states than its queries.

    Its output is a sum over the ranks.
    """

    def __init__(
        self, config: BlockDraftConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__()
        network, mask = config.network, config.masks[layer_id]
        size, heads, dim = config.hidden_size, network.num_attention_heads, network.head_dim
        bias, self._value_scale = network.attention_bias, config.value_scale
        num_heads = context.group.divide(heads, "num_attention_heads")
        self.q_proj = ColumnParallelLinear(size, heads * dim, bias, context, f"{prefix}.q_proj")
        self.kv_proj = KVParallelLinear(
            size, dim, network.num_key_value_heads, bias, context, f"{prefix}.kv_proj"
        )
        self.o_proj = RowParallelLinear(heads * dim, size, bias, context, f"{prefix}.o_proj")
        self.q_norm = RMSNorm(dim, network.rms_norm_eps, context)
        self.k_norm = RMSNorm(dim, network.rms_norm_eps, context)
        self.attn = BlockAttention(
            num_heads, self.kv_proj.num_kv_heads, dim, context, mask.window, mask.causal
        )

    def forward(self, x: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        q = self.q_norm(self.q_proj(x).view(x.shape[0], -1, self.attn.head_dim))
        k, v = self._keys_and_values(x)
        out: torch.Tensor = self.o_proj(self.attn(q, k, v, inputs))
        return out

    def write_context(self, states: torch.Tensor, inputs: AttentionInputs) -> None:
        """Write the keys and values of rows that the target computed, states [T, hidden]."""
        k, v = self._keys_and_values(states)
        self.attn.write(k, v, inputs)

    def _keys_and_values(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.kv_proj.split(self.kv_proj(x))
        if self._value_scale != 1:
            v = v * self._value_scale
        return self.k_norm(k), v


class LatentBlockAttention(DeepseekV2Attention):
    """Latent attention of a block; its context is projected from other states than its queries."""

    mla_class = BlockMLAAttention

    @staticmethod
    def latent_eps(config: PretrainedConfig) -> float:
        return float(config.rms_norm_eps)

    def write_context(self, states: torch.Tensor, inputs: AttentionInputs) -> None:
        """Write the latents of rows that the target computed, states [T, hidden]."""
        self.write_kv(states, inputs)


class ResidualConv(nn.Module):
    """A causal convolution along the block before a sublayer, and another after it.

    Their coefficients are the learned ones plus some that the sublayer's input makes.
    Source: the DFlash2 checkpoints.
    """

    def __init__(
        self, hidden_size: int, conv: BlockConv, block_size: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__()
        self._taps, self._group, self._block_size = conv.taps, conv.group, block_size
        self.base_kernel = context.empty(2, conv.taps, hidden_size)
        self.kernel_projection = ReplicatedLinear(
            hidden_size,
            2 * conv.taps * hidden_size // conv.group,
            False,
            context,
            f"{prefix}.kernel_projection",
        )

    def coefficients(self, x: torch.Tensor) -> torch.Tensor:
        """The sublayer's input [S * block, hidden] -> [2, S, block, taps, hidden]."""
        made = self.kernel_projection(x).view(
            -1, self._block_size, 2, self._taps, x.shape[1] // self._group
        )
        made = made.repeat_interleave(self._group, dim=-1).permute(2, 0, 1, 3, 4)
        coefficients: torch.Tensor = self.base_kernel[:, None, None] + made
        return coefficients

    def apply_taps(self, coefficients: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[S, block, taps, hidden] and [S * block, hidden] -> [S * block, hidden].

        Rows before a block's first one count as zero.
        """
        rows = x.view(-1, self._block_size, x.shape[1])
        out = coefficients[:, :, 0] * rows
        for tap in range(1, min(self._taps, self._block_size)):
            out[:, tap:] += coefficients[:, tap:, tap] * rows[:, :-tap]
        return out.view_as(x)


class BlockDraftLayer(nn.Module):
    """Attention and MLP with pre-norms; the residual is passed separately, as in Llama's layers."""

    def __init__(
        self, config: BlockDraftConfig, layer_id: int, context: LayerContext, prefix: str
    ) -> None:
        super().__init__()
        network, size = config.network, config.hidden_size
        eps = network.rms_norm_eps
        self.input_layernorm = ResidualRMSNorm(size, eps, context)
        self.self_attn: BlockDraftAttention | LatentBlockAttention
        if config.format.has_latents:
            self.self_attn = LatentBlockAttention(network, layer_id, context, f"{prefix}.self_attn")
        else:
            self.self_attn = BlockDraftAttention(config, layer_id, context, f"{prefix}.self_attn")
        self.mlp = LlamaMLP(network, network.intermediate_size, context, f"{prefix}.mlp")
        self.post_attention_layernorm = ResidualRMSNorm(size, eps, context, self.mlp.reader)
        self.attention_conv: ResidualConv | None = None
        self.mlp_conv: ResidualConv | None = None
        if config.conv is not None:
            args = size, config.conv, config.block_size, context
            self.attention_conv = ResidualConv(*args, f"{prefix}.attention_conv")
            self.mlp_conv = ResidualConv(*args, f"{prefix}.mlp_conv")

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, inputs: AttentionInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From what the layer below returned, or the embedding and None: this rank's part of a sum,
        and the residual, whose sum is the layer's output.
        """
        if residual is None:
            x, residual = self.input_layernorm(hidden), hidden
        else:
            x, residual = self.input_layernorm.add(hidden, residual)
        if self.attention_conv is None or self.mlp_conv is None:
            attended = self.self_attn(x, inputs)
            fed, residual = self.post_attention_layernorm.feed(attended, residual)
            return self.mlp(fed), residual
        before, after = self.attention_conv.coefficients(x)
        x = self.attention_conv.apply_taps(before, x)
        # Linear, so it may be applied to each rank's part of the sum.
        attended = self.self_attn(x, inputs)
        attended = self.attention_conv.apply_taps(after, attended)
        x, residual = self.post_attention_layernorm.add(attended, residual)
        before, after = self.mlp_conv.coefficients(x)
        x = self.mlp(self.mlp_conv.apply_taps(before, x))
        return self.mlp_conv.apply_taps(after, x), residual
