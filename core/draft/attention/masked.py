"""Attention under a mask: dense in chunks of queries, or by FlexAttention over tables of blocks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .kernels import aten, precise

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) → may the query look; index tensors that broadcast. The form that FlexAttention takes."""

# Queries at a time: few, so that their common keys are few too.
CHUNK = 256
BLOCK = 128
"""Queries and keys of a block of FlexAttention."""
GRAPHS = 64
"""Of FlexAttention, at most: one for each size of heads, dtype, batch of one row or more, and with or without a way back."""


def dense_mask(sees: MaskFunction, rows_BQ: Tensor, keys: int) -> Tensor:
    """[B, 1, Q, K], True where the query may look."""
    batch, key = (torch.arange(n, device=rows_BQ.device) for n in (len(rows_BQ), keys))
    mask = sees(batch[:, None, None, None], torch.zeros_like(batch[:1]), rows_BQ[:, None, :, None], key)
    return mask.expand(len(rows_BQ), 1, rows_BQ.shape[1], keys)


def masked_dense(q_BHQd: Tensor, k_BhKd: Tensor, v_BhKd: Tensor, sees: MaskFunction, rows_BQ: Tensor, scale: float) -> Tensor:
    """SDPA over chunks of queries, each with the keys that any of them sees."""
    if q_BHQd.device.type == "cpu" and q_BHQd.shape[2]:  # torch's kernel ends the process where there are no queries, or no keys
        out_BHQd: Tensor = _InChunks.apply(sees, rows_BQ, scale, q_BHQd, k_BhKd, v_BhKd)
        return out_BHQd
    parts = []
    for at, seen, mask in _chunks(sees, rows_BQ, k_BhKd.shape[2]):
        q, k, v = q_BHQd[:, :, at], k_BhKd.index_select(2, seen), v_BhKd.index_select(2, seen)
        parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True))
    return torch.cat(parts, dim=2)


def _chunks(sees: MaskFunction, rows_BQ: Tensor, keys: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Queries, the keys that any of them sees, and which of these each sees, [B, 1, n, m]."""
    for start in range(0, max(rows_BQ.shape[1], 1), CHUNK):
        at = slice(start, start + CHUNK)
        mask_B1nK = dense_mask(sees, rows_BQ[:, at], keys)
        seen_K = mask_B1nK.flatten(0, 2).any(0)
        seen_K[:1] = True  # so that there is one; masked it is all the same
        seen = seen_K.nonzero()[:, 0]
        yield at, seen, mask_B1nK.index_select(3, seen)


class _InChunks(torch.autograd.Function):
    """By torch's flash kernel for the CPU. A chunk's keys and its mask are found again on the way back: all of them grow with the square
    of the length."""

    @staticmethod
    def forward(ctx: Any, sees: MaskFunction, rows_BQ: Tensor, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for at, seen, mask in _chunks(sees, rows_BQ, k.shape[2]):
            given = q[:, :, at], k.index_select(2, seen), v.index_select(2, seen)
            parts.append(aten._scaled_dot_product_flash_attention_for_cpu(*given, attn_mask=_added(mask, q), scale=scale))
        out, lse = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
        ctx.save_for_backward(q, k, v, out, lse, rows_BQ)
        ctx.sees, ctx.scale = sees, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, rows_BQ = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), *(torch.zeros_like(x, dtype=precise(x)) for x in (k, v))
        for at, seen, mask in _chunks(ctx.sees, rows_BQ, k.shape[2]):
            given = grad[:, :, at], q[:, :, at], k.index_select(2, seen), v.index_select(2, seen), out[:, :, at], lse[:, :, at]
            dq[:, :, at], *found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *given, 0.0, False, attn_mask=_added(mask, q), scale=ctx.scale
            )
            for total, part in zip((dk, dv), found, strict=True):
                total.index_add_(2, seen, part.to(total.dtype))
        return None, None, None, dq, dk.to(k.dtype), dv.to(v.dtype)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """What is added to scores: nothing where the mask is True, else -inf."""
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, float("-inf"))


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

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import BlockMask

        at_BQ = rows_BQ.contiguous()  # one graph for queries that are all inputs and for those that are some

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return sees(batch, head, at_BQ[batch, query], key)

        lengths = (at_BQ.shape[1], k.shape[2])
        parts = (table["partial"], table["partial_at"], table["full"], table["full_at"])
        block_mask = BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths)
        with torch._dynamo.config.patch(recompile_limit=GRAPHS):
            out: Tensor = _flex(q.is_cuda)(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=True)
        return out

    current = next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Pass)), None)
    if current is None:
        return attended(q_BHQd, k_BhKd, v_BhKd)
    once: Tensor = _Once.apply(current.once(lambda: _Way(attended, q_BHQd, k_BhKd, v_BhKd)), q_BHQd, k_BhKd, v_BhKd)
    return once


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


class _Way:
    """Attention's output, and the way back from it, to which queries, keys and values are given then: they need not be kept."""

    def __init__(self, attend: Callable[..., Tensor], *inputs: Tensor):
        given, known = list[Tensor](), [_identity(x) for x in inputs]
        self.given = given  # the graph holds its hooks, and these must not hold the graph
        with torch.enable_grad():
            sources = [_Source.apply(x.detach(), torch.ones((), requires_grad=True)) for x in inputs]
            self.edges = [torch.autograd.graph.get_gradient_edge(x) for x in sources]
            with torch.autograd.graph.saved_tensors_hooks(
                lambda x: known.index(_identity(x)) if _identity(x) in known else x, lambda x: given[x] if isinstance(x, int) else x
            ):
                self.out = attend(*sources)

    def back(self, grad: Tensor, *inputs: Tensor) -> Sequence[Tensor]:
        """The gradients by the inputs, which are what they were."""
        self.given[:] = inputs
        found = torch.autograd.grad(self.out, self.edges, grad)
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
    def forward(ctx: Any, way: _Way, *inputs: Tensor) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(*inputs)
        return way.out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *ctx.way.back(grad, *ctx.saved_tensors)


def causal_mask(documents_BS: Tensor | None, rows_BQ: Tensor | None, queries: int, keys: int, device: torch.device | None) -> Tensor:
    """Boolean mask, True where a query may look: earlier or same position, same document. [B or 1, 1, Q, K].

    Queries are the inputs `rows_BQ`, or, without rows, the last `queries` of the `keys` positions.
    """
    key_K = torch.arange(keys, device=device)
    row_BQ = rows_BQ if rows_BQ is not None else torch.arange(keys - queries, keys, device=device)[None]
    mask_BQK = row_BQ[:, :, None] >= key_K
    if documents_BS is not None:
        document_BQ = documents_BS.gather(1, row_BQ.expand(documents_BS.shape[0], -1))
        mask_BQK = mask_BQK & (document_BQ[:, :, None] == documents_BS[:, None])
    return mask_BQK[:, None]
