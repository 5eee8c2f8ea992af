"""The contract of objectives: what a draft's distribution costs, given what it is taught."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard

from ..errors import ForedraftError
from .plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor


class ObjectiveBase(Plugin):
    """A loss per row. Its gradient is taken chunk by chunk, by autograd unless `differentiated` is overridden."""

    needs_teacher: bool = True
    """Whether it reads the target's distribution; without, the text alone may teach."""

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


class Sums(Protocol):
    """What `RowObjective`s read of N rows, float32 [N] each."""

    @property
    def cross_entropy_N(self) -> Tensor:
        """-Σ p log q."""

    @property
    def entropy_N(self) -> Tensor:
        """-Σ p log p, of what is taught; worked out if it is asked for."""

    @property
    def acceptance_N(self) -> Tensor:
        """α = Σ min(p · mass, q): the chance that speculative sampling accepts, over the target's whole vocabulary."""

    @property
    def text_N(self) -> Tensor:
        """-log q of the text's own token, 0 where the draft cannot name it. Raises `ForedraftError` where the text is not known."""


@dataclass(frozen=True)
class Cost:
    """A loss of N rows, [N], and its derivatives, [N] each; None where it does not depend on the one or the other."""

    loss_N: Tensor
    by_cross_entropy_N: Tensor | None = None
    by_acceptance_N: Tensor | None = None
    by_text_N: Tensor | None = None


class RowObjective(ObjectiveBase):
    """A loss that is a function of each row's cross-entropy and acceptance, and of what it says of the text's own token.

    Its gradient is known in closed form, so that it needs no tensor [N, W] but the logits, in whose place it is written; on CUDA
    by a kernel. A subclass that overrides `loss` is differentiated as any other objective.
    """

    @abstractmethod
    def of(self, sums: Sums) -> Cost:
        """Loss and derivatives. What is written as a constant (`detach`) must be one in the derivatives, too."""

    @classmethod
    def by_rows(cls, objective: ObjectiveBase) -> TypeGuard[RowObjective]:
        """Whether the objective is all that its `of` says."""
        return isinstance(objective, cls) and type(objective).loss is RowObjective.loss

    def loss(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor) -> Tensor:
        """See `ObjectiveBase`."""
        return self.of(Spelt(log_q_NW, p_NW, mass_N)).loss_N


class CrossEntropy(RowObjective):
    """-Σ p log q. KL divergence is this less the teacher's entropy, a constant: its gradient is the same."""

    name = "ce"
    summary = "cross-entropy against the teacher"

    def of(self, sums: Sums) -> Cost:
        """See `RowObjective`."""
        return Cost(sums.cross_entropy_N, sums.cross_entropy_N.new_ones(sums.cross_entropy_N.shape))


@dataclass(frozen=True)
class Spelt:
    """`Sums` as they are defined, for autograd to differentiate."""

    log_q_NW: Tensor
    p_NW: Tensor
    mass_N: Tensor
    named_N: Tensor | None = None
    """The text's own token as a draft id, -1 where it has none; None: not known."""

    @property
    def cross_entropy_N(self) -> Tensor:
        return -(self.p_NW * self.log_q_NW).sum(-1)

    @property
    def entropy_N(self) -> Tensor:
        return -self.p_NW.xlogy(self.p_NW).sum(-1)

    @property
    def acceptance_N(self) -> Tensor:
        import torch

        return torch.minimum(self.p_NW * self.mass_N[:, None], self.log_q_NW.exp()).sum(-1)

    @property
    def text_N(self) -> Tensor:
        named_N = known(self.named_N)
        return -((named_N >= 0) * self.log_q_NW.gather(1, named_N.clamp(min=0)[:, None])[:, 0])


def known(text_N: Tensor | None) -> Tensor:
    """What was said of the text. Raises `ForedraftError` where nothing was."""
    if text_N is None:
        raise ForedraftError("an objective reads the text's own tokens, of which this algorithm's teacher does not know: choose another")
    return text_N
