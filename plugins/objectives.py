"""What a draft may be asked to minimise, beside cross-entropy."""

from typing import Any

import torch
from torch import Tensor

from foredraft import hookimpl
from foredraft.contracts.objective import Cost, ObjectiveBase, RowObjective, Sums
from foredraft.loss import CrossEntropy

# Below it α is not told from nothing, and its logarithm is flat.
LEAST = 1e-12


class ForwardKL(RowObjective):
    """KL(p ‖ q): cross-entropy less the teacher's entropy; the same gradient, and 0 at best."""

    name = "kl"
    summary = "KL divergence from the teacher"

    def of(self, sums: Sums) -> Cost:
        """See `RowObjective`."""
        return Cost(sums.cross_entropy_N - sums.entropy_N, torch.ones_like(sums.cross_entropy_N))


class Text(RowObjective):
    """-log q of the token that the text goes on with, whatever the target says: {text: 0.1, tv: 1.8} is DSpark's loss."""

    name = "text"
    summary = "cross-entropy against the text's own token"
    needs_teacher = False

    def of(self, sums: Sums) -> Cost:
        """See `RowObjective`."""
        return Cost(sums.text_N, by_text_N=torch.ones_like(sums.text_N))


class TotalVariation(RowObjective):
    """½ Σ |p - q| over the target's whole vocabulary, which is 1 - α: the chance that speculative sampling rejects."""

    name = "tv"
    summary = "total variation: the chance of a rejection"

    def of(self, sums: Sums) -> Cost:
        """See `RowObjective`."""
        return Cost(1 - sums.acceptance_N, by_acceptance_N=-torch.ones_like(sums.acceptance_N))


class NegativeLogAcceptance(RowObjective):
    """-log α, α the chance that speculative sampling accepts (LK-α of arXiv:2602.23881)."""

    name = "nla"
    summary = "negative logarithm of the chance of acceptance"

    def of(self, sums: Sums) -> Cost:
        """See `RowObjective`."""
        alpha_N = sums.acceptance_N.clamp(min=LEAST)
        return Cost(-alpha_N.log(), by_acceptance_N=(sums.acceptance_N > LEAST) / -alpha_N)


class LikelihoodAndKL(RowObjective):
    """λ KL(p ‖ q) + (1 - λ)(1 - α), λ = exp(-3 α) of each row, a constant to the gradient (LK-λ of arXiv:2602.23881, its η and scale).

    KL starts a draft that accepts nothing, total variation finishes one that accepts a lot. α is that of all objectives here: over
    the target's whole vocabulary, of which the draft's holds a part; the paper's code has it over the draft's vocabulary alone.
    """

    name = "lk"
    summary = "KL divergence while little is accepted, total variation as more is"

    def of(self, sums: Sums) -> Cost:
        """See `RowObjective`."""
        share_N = (-3 * sums.acceptance_N.detach()).exp()
        loss_N = share_N * (sums.cross_entropy_N - sums.entropy_N) + (1 - share_N) * (1 - sums.acceptance_N)
        return Cost(loss_N, share_N, share_N - 1)


class LikeliestTen(ObjectiveBase):
    """-Σ p log q over the teacher's ten likeliest tokens, p as it is (HASS, arXiv:2408.15766, section 3.1, its K)."""

    name = "top10"
    summary = "cross-entropy against the teacher over its ten likeliest tokens alone"

    def loss(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor) -> Tensor:
        """See `ObjectiveBase`."""
        p_N10, at_N10 = p_NW.topk(min(10, p_NW.shape[1]))
        return -(p_N10 * log_q_NW.gather(1, at_N10)).sum(-1)


@hookimpl
def foredraft_objectives() -> list[type[Any]]:
    """The objectives of this file, and core's."""
    return [CrossEntropy, ForwardKL, Text, TotalVariation, NegativeLogAcceptance, LikelihoodAndKL, LikeliestTen]
