"""`reference` in chunks: a chunk's logits become loss, metrics and, in their own place, gradient, and are dropped."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..contracts.algorithm import UNIT, Pairs, Step, pairs_by_teacher
from ..contracts.draft import DraftModel
from ..contracts.objective import CrossEntropy, ObjectiveBase, RowObjective
from ..target.capture import autocast_dtype
from .readable import METRICS
from .rows import Against, Found, differentiate
from .teachers import Supervisor, in_cache, is_fake

# Rows of draft logits alive at a time on the CPU: enough for its matrix units; fewer of wide vocabularies, of so many numbers together.
CHUNK, NUMBERS = 448, 2**23
# Teacher rows over the draft's vocabulary alive at a time, in units: on the CPU (as many as one pass of the target's head), and elsewhere.
TEACHERS, TEACHERS_ELSEWHERE = 2, 8
# Bytes of draft logits alive at a time elsewhere, were they float32; and rows at least, as each chunk reads and writes the gradient of the
# whole head, which fewer rows do not outweigh.
BUDGET, LEAST = 3 * 2**27, 2048


def rows_at_once(width: int, states_ND: Tensor) -> int:
    """How many rows of draft logits over `width` tokens are alive at a time, where these states are."""
    if in_cache(states_ND):
        return min(CHUNK, max(128, NUMBERS // width))
    return min(max(BUDGET // (4 * width), LEAST), 8192) // 128 * 128


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


def in_turn(states_ND: Tensor, queries: Sequence[Tensor]) -> Iterator[Tensor]:
    """The states of each step's rows, for `chunked`, which keeps none of them; taken together, their gradient is put back in one pass."""
    return iter(states_ND.index_select(0, torch.cat(tuple(queries))).split([len(query) for query in queries]))


def step_weights(steps: int, decay: float) -> list[float]:
    """decay^k / Σ decay^j: what each drafting step weighs (EAGLE-3's 0.8)."""
    total = sum(decay**k for k in range(steps))
    return [decay**k / total for k in range(steps)]


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

    def blocks(self, limit: int, most: int | None) -> Iterator[tuple[slice, Tensor]]:
        """Teacher rows, and the pairs [n] that they teach: of `limit` units, and `most` of them unless those of a single one are more."""
        device = self.rows_N.device
        if self.pairs is None:
            yield slice(0, None), torch.arange(len(self.rows_N), device=device)
            return
        order_N, marks = self.pairs[0].to(device), self.pairs[1]
        start = 0
        while start < len(marks) - 1:
            end = start + 1
            while end < len(marks) - 1 and end - start < limit and (most is None or marks[end + 1] - marks[start] <= most):
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
        scale = power_above(problem.weights_N)
        for teachers, block_N in problem.blocks(*((TEACHERS, None) if in_cache(states_ND) else (TEACHERS_ELSEWHERE, most))):
            taught = problem.teacher.at(teachers, ids_W)
            for at_N in block_N.tensor_split(max(1, -(-len(block_N) // most))):
                rows_N = problem.rows_N[at_N] - teachers.start
                weight_N = problem.weights_N[at_N] * (taught.top_R[rows_N] >= 0)
                logits_NW = head.logits(states_ND.index_select(0, at_N))
                found = differentiated(logits_NW, Against(taught, rows_N, weight_N / scale, problem.objective), problem.wanted)
                loss += (weight_N * found.loss_N).sum()
                metrics_3N.index_copy_(1, at_N, torch.stack(found[1:]))
                if problem.wanted:
                    states_ND.index_copy_(0, at_N, head.back(logits_NW).to(states_ND.dtype))
        ctx.gradients = (states_ND, *head.gradients) if problem.wanted else None
        ctx.scale, ctx.dtypes = scale, [p.dtype for p in problem.parameters]
        ctx.mark_non_differentiable(metrics_3N)
        return loss, metrics_3N

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradient of this loss has been taken: it was formed with the loss, and is kept once")
        d_states_ND, *d_parameters = (d.mul_(grad * ctx.scale) for d in ctx.gradients)
        ctx.gradients = None
        return None, d_states_ND, *(d.to(dtype) for d, dtype in zip(d_parameters, ctx.dtypes, strict=True))


def power_above(weights_N: Tensor) -> Tensor:
    """The power of two above the largest weight: gradients of rows that weigh 1 / N are 0 in float16 before a `GradScaler` has its turn."""
    largest = torch.cat([weights_N, weights_N.new_zeros(1)]).amax()
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)


class Head(Protocol):
    """Runs rows forth and back, in turn."""

    gradients: list[Tensor]
    """Of the head's trained parameters so far."""

    def logits(self, states_ND: Tensor) -> Tensor:
        """Of some rows, [N, W]."""

    def back(self, d_logits_NW: Tensor) -> Tensor:
        """The gradient by the states of the latest rows, [N, D]; those of the parameters are added to `gradients`."""


def head_of(draft: DraftModel, parameters: list[Tensor], wanted: bool) -> Head:
    """The draft's head, whose trained `parameters` are wanted in that order; `wanted`: whether there is a way back at all."""
    parts = draft.head_parts()
    if parts is None:
        return AnyHead(draft.compute_logits, parameters, wanted)
    return MatrixHead(*parts, parameters, wanted)


class AnyHead:
    """A head of which nothing is known: autograd finds the way back."""

    def __init__(self, compute_logits: Callable[[Tensor], Tensor], parameters: list[Tensor], wanted: bool):
        self._compute, self._parameters, self._wanted = compute_logits, parameters, wanted
        self.gradients = [_zeros(p) for p in parameters]

    def logits(self, states_ND: Tensor) -> Tensor:
        """See `Head`."""
        with torch.set_grad_enabled(self._wanted):
            self._states_ND = states_ND.detach().requires_grad_(self._wanted)
            self._logits_NW = self._compute(self._states_ND[:])  # no leaf: hooks of FlopCounterMode cannot stand on one
        return self._logits_NW.detach().clone()  # what is written into it, the way back must not see

    def back(self, d_logits_NW: Tensor) -> Tensor:
        """See `Head`."""
        # A rider is among the parameters, whether or not these states carry something for it.
        inputs = [self._states_ND, *self._parameters]
        d_states_ND, *found = torch.autograd.grad(self._logits_NW, inputs, d_logits_NW, materialize_grads=True)
        del self._logits_NW
        for total, d in zip(self.gradients, found, strict=True):
            total += d
        return d_states_ND


class MatrixHead:
    """Something cheap over D features (a norm, nothing), then a matrix, whose way back is two products added up in place.

    What states carry behind these features goes through the `rider` alone. Under autocast the matrices are cast once for all rows.
    """

    def __init__(
        self, before: Callable[[Tensor], Tensor], linear: nn.Linear, rider: nn.Linear | None, parameters: list[Tensor], wanted: bool
    ):
        dtype = autocast_dtype(linear.weight) or linear.weight.dtype
        self._before, self._wanted, self._width = before, wanted, linear.in_features
        self._weight_WD = linear.weight.detach().to(dtype)
        self._rider_Wr = None if rider is None else rider.weight.detach().to(dtype)
        self._bias_W = None if linear.bias is None else linear.bias.detach().to(dtype)
        self.gradients = [_zeros(p) for p in parameters]
        found = {id(p): total for p, total in zip(parameters, self.gradients, strict=True)}
        self._d_weight_WD, self._d_bias_W = found.pop(id(linear.weight), None), found.pop(id(linear.bias), None)
        self._d_rider_Wr = None if rider is None else found.pop(id(rider.weight), None)
        self._others = [(p, found[id(p)]) for p in parameters if id(p) in found]

    def logits(self, states_ND: Tensor) -> Tensor:
        """See `Head`."""
        with torch.set_grad_enabled(self._wanted):
            self._states_ND = states_ND.detach().requires_grad_(self._wanted)
            self._hidden_ND = self._before(self._states_ND[:, : self._width])  # no leaf: hooks of FlopCounterMode cannot stand on one
        self._read_ND, self._carried_Nr = (x.detach().to(self._weight_WD.dtype) for x in (self._hidden_ND, states_ND[:, self._width :]))
        with torch.autocast(self._weight_WD.device.type, enabled=False):
            logits_NW = nn.functional.linear(self._read_ND, self._weight_WD, self._bias_W)
            return logits_NW if self._rider_Wr is None or not self._carries else logits_NW.addmm_(self._carried_Nr, self._rider_Wr.T)

    @property
    def _carries(self) -> bool:
        return self._carried_Nr.shape[1] > 0

    def back(self, d_logits_NW: Tensor) -> Tensor:
        """See `Head`."""
        with torch.autocast(self._weight_WD.device.type, enabled=False):
            if self._d_weight_WD is not None:
                add_product(self._d_weight_WD, d_logits_NW.T, self._read_ND)
            if self._d_bias_W is not None:
                self._d_bias_W += d_logits_NW.sum(0, dtype=self._d_bias_W.dtype)
            d_hidden_ND = (d_logits_NW @ self._weight_WD).to(self._hidden_ND.dtype)
            d_carried_Nr = None if self._rider_Wr is None or not self._carries else d_logits_NW @ self._rider_Wr
            if self._d_rider_Wr is not None and self._carries:
                add_product(self._d_rider_Wr, d_logits_NW.T, self._carried_Nr)
        d_states_ND, *found = torch.autograd.grad(self._hidden_ND, [self._states_ND, *(p for p, _ in self._others)], d_hidden_ND)
        del self._hidden_ND
        if d_carried_Nr is not None:
            d_states_ND[:, self._width :] = d_carried_Nr
        for (_, total), d in zip(self._others, found, strict=True):
            total += d
        return d_states_ND


def add_product(total_WD: Tensor, left_WN: Tensor, right_ND: Tensor) -> None:
    """total += left @ right, in the total's precision: a sum kept in bfloat16 loses what is added last."""
    if total_WD.dtype == left_WN.dtype:
        torch.addmm(total_WD, left_WN, right_ND, out=total_WD)
    elif total_WD.is_cuda and total_WD.dtype == torch.float32:
        torch.addmm(total_WD, left_WN, right_ND, out_dtype=torch.float32, out=total_WD)
    else:
        total_WD += left_WN @ right_ND


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
