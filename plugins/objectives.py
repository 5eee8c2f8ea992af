"""What a draft may be asked to minimise, beside cross-entropy."""

from typing import Any

import torch
from torch import Tensor

from foredraft import hookimpl
from foredraft.contracts.objective import ObjectiveBase
from foredraft.loss import CrossEntropy


class ForwardKL(CrossEntropy):
    """KL(p ‖ q): cross-entropy less the teacher's entropy; the same gradient, and 0 at best."""

    name = "kl"
    summary = "KL divergence from the teacher"

    def loss(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor) -> Tensor:
        """See `ObjectiveBase`."""
        return (torch.xlogy(p_NW, p_NW) - p_NW * log_q_NW).sum(-1)


class TotalVariation(ObjectiveBase):
    """½ Σ |p - q| over the target's whole vocabulary, which is 1 - α: the chance that speculative sampling rejects."""

    name = "tv"
    summary = "total variation: the chance of a rejection"

    def loss(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor) -> Tensor:
        """See `ObjectiveBase`."""
        return 1 - acceptance(log_q_NW, p_NW, mass_N)


class NegativeLogAcceptance(ObjectiveBase):
    """-log α, α = Σ min(p, q) the chance that speculative sampling accepts."""

    name = "nla"
    summary = "negative logarithm of the chance of acceptance"

    def loss(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor) -> Tensor:
        """See `ObjectiveBase`."""
        return -acceptance(log_q_NW, p_NW, mass_N).clamp(min=1e-12).log()


def acceptance(log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor) -> Tensor:
    """α of each row, [N]."""
    return torch.minimum(p_NW * mass_N[:, None], log_q_NW.exp()).sum(-1)


@hookimpl
def foredraft_objectives() -> list[type[Any]]:
    """The objectives of this file, and core's."""
    return [CrossEntropy, ForwardKL, TotalVariation, NegativeLogAcceptance]
