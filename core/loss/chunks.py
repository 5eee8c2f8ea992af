"""`reference` in chunks: a chunk's logits become loss, gradient and metrics, and are dropped."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contracts.algorithm import Step
from ..contracts.draft import DraftModel
from ..contracts.objective import ObjectiveBase
from .objectives import CrossEntropy
from .readable import METRICS
from .teachers import Supervisor

# Rows of draft logits alive at a time: small enough for a CPU's cache, large enough for its matrix units.
CHUNK = 256


def chunked(
    draft: DraftModel,
    states: Sequence[Tensor],
    teacher: Supervisor,
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    objective: ObjectiveBase = CrossEntropy(),
) -> Step:
    """As `reference`, with the same loss, gradients and metrics up to rounding, whatever the teacher's distribution sums to.

    The gradient is formed in the forward pass, where the logits are: draft logits live one chunk at a time.
    """
    parameters, ids_W = draft.head_parameters() if torch.is_grad_enabled() else (), draft.draft_ids
    index_R = torch.searchsorted(ids_W, teacher.top_R).clamp(max=len(ids_W) - 1)
    nameable_R = ids_W[index_R] == teacher.top_R
    scored = _Scored(draft, teacher, objective, ids_W, torch.where(nameable_R, index_R, -1), [len(s) for s in states])
    weights_N = torch.cat([w * nameable_R[row] for w, row in zip(weights, rows, strict=True)])
    loss, *sums = _Chunked.apply(scored, torch.cat(list(states)), torch.cat(list(rows)), weights_N, *parameters)
    return Step(loss, dict(zip(METRICS, sums, strict=True)))


@dataclass(frozen=True)
class _Scored:
    """What does not change from chunk to chunk."""

    draft: DraftModel
    teacher: Supervisor
    objective: ObjectiveBase
    draft_ids_W: Tensor
    top_R: Tensor
    """Draft id of the teacher's top token, -1 where the draft cannot name it."""
    sizes: list[int]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scored: _Scored, states_ND: Tensor, rows_N: Tensor, weights_N: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        wanted = any(ctx.needs_input_grad)
        d_states_ND = torch.zeros_like(states_ND) if wanted else None
        d_parameters = [torch.zeros_like(p) for p in parameters]
        loss = states_ND.new_zeros((), dtype=torch.float32)
        sums = loss.new_zeros(len(METRICS), len(scored.sizes))
        start = 0
        for step, size in enumerate(scored.sizes):
            for at in range(start, start + size, CHUNK):
                part = slice(at, min(at + CHUNK, start + size))
                with torch.set_grad_enabled(wanted):
                    state_ND = states_ND[part].detach().requires_grad_(wanted)
                    logits_NW = scored.draft.compute_logits(state_ND)
                rows, weight_N = rows_N[part], weights_N[part].float()
                taught = scored.teacher.probabilities(rows, scored.draft_ids_W), scored.teacher.mass(rows)
                log_q_NW = logits_NW.detach().float().log_softmax(-1)
                with torch.autocast(log_q_NW.device.type, enabled=False):  # a product in bfloat16 would round the loss
                    if wanted:
                        loss_N, d_log_q_NW = scored.objective.differentiated(log_q_NW, *taught, weight_N)
                    else:
                        loss_N = scored.objective.loss(log_q_NW, *taught)
                    loss += (weight_N * loss_N).sum()
                    sums[:, step] += _metrics(log_q_NW, *taught, scored.top_R[rows])
                if wanted:
                    # Of log softmax: d logits = d log q - q Σ d log q.
                    d_logits_NW = log_q_NW.exp_().mul_(-d_log_q_NW.sum(-1, keepdim=True)).add_(d_log_q_NW)
                    d_state, *d_chunk = torch.autograd.grad(logits_NW, [state_ND, *parameters], d_logits_NW.to(logits_NW.dtype))
                    d_states_ND[part] = d_state  # type: ignore[index]
                    for total, d in zip(d_parameters, d_chunk, strict=True):
                        total += d
            start += size
        ctx.save_for_backward(d_states_ND, *d_parameters)
        ctx.mark_non_differentiable(*(metrics := sums.unbind()))
        return loss, *metrics

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        d_states_ND, *d_parameters = ctx.saved_tensors
        return None, d_states_ND * grad, None, None, *(d * grad for d in d_parameters)


def _metrics(log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor, top_N: Tensor) -> Tensor:
    """The sums that `METRICS` names, of some rows."""
    cross_entropy_N = -(p_NW * log_q_NW).sum(-1)
    correct, accepted = (log_q_NW.argmax(-1) == top_N).sum(), torch.minimum(p_NW * mass_N[:, None], log_q_NW.exp()).sum()
    return torch.stack([torch.full_like(accepted, len(top_N)), correct.to(accepted), accepted, ((top_N >= 0) * cross_entropy_N).sum()])
