"""What the op table asks of the kernels of a mixture of experts; needs no Triton."""

from __future__ import annotations

import torch

from atom.model_ops.kernels.torch.moe import MoEExpertsOp, MoERouteOp
from atom.model_ops.registry import OpQuery

MAX_EXPERTS = 512
MAX_TOP_K = 16


def refuses_route(query: OpQuery) -> str | None:
    """Beyond float32, 512 experts or 16 a token."""
    if query.dtype != torch.float32:
        return f"logits in {query.dtype}, not float32"
    if query.shape["top_k"] > MAX_TOP_K:
        return f"{query.shape['top_k']} experts a token, at most {MAX_TOP_K}"
    return refuses_experts(query)


def refuses_experts(query: OpQuery) -> str | None:
    """Beyond 512 experts."""
    if query.shape["num_experts"] > MAX_EXPERTS:
        return f"{query.shape['num_experts']} experts, at most {MAX_EXPERTS}"
    return None


def load_route() -> MoERouteOp:
    from atom.model_ops.kernels.triton.moe_route import moe_route

    return moe_route


def load_experts() -> MoEExpertsOp:
    from atom.model_ops.kernels.triton import moe_experts

    return moe_experts.load()
