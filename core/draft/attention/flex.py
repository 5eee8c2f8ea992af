"""FlexAttention over tables of blocks, compiled: under a mask, and as one of the kernels of varlen attention."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.fx.experimental import _config as symbolic_shapes
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .kernels import Bounds
from .masked import MaskFunction, in_ranges

BLOCK = 128
"""Queries and keys of a block."""
GRAPHS = 64
"""At most: one for each size of heads, dtype, batch of one row or more, and with or without a way back."""


class BlockTable(TypedDict):
    """For each block of queries, which blocks of keys are partly seen, and which by all of it: how many, and their numbers, first those."""

    partial: Tensor
    """[B, 1, blocks of queries] int32."""
    partial_at: Tensor
    """[B, 1, blocks of queries, blocks of keys] int32."""
    full: Tensor
    full_at: Tensor


def block_table(first_BQR: Tensor, end_BQR: Tensor, keys: int) -> BlockTable:
    """Of queries that see the keys `first <= key < end` of R ranges, from the outermost of each block: no query is tried against a key."""
    missing = -first_BQR.shape[1] % BLOCK
    starts = torch.arange(0, keys, BLOCK, device=first_BQR.device)
    empty = end_BQR <= first_BQR

    def outermost(x_BQR: Tensor, neutral: int, least: bool) -> Tensor:
        """[B, blocks, 1, R]."""
        padded = F.pad(x_BQR, (0, 0, 0, missing), value=neutral).unflatten(1, (-1, BLOCK))
        return (padded.amin(2) if least else padded.amax(2))[:, :, None]

    nearest, furthest = (outermost(x.masked_fill(empty, n), n, n > 0) for x, n in ((first_BQR, keys), (end_BQR, 0)))
    touched = ((nearest < starts[:, None] + BLOCK) & (furthest > starts[:, None])).any(-1)
    latest, earliest = outermost(first_BQR.masked_fill(empty, keys), 0, False), outermost(end_BQR.masked_fill(empty, 0), keys, True)
    full = ((latest <= starts[:, None]) & (earliest >= starts[:, None] + BLOCK)).any(-1)
    partial = touched & ~full
    counts = [x.sum(-1, dtype=torch.int32)[:, None] for x in (partial, full)]
    order = [x.int().argsort(dim=-1, descending=True, stable=True).int()[:, None] for x in (partial, full)]
    return BlockTable(partial=counts[0], partial_at=order[0], full=counts[1], full_at=order[1])


def masked_flex(
    q_BHQd: Tensor, k_BhKd: Tensor, v_BhKd: Tensor, sees: MaskFunction, rows_BQ: Tensor, table: BlockTable, scale: float
) -> Tensor:
    """FlexAttention, whose kernels skip blocks that are not in the table; it has no backward on the CPU.

    In a layer that is run twice (`Pass`) it runs once.
    """
    attend = partial(_attended, sees, rows_BQ, table, scale, False)
    current = _pass()
    if current is None:
        return attend(q_BHQd, k_BhKd, v_BhKd)[0]
    once: Tensor = _Once.apply(current.once(lambda: Way(attend, q_BHQd, k_BhKd, v_BhKd)), q_BHQd, k_BhKd, v_BhKd)
    return once


class VarlenFlex:
    """Varlen attention, see `kernels`: `out` and `lse`, and the way back from a merge. In a layer that is run twice it runs once.

    As FlexAttention makes its gradients from its own output o and log-sum-exp l, it is given others: with the merged O and L, weights
    exp(score - L) are exp(l - L) of its own, so the output's gradient g becomes exp(l - L) g, and that of the log-sum-exp
    exp(l - L) (g·o - g·O), which turns its correction g·o into g·O.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, wanted: bool):
        inputs = [_heads(x) for x in (q, k, v)]
        first_1R1, end_1R1 = _seen(bounds, len(q))
        rows_1R = torch.arange(len(q), device=q.device)[None]
        attend = partial(_attended, in_ranges(first_1R1, end_1R1), rows_1R, block_table(first_1R1, end_1R1, len(k)), scale, True)
        current = _pass()
        make = partial(Way, attend, *inputs)
        self._way = None if not wanted else make() if current is None else current.once(make)
        out_1HRd, lse_1HR = attend(*inputs) if self._way is None else self._way.outs
        self.out, self.lse = out_1HRd[0].transpose(0, 1), lse_1HR[0]

    def back(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
        """Gradients of q, k and v for an output and log-sum-exp that may be those of a merge."""
        share_HR = (self.lse - lse).exp()
        d_out = grad * share_HR.T[..., None].to(grad.dtype)
        d_lse_HR = share_HR * (grad * (self.out - out)).sum(-1, dtype=share_HR.dtype).T
        assert self._way is not None
        found = self._way.back((_heads(d_out), d_lse_HR[None]), *map(_heads, (q, k, v)))
        return [x[0].transpose(0, 1) for x in found]


def _seen(bounds: Bounds, rows: int) -> tuple[Tensor, Tensor]:
    """The keys that each row sees, `first <= key < end`, [1, R, 1] each; nothing is waited for."""
    keys = bounds.cu_k if bounds.cu_k.ndim == 2 else torch.stack([bounds.cu_k[:-1], bounds.cu_k[1:]], dim=1)
    row_R = torch.arange(rows, device=keys.device, dtype=keys.dtype)
    at_R = torch.searchsorted(bounds.cu_q, row_R, right=True) - 1
    first_R, last_R = keys[at_R].unbind(1)
    return first_R[None, :, None], (last_R - bounds.cu_q[at_R + 1] + 1 + row_R)[None, :, None]


def _heads(x_RHd: Tensor) -> Tensor:
    """[1, H, R, d]."""
    return x_RHd.transpose(0, 1)[None]


def _attended(
    sees: MaskFunction, rows_BQ: Tensor, table: BlockTable, scale: float, with_lse: bool, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    """The output [B, H, Q, d], and the log-sum-exp of the scores [B, H, Q] if that is wanted."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    at_BQ = rows_BQ.contiguous()  # one graph for queries that are all inputs and for those that are some

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(batch, head, at_BQ[batch, query], key)

    lengths = (at_BQ.shape[1], k.shape[2])
    parts = (table["partial"], table["partial_at"], table["full"], table["full_at"])
    block_mask = BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths)
    # Sizes that happen to agree the first time are not taken to be one.
    with torch._dynamo.config.patch(recompile_limit=GRAPHS), symbolic_shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        given = {"block_mask": block_mask, "scale": scale, "enable_gqa": True, "return_aux": AuxRequest(lse=with_lse)}
        out, said = _flex(q.is_cuda)(q, k, v, **given, kernel_options=_options(q))
    return (out, said.lse) if with_lse else (out,)


def _options(q: Tensor) -> dict[str, Any]:
    """What a GPU's kernel is not left to choose (torch 2.11 to 2.14).

    Its other kernel, for fewer queries than a block has, wants as many queries as keep grouped heads within one. Of widths beyond 128 it
    knows few by name, and reads ahead more of the others' keys than shared memory holds.
    """
    unknown = 128 < q.shape[-1] < 256
    stages = {"fwd_num_stages": 1 if q.dtype == torch.float32 else 2} if unknown else {}
    return {"FORCE_USE_FLEX_ATTENTION": True, **stages}


@cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Cut, it would spell all scores out, without a word where no gradient is wanted.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True) if compiled else flex_attention


class Pass(ABC):
    """A mode in which a layer is run: once forward, and once more on the way back, for what was not kept."""

    @abstractmethod
    def once(self, make: Callable[[], Any]) -> Any:
        """What `make` has made in the first of both passes."""


def _pass() -> Pass | None:
    return next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Pass)), None)


class Way:
    """What attention puts out, and the way back from it, to which queries, keys and values are given then: they need not be kept."""

    def __init__(self, attend: Callable[..., tuple[Tensor, ...]], *inputs: Tensor):
        given, known = list[Tensor](), [_identity(x) for x in inputs]
        self.given = given  # the graph holds its hooks, and these must not hold the graph
        with torch.enable_grad():
            sources = [_Source.apply(x.detach(), torch.ones((), requires_grad=True)) for x in inputs]
            self.edges = [torch.autograd.graph.get_gradient_edge(x) for x in sources]
            with torch.autograd.graph.saved_tensors_hooks(
                lambda x: known.index(_identity(x)) if _identity(x) in known else x, lambda x: given[x] if isinstance(x, int) else x
            ):
                self._outs = attend(*sources)

    @property
    def outs(self) -> list[Tensor]:
        """They have no way back but `back`."""
        return [out.detach() for out in self._outs]

    def back(self, grads: Sequence[Tensor], *inputs: Tensor) -> Sequence[Tensor]:
        """The gradients by the inputs, which are what they were."""
        self.given[:] = inputs
        found = torch.autograd.grad(self._outs, self.edges, grads)
        self.given.clear()
        return found


def _identity(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.dtype, x.shape, x.stride()


class _Source(torch.autograd.Function):
    """x, whose gradient can be asked for though the graph does not hold x, as it would a leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, root: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Way, *inputs: Tensor) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(*inputs)
        return way.outs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *ctx.way.back((grad,), *ctx.saved_tensors)
