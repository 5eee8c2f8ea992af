"""The loss of all drafting steps, readable: what `chunked` must agree with."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..contracts.algorithm import Pairs, Step
from ..contracts.objective import CrossEntropy, ObjectiveBase, RowObjective, Spelt
from .teachers import Supervisor

METRICS = ("count", "correct", "accepted", "cross_entropy")
"""The metrics of a `Step`, in order."""


class Head(Protocol):
    """The part of a draft that a loss reads."""

    draft_ids: Any

    def compute_logits(self, hidden_BQD: Tensor) -> Tensor:
        """See `DraftModel.compute_logits`."""


def reference(
    draft: Head,
    states: Iterable[Tensor],
    teacher: Supervisor,
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    objective: ObjectiveBase = CrossEntropy(),
    pairs: Pairs | None = None,
) -> Step:
    """`Σ_k Σ_n weights[k][n] · objective(teacher, draft)`, and the metrics of every step.

    Per drafting step k: `states[k]` [N_k, D] draft states, `rows[k]` [N_k] the teacher row each one is held against, `weights[k]`
    [N_k], or one for all, already carrying the step's weight and its denominator. A row whose teacher's top token the draft cannot
    name has no loss, and counts as a miss. Any reduction is a choice of weights. Metrics (sums over rows, [K]): `count`, `correct` (no
    token is likelier to the draft than the teacher's top one), `accepted` (Σ min(p, q) over the target's vocabulary: the chance that
    speculative sampling accepts), `cross_entropy` (unweighted, whatever the objective).
    Nothing follows from `pairs`: an order of work.
    """
    states, draft_ids_W, acceptance = list(states), draft.draft_ids, []
    total = states[0].new_zeros((), dtype=torch.float32)
    sums: dict[str, list[Tensor]] = {name: [] for name in METRICS}
    for state_ND, rows_N, weight_N in zip(states, rows, weights, strict=True):
        log_q_NW = draft.compute_logits(state_ND).float().log_softmax(-1)
        taught = teacher.at(rows_N, draft_ids_W)
        p_NW, mass_N, top_N = taught.probabilities(torch.arange(len(rows_N)), len(draft_ids_W)), taught.mass_R, taught.top_R
        nameable_N = top_N >= 0
        spelt = Spelt(log_q_NW, p_NW, mass_N, taught.text_R)
        loss_N = objective.of(spelt).loss_N if RowObjective.by_rows(objective) else objective.loss(log_q_NW, p_NW, mass_N)
        total = total + (weight_N * nameable_N * loss_N).sum()
        with torch.no_grad():
            sums["count"].append(torch.full_like(total, len(rows_N)))
            peak_N, own_N = log_q_NW.amax(-1), log_q_NW.gather(1, top_N.clamp(min=0)[:, None])[:, 0]
            sums["correct"].append((nameable_N & (own_N >= peak_N)).sum().float())
            acceptance.append(spelt.acceptance_N)
            sums["accepted"].append(acceptance[-1].sum())
            sums["cross_entropy"].append((nameable_N * -(p_NW * log_q_NW).sum(-1)).sum())
    return Step(total, {name: torch.stack(values) for name, values in sums.items()}, acceptance)
