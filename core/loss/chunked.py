"""`losses.cross_entropy` in chunks: a chunk's logits become loss, gradient and metrics, and are dropped."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contracts.algorithm import Step
from .cross_entropy import METRICS, Supervisor

# Rows of draft logits alive at a time: small enough for a CPU's cache, large enough for its matrix units.
CHUNK = 256


def fused_cross_entropy(
    states: Sequence[Tensor],
    compute_logits: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    teacher: Supervisor,
    teacher_rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    draft_ids_W: Tensor,
) -> Step:
    """As `cross_entropy`, with the same loss, gradients and metrics up to rounding, whatever the teacher's distribution sums to.

    `parameters` are those that `compute_logits` reads and that are trained. The gradient is formed in the forward pass, where
    the logits are: draft logits live one chunk at a time.
    """
    if not torch.is_grad_enabled():
        parameters = ()
    index_R = torch.searchsorted(draft_ids_W, teacher.top_R).clamp(max=len(draft_ids_W) - 1)
    nameable_R = draft_ids_W[index_R] == teacher.top_R
    scored = _Scored(compute_logits, teacher, draft_ids_W, torch.where(nameable_R, index_R, -1), [len(s) for s in states])
    weights_N = torch.cat([w * nameable_R[rows] for w, rows in zip(weights, teacher_rows, strict=True)])
    loss, *sums = _FusedLoss.apply(scored, torch.cat(list(states)), torch.cat(list(teacher_rows)), weights_N, *parameters)
    return Step(loss, dict(zip(METRICS, sums, strict=True)))


@dataclass(frozen=True)
class _Scored:
    """What does not change from chunk to chunk."""

    compute_logits: Callable[[Tensor], Tensor]
    teacher: Supervisor
    draft_ids_W: Tensor
    top_R: Tensor
    """Draft id of the teacher's top token, -1 where the draft cannot name it."""
    sizes: list[int]


class _FusedLoss(torch.autograd.Function):
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
                    logits_NW = scored.compute_logits(state_ND)
                rows, weight_N = rows_N[part], weights_N[part].float()
                p_NW, top_N = scored.teacher.probabilities(rows, scored.draft_ids_W), scored.top_R[rows]
                log_q_NW = logits_NW.detach().float().log_softmax(-1)
                cross_entropy_N = -(p_NW * log_q_NW).sum(-1)
                loss += (weight_N * cross_entropy_N).sum()  # a product under autocast would round it to bfloat16
                sums[0, step] += len(rows)
                sums[1, step] += (log_q_NW.argmax(-1) == top_N).sum()
                sums[3, step] += ((top_N >= 0) * cross_entropy_N).sum()
                q_NW = log_q_NW.exp_()
                sums[2, step] += torch.minimum(p_NW * scored.teacher.mass(rows)[:, None], q_NW).sum()
                if wanted:
                    # The gradient of -(p · log q) is q Σp - p: a teacher restricted to its top tokens does not sum to one.
                    d_logits_NW = q_NW.mul_(p_NW.sum(-1, keepdim=True)).sub_(p_NW).mul_(weight_N[:, None]).to(logits_NW.dtype)
                    d_state, *d_chunk = torch.autograd.grad(logits_NW, [state_ND, *parameters], d_logits_NW)
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
