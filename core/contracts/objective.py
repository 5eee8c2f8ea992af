"""The contract of objectives: what a draft's distribution costs, given what it is taught."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from .plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor


class ObjectiveBase(Plugin):
    """A loss per row. Its gradient is taken chunk by chunk, by autograd unless `differentiated` is overridden."""

    @abstractmethod
    def loss(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor) -> Tensor:
        """The loss of each row [N], from the draft's log-probabilities and what it is taught over its vocabulary, all float32.

        `p_NW` as a rule sums to one; times `mass_N`, the part of the target's distribution that the vocabulary holds, it is that part.
        """

    def differentiated(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each row [N], and the gradient of `Σ weight · loss` by the log-probabilities, [N, W]."""
        import torch

        with torch.enable_grad():
            log_q_NW = log_q_NW.detach().requires_grad_()
            loss_N = self.loss(log_q_NW, p_NW, mass_N)
            (gradient_NW,) = torch.autograd.grad((weight_N * loss_N).sum(), log_q_NW)
        return loss_N.detach(), gradient_NW
