"""Attention under a mask: dense, in chunks of queries."""

from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernels import aten, precise

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) → may the query look; index tensors that broadcast. The form that FlexAttention takes."""

# Queries at a time: few, so that their common keys are few too.
CHUNK = 256


def in_ranges(first_BNR: Tensor, end_BNR: Tensor) -> MaskFunction:
    """Whether a key is in one of the query's ranges, `first <= key < end`."""
    # Told apart outside of it: a number among its indices would be a tensor of the device, which torch 2.10 cannot trace.
    both = list(zip(first_BNR.unbind(-1), end_BNR.unbind(-1), strict=True))

    def within(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return reduce(or_, [(first[batch, query] <= key) & (key < end[batch, query]) for first, end in both])

    return within


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
