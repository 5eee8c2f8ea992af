"""`reference` in chunks: a chunk's logits become loss, metrics and, in their own place, gradient, and are dropped."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..contracts.algorithm import Step
from ..contracts.draft import DraftModel
from ..contracts.objective import ObjectiveBase, RowObjective
from ..contracts.pairs import UNIT, Pairs, pairs_by_teacher
from .head import head_of, in_cache, is_fake
from .objectives import CrossEntropy
from .readable import METRICS
from .rows import Against, Found, differentiate
from .teachers import Supervisor

# Rows of draft logits alive at a time on the CPU: enough for its matrix units.
CHUNK = 256
# Teacher rows over the draft's vocabulary alive at a time, in units, on the CPU and elsewhere.
TEACHERS, TEACHERS_ELSEWHERE = 2, 8
# Bytes of draft logits alive at a time elsewhere, were they float32.
BUDGET = 3 * 2**27


def rows_at_once(width: int, states_ND: Tensor) -> int:
    """How many rows of draft logits over `width` tokens are alive at a time, where these states are."""
    return CHUNK if in_cache(states_ND) else min(max(BUDGET // (4 * width), 512), 8192) // 128 * 128


def method(states_ND: Tensor, objective: ObjectiveBase) -> Callable[[Tensor, Against, bool], Found]:
    """What makes loss and gradient of a chunk: kernels where there are any for the device, else plain torch."""
    if is_fake(states_ND) and RowObjective.by_rows(objective):
        return in_place
    if states_ND.is_cuda and RowObjective.by_rows(objective) and find_spec("triton"):
        from .kernels import differentiate as by_kernels

        return by_kernels
    return differentiate


def in_place(logits_NW: Tensor, against: Against, wanted: bool) -> Found:
    """What the kernels leave of fake tensors: the gradient in the logits' place, and some numbers a row."""
    return Found(*torch.empty(len(Found._fields), len(logits_NW)))


@torch.compiler.disable
def chunked(
    draft: DraftModel,
    states: Iterable[Tensor],
    teacher: Supervisor,
    rows: Sequence[Tensor],
    weights: Sequence[Tensor],
    objective: ObjectiveBase = CrossEntropy(),
    pairs: Pairs | None = None,
) -> Step:
    """As `reference`, with the same loss, gradients and metrics up to rounding, whatever the teacher's distribution sums to.

    Teacher rows are visited a block at a time, and with them all draft rows that they teach, so that the target's vocabulary is
    passed once and no tensor is as long as all rows and as wide as a vocabulary. `pairs` is the plan's order of these visits
    (`batch["pairs"]`, of `Plan.taught`); without it the order is made here, which on an accelerator waits for it. The gradient is
    formed in the forward pass, where the logits are, and may be taken once. `states` that are made one by one (a generator's) are not
    held beside what is made of them.
    """
    parameters = draft.head_parameters() if torch.is_grad_enabled() else []
    # A chunk's states, once read, give way to their gradient.
    states_ND = torch.cat(tuple(states))
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (states_ND, *parameters))
    weights_N = torch.cat([torch.ones_like(row, dtype=torch.float32) * weight for row, weight in zip(rows, weights, strict=True)])
    pairs = pairs or (pairs_by_teacher(rows) if teacher.costly else None)
    problem = _Problem(draft, teacher, objective, pairs, torch.cat(list(rows)), weights_N, parameters, wanted)
    loss, metrics_3N = _Chunked.apply(problem, states_ND, *parameters)
    parts = metrics_3N.split([len(row) for row in rows], dim=1)
    counts = [torch.full_like(loss, len(row), requires_grad=False) for row in rows]
    sums = torch.stack([part_3N.sum(1) for part_3N in parts], dim=1)
    return Step(loss, dict(zip(METRICS, (torch.stack(counts), *sums), strict=True)), [part_3N[1] for part_3N in parts])


@dataclass(frozen=True)
class _Problem:
    """All but the states, and how it is cut."""

    draft: DraftModel
    teacher: Supervisor
    objective: ObjectiveBase
    pairs: Pairs | None
    rows_N: Tensor
    weights_N: Tensor
    parameters: list[Tensor]
    wanted: bool

    def blocks(self, most: int, limit: int) -> Iterator[tuple[slice, Tensor]]:
        """Teacher rows, and the pairs [n] that they teach: `most` of `limit` units, unless those of a single one are more."""
        device = self.rows_N.device
        if self.pairs is None:
            yield slice(0, None), torch.arange(len(self.rows_N), device=device)
            return
        order_N, marks = self.pairs[0].to(device), self.pairs[1]
        start = 0
        while start < len(marks) - 1:
            end = start + 1
            while end < len(marks) - 1 and end - start < limit and marks[end + 1] - marks[start] <= most:
                end += 1
            if marks[end] > marks[start]:
                yield slice(start * UNIT, end * UNIT), order_N[marks[start] : marks[end]]
            start = end


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: _Problem, states_ND: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        ids_W, head = problem.draft.draft_ids, head_of(problem.draft, problem.parameters, problem.wanted)
        loss = states_ND.new_zeros((), dtype=torch.float32)
        metrics_3N = loss.new_zeros(3, len(states_ND))
        most, differentiated = rows_at_once(len(ids_W), states_ND), method(states_ND, problem.objective)
        for teachers, block_N in problem.blocks(most, TEACHERS if in_cache(states_ND) else TEACHERS_ELSEWHERE):
            taught = problem.teacher.at(teachers, ids_W)
            for at_N in block_N.split(most):
                rows_N = problem.rows_N[at_N] - teachers.start
                weight_N = problem.weights_N[at_N] * (taught.top_R[rows_N] >= 0)
                logits_NW = head.logits(states_ND.index_select(0, at_N))
                found = differentiated(logits_NW, Against(taught, rows_N, weight_N, problem.objective), problem.wanted)
                loss += (weight_N * found.loss_N).sum()
                metrics_3N.index_copy_(1, at_N, torch.stack(found[1:]))
                if problem.wanted:
                    states_ND.index_copy_(0, at_N, head.back(logits_NW).to(states_ND.dtype))
        ctx.gradients = (states_ND, *head.gradients) if problem.wanted else None
        ctx.dtypes = [p.dtype for p in problem.parameters]
        ctx.mark_non_differentiable(metrics_3N)
        return loss, metrics_3N

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradient of this loss has been taken: it was formed with the loss, and is kept once")
        d_states_ND, *d_parameters = (d.mul_(grad) for d in ctx.gradients)
        ctx.gradients = None
        return None, d_states_ND, *(d.to(dtype) for d, dtype in zip(d_parameters, ctx.dtypes, strict=True))
