"""Loss, metrics and gradient of some rows of draft logits, in plain torch: what the kernels must agree with."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..contracts.objective import ObjectiveBase, RowObjective, known
from .teachers import Taught, in_cache

# Numbers of a tensor alive at a time on the CPU: what is looked at several times stays in its cache.
CACHED = 2**17


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

    @property
    def top_N(self) -> Tensor:
        """See `Taught`."""
        return self.taught.top_R[self.rows_N]

    @property
    def mass_N(self) -> Tensor:
        """See `Taught`."""
        return self.taught.mass_R[self.rows_N]

    @property
    def total_N(self) -> Tensor:
        """See `Taught`."""
        return self.taught.total_R[self.rows_N]

    @property
    def text_N(self) -> Tensor | None:
        """See `Taught`."""
        return None if self.taught.text_R is None else self.taught.text_R[self.rows_N]

    def logits_of_text(self, logits_NW: Tensor) -> Tensor | None:
        """Those of the text's own tokens, [N] float32."""
        return None if (text_N := self.text_N) is None else logits_NW.gather(1, text_N.clamp(min=0)[:, None])[:, 0].float()


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


@torch.no_grad()
def differentiate(logits_NW: Tensor, against: Against, wanted: bool) -> Found:
    """Loss and metrics of each row; if `wanted`, the logits give way to the gradient of `Σ weight · loss` by them."""
    size = max(1, CACHED // logits_NW.shape[1]) if in_cache(logits_NW) else max(1, len(logits_NW))
    found = []
    with torch.autocast(logits_NW.device.type, enabled=False):  # a product in bfloat16 would round the loss
        for at in range(0, max(1, len(logits_NW)), size):
            part = slice(at, at + size)
            own_NW = logits_NW[part]
            x_NW = own_NW.to(torch.promote_types(own_NW.dtype, torch.float32))
            found.append(_method(against)(x_NW, against[part], wanted))
            if wanted and x_NW is not own_NW:
                own_NW.copy_(x_NW)
    return Found(*map(torch.cat, zip(*found, strict=True)))


def _method(against: Against):  # type: ignore[no-untyped-def]
    if not RowObjective.by_rows(against.objective):
        return _any
    return _hard if against.taught.p_RW is None else _soft


def _hit(x_NW: Tensor, peak_N: Tensor, top_N: Tensor) -> Tensor:
    """Whether no token is likelier to the draft than the teacher's top one, a tie included."""
    return (top_N >= 0) & (x_NW.gather(1, top_N.clamp(min=0)[:, None])[:, 0] >= peak_N)


def _soft(x_NW: Tensor, against: Against, wanted: bool) -> Found:
    """All probabilities are kept on the scale of e = exp(x - peak), z = Σ e, q = e / z: nothing is divided but rows' sums."""
    top_N, total_N = against.top_N, against.total_N
    p_NW, peak_N = against.taught.probabilities(against.rows_N, x_NW.shape[1]), x_NW.amax(-1)
    hit_N, dot_N, said_N = _hit(x_NW, peak_N, top_N), torch.linalg.vecdot(p_NW, x_NW), against.logits_of_text(x_NW)
    e_NW = x_NW.sub_(peak_N[:, None]).exp_()
    z_N = e_NW.sum(-1)
    normaliser_N = peak_N + z_N.log()
    cross_entropy_N = total_N * normaliser_N - dot_N
    held_NW = p_NW * (against.mass_N * z_N)[:, None]
    sums = RowSums(against, cross_entropy_N, torch.minimum(held_NW, e_NW).sum(-1) / z_N, normaliser_N, said_N)
    loss_N, a_N, b_N, c_N = sums.cost()
    if wanted:
        # d logits = a (q Σp - p) + b (q 1[q < p·mass] - q Σ q 1[q < p·mass]) + c (q - 1[text])
        scale_N = torch.zeros_like(z_N) if a_N is None else a_N * total_N
        scale_N = scale_N if c_N is None else scale_N + c_N
        low_NW = None
        if b_N is not None:
            low_NW = torch.mul(e_NW, e_NW < held_NW, out=held_NW)
            scale_N = scale_N - b_N * low_NW.sum(-1) / z_N
        e_NW.mul_((scale_N / z_N)[:, None])
        if low_NW is not None and b_N is not None:
            e_NW.addcmul_(low_NW, (b_N / z_N)[:, None])
        if a_N is not None:
            e_NW.addcmul_(p_NW, a_N[:, None], value=-1)
        sums.towards_text(e_NW, c_N)
    return Found(loss_N, hit_N.float(), sums.acceptance_N, (top_N >= 0) * cross_entropy_N)


def _hard(x_NW: Tensor, against: Against, wanted: bool) -> Found:
    """As `_soft` with all mass on one token, so that nothing of width W is made beside the logits."""
    top_N, named_N = against.top_N, against.top_N >= 0
    at_N1, peak_N = top_N.clamp(min=0)[:, None], x_NW.amax(-1)
    picked_N, hit_N, said_N = x_NW.gather(1, at_N1)[:, 0], _hit(x_NW, peak_N, top_N), against.logits_of_text(x_NW)
    e_NW = x_NW.sub_(peak_N[:, None]).exp_()
    z_N = e_NW.sum(-1)
    normaliser_N = peak_N + z_N.log()
    cross_entropy_N = named_N * (normaliser_N - picked_N)
    q_N = named_N * (picked_N - peak_N).exp() / z_N
    sums = RowSums(against, cross_entropy_N, torch.minimum(q_N, named_N * against.mass_N), normaliser_N, said_N)
    loss_N, a_N, b_N, c_N = sums.cost()
    if wanted:
        pull_N = torch.zeros_like(z_N)
        if a_N is not None:
            pull_N = a_N * named_N
        if b_N is not None:
            pull_N = pull_N - b_N * q_N * (q_N < against.mass_N)
        both_N = pull_N if c_N is None else pull_N + c_N
        e_NW.mul_((both_N / z_N)[:, None]).scatter_add_(1, at_N1, -pull_N[:, None])
        sums.towards_text(e_NW, c_N)
    return Found(loss_N, hit_N.float(), sums.acceptance_N, cross_entropy_N)


def _any(x_NW: Tensor, against: Against, wanted: bool) -> Found:
    """Objectives of any kind, which differentiate themselves by the log-probabilities."""
    objective, top_N, mass_N = against.objective, against.top_N, against.mass_N
    p_NW, hit_N = against.taught.probabilities(against.rows_N, x_NW.shape[1]), _hit(x_NW, x_NW.amax(-1), top_N)
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
    return Found(loss_N, hit_N.float(), accepted_N, (top_N >= 0) * cross_entropy_N)
