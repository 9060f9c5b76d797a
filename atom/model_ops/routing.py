"""The routing options of a mixture of experts, from the checkpoint's config."""

from __future__ import annotations

from dataclasses import dataclass

SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2_sum")


@dataclass(frozen=True)
class Routing:
    """Attributes:
    num_experts, top_k: number of experts, and of those chosen per token.
    scoring: from logits to scores, `softmax` or `sigmoid`.
    num_groups, top_groups: experts form equal groups; only the best groups are eligible.
    group_score: a group's score is its best expert's (`max`) or the sum of its two best
    (`top2_sum`).
    renormalize: whether the chosen scores are divided by their sum.
    scaling: factor on the resulting weights.
    has_shared: whether every token visits one more expert, with weight 1 and the id after the last.

    Raises:
        ValueError: when the numbers contradict each other.
    """

    num_experts: int
    top_k: int
    scoring: str
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    renormalize: bool = False
    scaling: float = 1.0
    has_shared: bool = False

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise ValueError(
                f"expert scoring must be one of {', '.join(SCORINGS)}; got {self.scoring!r}"
            )
        if self.group_score not in GROUP_SCORES:
            raise ValueError(
                f"group score must be one of {', '.join(GROUP_SCORES)}; got {self.group_score!r}"
            )
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts do not split into n_group={self.num_groups} groups"
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"topk_group={self.top_groups} must be 1 to n_group={self.num_groups}")
        eligible = self.top_groups * self.group_size
        if not 1 <= self.top_k <= eligible:
            raise ValueError(
                f"num_experts_per_tok={self.top_k} must be 1 to {eligible}, the experts of "
                f"topk_group={self.top_groups} groups of {self.group_size}"
            )
        if self.group_score == "top2_sum" and self.num_groups > 1 and self.group_size < 2:
            raise ValueError(
                f"groups are scored by their two best experts, but n_group={self.num_groups} "
                f"leaves {self.group_size} in a group"
            )

    @property
    def visits(self) -> int:
        """Experts that a token visits."""
        return self.top_k + self.has_shared

    @property
    def group_size(self) -> int:
        return self.num_experts // self.num_groups
