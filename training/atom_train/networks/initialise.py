"""Initial weights of a draft: the best linear prediction of the target's next final state.

A few columns of the aux states are very large; an optimiser with similar step sizes for all weights
(Adam) would destroy the information in the small ones. So the states are whitened for training, and
the whitening is folded into `fc` at export.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from atom.models.eagle3.config import Eagle3Config
from atom_train.networks.block_network import TrainingBlockDraft
from atom_train.networks.network import MultiHeadAttention, TrainingDraft

logger = logging.getLogger(__name__)

_RIDGE = 3e-3
_WHITENING_DAMPING = 0.01
# The first rows of all texts are alike (the chat template) and would dominate the fit.
SKIPPED_ROWS = 24


def whitening_matrix(aux: torch.Tensor) -> torch.Tensor:
    """[width, width] matrix that maps states [N, width] to nearly uncorrelated ones of unit
    variance.
    """
    scale = aux.pow(2).mean(0).sqrt() + 1e-6
    scaled = aux / scale
    values, vectors = torch.linalg.eigh(scaled.T @ scaled / len(aux))
    spread = (values.clamp(min=0) + _WHITENING_DAMPING).sqrt()
    matrix: torch.Tensor = (vectors / spread) / scale[:, None]
    return matrix


def unfold_whitening(fc: torch.Tensor, whitening: torch.Tensor | None) -> torch.Tensor:
    """The `fc` [hidden, width] of whitened states that computes what `fc` does of the states."""
    if whitening is None:
        return fc
    unfolded: torch.Tensor = torch.linalg.solve(whitening.double(), fc.T.double()).T
    return unfolded.float().contiguous()


class LinearGuess:
    """Least squares from [aux_t, normed embedding of token t + 1] to the final state at t + 1."""

    def __init__(self, aux_width: int, hidden_size: int) -> None:
        width = aux_width + hidden_size
        self._aux_width = aux_width
        self._products = torch.zeros(width, width)
        self._answers = torch.zeros(width, hidden_size)
        self._energy = torch.zeros(hidden_size)
        self._count = 0

    def add(self, aux: torch.Tensor, embeds: torch.Tensor, states: torch.Tensor) -> None:
        """[N, aux_width], [N, hidden], [N, hidden], in float32."""
        inputs = torch.cat((aux, F.rms_norm(embeds, (embeds.shape[1],), None, 1e-6)), dim=1)
        self._products += inputs.T @ inputs
        self._answers += inputs.T @ states
        self._energy += states.pow(2).sum(0)
        self._count += len(states)

    def solve(self) -> tuple[torch.Tensor, torch.Tensor, float, float]:
        """Matrices [hidden, aux_width] and [hidden, hidden], R^2, and the rms of the
        predictions.
        """
        scale = self._products.diagonal().div(self._count).sqrt() + 1e-6
        scaled = (self._products / scale / scale[:, None]).double()
        ridge = _RIDGE * self._count * torch.eye(len(scale), dtype=torch.float64)
        answers = (self._answers / scale[:, None]).double()
        weights = torch.linalg.solve(scaled + ridge, answers)
        energy = self._energy.double().sum()
        guessed = (weights * (scaled @ weights)).sum()
        residual = energy - 2 * (weights * answers).sum() + guessed
        rms = float((guessed / (self._count * weights.shape[1])).sqrt())
        weights = (weights.float() / scale[:, None]).T
        r2 = 1 - float(residual / energy)
        return weights[:, : self._aux_width], weights[:, self._aux_width :], r2, rms


@torch.no_grad()
def initialise(
    draft: TrainingDraft,
    guess: LinearGuess,
    final_norm: torch.Tensor,
    head: torch.Tensor,
    mlp: Mapping[str, torch.Tensor] | None,
    generator: torch.Generator,
) -> None:
    """Set the draft's weights so that its first step is the linear prediction.

    The aux part becomes `fc`. With MHA, the embedding part becomes the value and output projections
    of heads that attend to their own row; an MLA draft learns it. The MLP's output is zero at
    first.

    Args:
        final_norm: [hidden], the target's final norm; the prediction is of states divided by it.
        head: [draft vocab, hidden], the target's output rows.
        mlp: `gate_proj` and `up_proj` of a target layer of the same width; random if None.
    """
    from_embedding = start_at_guess(draft, guess, final_norm, head, generator)
    layer = draft.midlayer
    layer.mlp.down_proj.weight.zero_()
    if mlp is not None:
        layer.mlp.gate_proj.weight.copy_(mlp["gate_proj"])
        layer.mlp.up_proj.weight.copy_(mlp["up_proj"])
    layer.self_attn.o_proj.weight.mul_(0.5)
    if isinstance(layer.self_attn, MultiHeadAttention):
        _let_heads_carry(layer.self_attn, draft.config, from_embedding, generator)


def start_at_guess(
    draft: TrainingDraft | TrainingBlockDraft,
    guess: LinearGuess,
    final_norm: torch.Tensor,
    head: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """Set `fc`, head and norm, and all other weights at random.

    Returns the embedding's part of the guess [hidden, hidden], which is left to do.
    """
    from_aux, from_embedding, r2, rms = guess.solve()
    logger.info("least squares: R^2 %.3f", r2)
    for name, weight in draft.named_parameters():
        if weight.dim() == 2:
            weight.normal_(0, 0.02, generator=generator)
        elif not name.endswith("norm.weight"):
            weight.zero_()
    draft.fc.weight.copy_(unfold_whitening(from_aux, draft.whitening))
    draft.lm_head.weight.copy_(head)
    # Predictions are shorter than the states; the norm must not lengthen them.
    draft.norm.weight.copy_(final_norm * rms)
    return from_embedding


def _let_heads_carry(
    attention: MultiHeadAttention,
    config: Eagle3Config,
    from_embedding: torch.Tensor,
    generator: torch.Generator,
) -> None:
    """Split a matrix [hidden, hidden] by SVD over heads that attend to their own row.

    Queries and keys are the embedding itself, which is most similar to itself. Two thirds of the
    heads are used; the others stay free.
    """
    size, heads = config.hidden_size, config.network.num_attention_heads
    if config.network.num_key_value_heads != heads:
        return
    dim = attention.k_proj.weight.shape[0] // heads
    rank = min(size, dim * max(1, 2 * heads // 3))
    u, values, vh = torch.linalg.svd(from_embedding)
    root = values[:rank].sqrt()
    same = torch.eye(rank, size)
    for projection, part in (
        (attention.q_proj, same),
        (attention.k_proj, same),
        (attention.v_proj, root[:, None] * vh[:rank]),
    ):
        projection.weight[:rank] = torch.cat((part, torch.zeros(rank, size)), dim=1)
        if projection is not attention.v_proj:
            projection.weight[:rank, size:].normal_(0, 0.02, generator=generator)
    attention.o_proj.weight[:, :rank] = u[:, :rank] * root
