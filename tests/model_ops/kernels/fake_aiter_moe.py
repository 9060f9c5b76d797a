"""What the fake aiter's routing and experts check and compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from fake_aiter_layouts import shuffled_weight, unshuffled_weight

if TYPE_CHECKING:
    from fake_aiter import Check


def _outputs(check: Check, ids: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    weights = check.tensor("topk_weights", "T K", torch.float32)
    return weights, check.integers(ids, "T K"), check.sizes["K"]


def _best_groups(check: Check, choice: torch.Tensor, best: int) -> torch.Tensor:
    """`choice` with everything outside of each row's best groups at 0."""
    groups = check.value("num_expert_group")
    check.that(groups in (1, 2, 4, 8), "numbers of groups that it is compiled for")
    grouped = choice.view(len(choice), groups, -1)
    scores = grouped.topk(min(best, grouped.shape[2]), dim=-1).values.sum(-1)
    chosen = scores.topk(check.value("topk_group"), dim=-1).indices
    mask = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
    return (grouped * mask[..., None]).flatten(1)


def _choose(check: Check, ids_name: str, scores: torch.Tensor, choice: torch.Tensor) -> None:
    weights, ids, k = _outputs(check, ids_name)
    chosen = choice.topk(k, dim=-1).indices
    kept = scores.gather(1, chosen)
    if check.value("need_renorm"):
        kept = kept / kept.sum(-1, keepdim=True)
    weights.copy_(kept)
    ids.copy_(chosen)


def biased_grouped_topk(check: Check) -> None:
    logits = check.tensor("gating_output", "T E", torch.float32)
    bias = check.tensor("correction_bias", "E", torch.float32)
    scores = logits.sigmoid()
    _choose(check, "topk_ids", scores, _best_groups(check, scores + bias, 2))
    check.value("topk_weights").mul_(check.value("routed_scaling_factor"))


def grouped_topk(check: Check) -> None:
    logits = check.tensor("gating_output", "T E", torch.float32)
    scores = logits.softmax(-1) if check.value("is_softmax") else logits.sigmoid()
    _choose(check, "topk_ids", scores, _best_groups(check, scores, 1))
    check.value("topk_weights").mul_(check.value("routed_scaling_factor"))


def topk_softmax(check: Check) -> None:
    scores = check.tensor("gating_output", "T E", torch.float32).softmax(-1)
    check.integers("token_expert_indices", "T K")
    _choose(check, "topk_indices", scores, scores)


def shuffle_weight(check: Check) -> torch.Tensor:
    x = check.value("x")
    check.that(x.dim() in (2, 3) and check.value("layout") == (16, 16), "the layout of all kernels")
    check.that(x.shape[-2] % 16 == 0 and x.shape[-1] % 32 == 0, "whole tiles")
    out = shuffled_weight(x)
    out.is_shuffled = True  # type: ignore[attr-defined]
    return out


def fused_moe(check: Check) -> torch.Tensor:
    """Reads the weights as shuffled, marked or not: the mark only chooses between kernels."""
    x = check.activation("hidden_states", "T H")
    w1, w2 = check.activation("w1", "E W H"), check.activation("w2", "E H I")
    weights = check.tensor("topk_weight", "T K", torch.float32)
    ids = check.integers("topk_ids", "T K")
    sizes = check.sizes
    check.that(sizes["W"] == 2 * sizes["I"], "gate above up")
    check.that(sizes["H"] % 64 == 0 and sizes["I"] % 64 == 0, "whole steps")
    w1, w2 = unshuffled_weight(w1).float(), unshuffled_weight(w2).float()
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in ids.unique().tolist():
        tokens, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens].float(), w1[expert]).chunk(2, dim=-1)
        result = F.linear(F.silu(gate) * up, w2[expert])
        out.index_add_(0, tokens, result * weights[tokens, place, None])
    return out.to(x.dtype)


KERNELS: dict[str, Callable[[Any], Any]] = {
    kernel.__name__: kernel
    for kernel in (
        biased_grouped_topk,
        grouped_topk,
        topk_softmax,
        shuffle_weight,
        fused_moe,
    )
}
