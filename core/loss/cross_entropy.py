"""The loss of all drafting steps in one call, so that a fused kernel can take its place without touching an algorithm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ..contracts.algorithm import Step
from ..contracts.signal import Signal

METRICS = ("count", "correct", "accepted", "cross_entropy")
"""The metrics of a `Step`, in order."""


class Supervisor(Protocol):
    """What R rows of draft states are held against; a row may serve several drafting steps."""

    @property
    def top_R(self) -> Tensor:
        """The token a greedy target emits, as a target id."""
        ...

    def probabilities(self, rows_N: Tensor, draft_ids_W: Tensor) -> Tensor:
        """What the draft is to learn over its vocabulary, at some of the rows; float32 [N, W], as a rule summing to one."""
        ...

    def mass(self, rows_N: Tensor) -> Tensor:
        """How much of the whole distribution the draft's vocabulary holds, [N]."""
        ...


@dataclass(frozen=True)
class Teacher:
    """The target's word on R rows."""

    logits_RW: Tensor
    """Its logits over the draft vocabulary, float32."""
    top_R: Tensor
    """Its most likely token, as a target id."""
    logsumexp_R: Tensor
    """Its normaliser over the full vocabulary."""

    @classmethod
    @torch.no_grad()
    def of(cls, signal: Signal, rows_R: Tensor, draft_ids_W: Tensor) -> "Teacher":
        """The teacher at `rows_R`, the plan's `teacher_rows` (indices into the flattened [B·S])."""
        hidden_RT = signal.hidden_BST.flatten(0, 1)[rows_R]
        return cls(signal.head(hidden_RT, draft_ids_W), signal.top_R, signal.logsumexp_R)

    def probabilities(self, rows_N: Tensor, draft_ids_W: Tensor) -> Tensor:
        """See `Supervisor`; the softmax is taken once for all R rows."""
        return self._softmax_RW[rows_N]

    def mass(self, rows_N: Tensor) -> Tensor:
        """See `Supervisor`."""
        return self._mass_R[rows_N]

    @cached_property
    def _softmax_RW(self) -> Tensor:
        return self.logits_RW.softmax(-1)

    @cached_property
    def _mass_R(self) -> Tensor:
        return (self.logits_RW.logsumexp(-1) - self.logsumexp_R).exp()


@dataclass(frozen=True)
class Labels:
    """The text itself as the teacher: all mass on the token that follows (hard-label cross-entropy)."""

    top_R: Tensor
    """The token, as a target id."""

    def probabilities(self, rows_N: Tensor, draft_ids_W: Tensor) -> Tensor:
        """See `Supervisor`; zero where the draft cannot name the token."""
        return (draft_ids_W == self.top_R[rows_N, None]).float()

    def mass(self, rows_N: Tensor) -> Tensor:
        """See `Supervisor`."""
        return torch.ones_like(rows_N, dtype=torch.float32)


def step_weights(steps: int, decay: float) -> list[float]:
    """decay^k / Σ decay^j: what each drafting step weighs (EAGLE-3's 0.8)."""
    total = sum(decay**k for k in range(steps))
    return [decay**k / total for k in range(steps)]


def cross_entropy(
    states: Sequence[Tensor],
    compute_logits: Callable[[Tensor], Tensor],
    teacher: Supervisor,
    teacher_rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    draft_ids_W: Tensor,
) -> Step:
    """`Σ_k Σ_n weights[k][n] · CE(teacher ‖ draft)`, and the metrics of every step.

    Per drafting step k: `states[k]` [N_k, D] draft states, `teacher_rows[k]` [N_k] the teacher row each one is held
    against, `weights[k]` [N_k] already carrying the step's weight and its denominator. A row whose teacher's top token
    the draft cannot name has no loss, and counts as a miss. Any reduction is a choice of weights; KL = CE minus the teacher's
    entropy, a constant. Metrics (sums over rows, [K]): `count`, `correct` (top tokens agree), `accepted` (Σ min(p, q) over the
    target's vocabulary: the chance that speculative sampling accepts), `cross_entropy` (unweighted).
    """
    total = states[0].new_zeros((), dtype=torch.float32)
    sums: dict[str, list[Tensor]] = {name: [] for name in METRICS}
    for state_ND, rows_N, weight_N in zip(states, teacher_rows, weights, strict=True):
        log_q_NW = compute_logits(state_ND).float().log_softmax(-1)
        p_NW = teacher.probabilities(rows_N, draft_ids_W)
        top_N = teacher.top_R[rows_N]
        nameable_N = draft_ids_W[torch.searchsorted(draft_ids_W, top_N).clamp(max=len(draft_ids_W) - 1)] == top_N
        cross_entropy_N = -(p_NW * log_q_NW).sum(-1)
        total = total + (weight_N * nameable_N * cross_entropy_N).sum()
        with torch.no_grad():
            p_NW = p_NW * teacher.mass(rows_N)[:, None]
            sums["count"].append(torch.full_like(total, len(rows_N)))
            sums["correct"].append((draft_ids_W[log_q_NW.argmax(-1)] == top_N).sum().float())
            sums["accepted"].append(torch.minimum(p_NW, log_q_NW.exp()).sum())
            sums["cross_entropy"].append((nameable_N * cross_entropy_N).sum())
    return Step(total, {name: torch.stack(values) for name, values in sums.items()})


def estimated_tau(acceptance: Sequence[float]) -> float:
    """Tokens per target pass if step k is accepted with `acceptance[k]`: 1 + Σ_k Π_{i≤k} α_i (the bonus token included)."""
    tau, survives = 1.0, 1.0
    for alpha in acceptance:
        survives *= alpha
        tau += survives
    return tau
