"""Loss, metrics and gradient of some rows of draft logits, in plain torch: what the kernels must agree with."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contracts.objective import ObjectiveBase, RowObjective, known
from .teachers import Taught, in_pieces, softmax_and_total


@dataclass(frozen=True)
class Against:
    """What N rows of draft logits are held against."""

    taught: Taught
    rows_N: Tensor
    """The row of `taught` for each."""
    weight_N: Tensor
    """What its loss weighs, float32."""
    objective: ObjectiveBase

    def __getitem__(self, part: slice) -> "Against":
        return Against(self.taught, self.rows_N[part], self.weight_N[part], self.objective)

    @cached_property
    def top_N(self) -> Tensor:
        """See `Taught`."""
        return self.taught.top_R[self.rows_N]

    @cached_property
    def mass_N(self) -> Tensor:
        """See `Taught`."""
        return self.taught.mass_R[self.rows_N]

    @cached_property
    def total_N(self) -> Tensor:
        """See `Taught`."""
        return self.taught.total_R[self.rows_N]

    @cached_property
    def text_N(self) -> Tensor | None:
        """See `Taught`."""
        return None if self.taught.text_R is None else self.taught.text_R[self.rows_N]

    def probabilities(self, part: slice, width: int) -> Tensor:
        """See `Taught`, of some of the rows: a copy."""
        return self.taught.probabilities(self.rows_N[part], width)

    def logits_of_text(self, logits_NW: Tensor) -> Tensor | None:
        """Those of the text's own tokens, [N] float32."""
        return None if self.text_N is None else of_token(logits_NW, self.text_N).float()


class Found(NamedTuple):
    """Of N rows, float32 [N] each."""

    loss_N: Tensor
    correct_N: Tensor
    accepted_N: Tensor
    cross_entropy_N: Tensor


@dataclass(frozen=True)
class RowSums:
    """See `Sums`."""

    against: Against
    cross_entropy_N: Tensor
    acceptance_N: Tensor
    normaliser_N: Tensor
    logits_of_text_N: Tensor | None

    @property
    def entropy_N(self) -> Tensor:
        """See `Sums`."""
        return self.against.taught.entropy_R[self.against.rows_N]

    @property
    def text_N(self) -> Tensor:
        """See `Sums`."""
        return (known(self.against.text_N) >= 0) * (self.normaliser_N - known(self.logits_of_text_N))

    def cost(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The loss, and its derivatives times the rows' weights, [N] each; that by `text_N` is 0 where there is no such token."""
        assert isinstance(self.against.objective, RowObjective)
        cost = self.against.objective.of(self)
        weight_N = self.against.weight_N
        d_text_N = None if cost.by_text_N is None else cost.by_text_N * (known(self.against.text_N) >= 0)
        derivatives = (None if d_N is None else weight_N * d_N for d_N in (cost.by_cross_entropy_N, cost.by_acceptance_N, d_text_N))
        return cost.loss_N, *derivatives  # type: ignore[return-value]

    def towards_text(self, d_logits_NW: Tensor, d_text_N: Tensor | None) -> None:
        """Add what the derivative by `text_N` is at the text's own token; what it is at all tokens, q, has been added."""
        if d_text_N is not None:
            at_N1 = known(self.against.text_N).clamp(min=0)[:, None]
            d_logits_NW.scatter_add_(1, at_N1, -d_text_N[:, None])


def of_token(x_NW: Tensor, ids_N: Tensor) -> Tensor:
    """x at one token of each row, [N]; some number where that is -1."""
    return x_NW.gather(1, ids_N.clamp(min=0)[:, None])[:, 0]


@torch.no_grad()
def differentiate(logits_NW: Tensor, against: Against, wanted: bool) -> Found:
    """Loss and metrics of each row; if `wanted`, the logits give way to the gradient of `Σ weight · loss` by them."""
    # Objectives of any kind make several tensors as wide as the logits.
    run, pieces = (_by_rows, 16) if RowObjective.by_rows(against.objective) else (_any, 1)
    found = []
    with torch.autocast(logits_NW.device.type, enabled=False):  # a product in bfloat16 would round the loss
        for part in in_pieces(logits_NW, pieces):
            own_NW = logits_NW[part]
            x_NW = own_NW.to(torch.promote_types(own_NW.dtype, torch.float32))
            found.append(run(x_NW, against[part], wanted))
            if wanted and x_NW is not own_NW:
                own_NW.copy_(x_NW)
    return Found(*map(torch.cat, zip(*found, strict=True)))


def _by_rows(x_NW: Tensor, against: Against, wanted: bool) -> Found:
    """As the kernels do it: sums over each row, what the objective says of them, then the gradient; all a piece at a time.

    The logits give way to q. Where all is taught on one token, nothing else is that wide.
    """
    hard, top_N, width = against.taught.p_RW is None, against.top_N, x_NW.shape[1]
    named_N, picked_N, said_N = top_N >= 0, of_token(x_NW, top_N), against.logits_of_text(x_NW)
    peak_N, normaliser_N, dot_N, least_N = x_NW.new_empty(4, len(x_NW))
    for part in in_pieces(x_NW):
        own_NW, p_NW = x_NW[part], None if hard else against.probabilities(part, width)
        peak_N[part] = own_NW.amax(-1)
        if p_NW is not None:
            dot_N[part] = torch.linalg.vecdot(p_NW, own_NW)
        q_NW, normaliser_N[part] = softmax_and_total(own_NW)
        own_NW.copy_(q_NW)
        if p_NW is not None:
            held_NW = p_NW.mul_(against.mass_N[part, None])
            least_N[part] = torch.minimum(held_NW, q_NW, out=held_NW).sum(-1)
    if hard:
        q_top_N, held_N = named_N * of_token(x_NW, top_N), named_N * against.mass_N
        dot_N, least_N = named_N * picked_N, torch.minimum(q_top_N, held_N)
    cross_entropy_N = against.total_N * normaliser_N - dot_N
    sums = RowSums(against, cross_entropy_N, least_N, normaliser_N, said_N)
    loss_N, a_N, b_N, c_N = sums.cost()
    if wanted:
        # d logits = a (q Σp - p) + b (q 1[q < p·mass] - q Σ q 1[q < p·mass]) + c (q - 1[text])
        scale_N = torch.zeros_like(peak_N) if a_N is None else a_N * against.total_N
        scale_N = scale_N if c_N is None else scale_N + c_N
        if hard:
            pull_N = torch.zeros_like(peak_N) if a_N is None else -a_N * named_N
            if b_N is not None:
                low_N = b_N * (q_top_N < held_N) * q_top_N
                scale_N, pull_N = scale_N - low_N, pull_N + low_N
            x_NW.mul_(scale_N[:, None]).scatter_add_(1, top_N.clamp(min=0)[:, None], pull_N[:, None])
        else:
            for part in in_pieces(x_NW):
                rows: list[Any] = [None if of_N is None else of_N[part, None] for of_N in (against.mass_N, scale_N, a_N, b_N)]
                _to_gradient(x_NW[part], against.probabilities(part, width), *rows)
        sums.towards_text(x_NW, c_N)
    # A tie is a hit: no token is likelier to the draft than the teacher's top one.
    return Found(loss_N, (named_N & (picked_N >= peak_N)).float(), sums.acceptance_N, named_N * cross_entropy_N)


def _to_gradient(q_NW: Tensor, p_NW: Tensor, mass_N1: Tensor, scale_N1: Tensor, a_N1: Tensor | None, b_N1: Tensor | None) -> None:
    """In the place of q; `scale` is what all tokens share."""
    if b_N1 is not None:
        low_NW = q_NW * (q_NW < p_NW * mass_N1)
        scale_N1 = scale_N1 - b_N1 * low_NW.sum(-1, keepdim=True)
    q_NW.mul_(scale_N1)
    if b_N1 is not None:
        q_NW.addcmul_(low_NW, b_N1)
    if a_N1 is not None:
        q_NW.addcmul_(p_NW, a_N1, value=-1)


def _any(x_NW: Tensor, against: Against, wanted: bool) -> Found:
    """Objectives of any kind, which differentiate themselves by the log-probabilities."""
    objective, mass_N, named_N = against.objective, against.mass_N, against.top_N >= 0
    hit_N = named_N & (of_token(x_NW, against.top_N) >= x_NW.amax(-1))
    p_NW = against.probabilities(slice(None), x_NW.shape[1])
    log_q_NW = x_NW.log_softmax(-1)
    q_NW = log_q_NW.exp()
    cross_entropy_N = -torch.linalg.vecdot(p_NW, log_q_NW)
    accepted_N = torch.minimum(p_NW * mass_N[:, None], q_NW).sum(-1)
    if wanted:
        loss_N, d_NW = objective.differentiated(log_q_NW, p_NW, mass_N, against.weight_N)
        # Of log softmax: d logits = d log q - q Σ d log q.
        torch.addcmul(d_NW, q_NW, d_NW.sum(-1, keepdim=True), value=-1, out=x_NW)
    else:
        loss_N = objective.loss(log_q_NW, p_NW, mass_N)
    return Found(loss_N, hit_N.float(), accepted_N, named_N * cross_entropy_N)
