"""Attention under a mask function of indices: dense in chunks of queries, or by FlexAttention."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Queries at a time: few, so that their common keys are few too.
CHUNK = 256


def dense_mask(sees: Callable[..., Tensor], rows_BQ: Tensor, keys: int) -> Tensor:
    """[B, 1, Q, K], True where the query may look."""
    batch, key = (torch.arange(n, device=rows_BQ.device) for n in (len(rows_BQ), keys))
    mask = sees(batch[:, None, None, None], torch.zeros_like(batch[:1]), rows_BQ[:, None, :, None], key)
    return mask.expand(len(rows_BQ), 1, rows_BQ.shape[1], keys)


def masked_dense(q_BHQd: Tensor, k_BHKd: Tensor, v_BHKd: Tensor, sees: Callable[..., Tensor], rows_BQ: Tensor, scale: float) -> Tensor:
    """SDPA over chunks of queries, each with the keys that any of them sees."""
    parts = []
    for q, rows in zip(q_BHQd.split(CHUNK, dim=2), rows_BQ.split(CHUNK, dim=1), strict=True):
        mask_B1QK = dense_mask(sees, rows, k_BHKd.shape[2])
        seen = mask_B1QK.flatten(0, 2).any(0).nonzero()[:, 0]
        k, v, mask = k_BHKd.index_select(2, seen), v_BHKd.index_select(2, seen), mask_B1QK.index_select(3, seen)
        parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
    return torch.cat(parts, dim=2)


def block_mask(sees: Callable[..., Tensor], rows_BQ: Tensor, keys: int) -> Any:
    """The `BlockMask` of FlexAttention. Costly: it tries every query against every key."""
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(batch, head, rows_BQ[batch, query], key)

    return create_block_mask(mask_mod, len(rows_BQ), None, rows_BQ.shape[1], keys, device=rows_BQ.device)


def masked_flex(q_BHQd: Tensor, k_BhKd: Tensor, v_BhKd: Tensor, block: Any, scale: float) -> Tensor:
    """FlexAttention, whose kernels skip blocks of the mask that are empty; it has no backward on the CPU."""
    out: Tensor = _flex(q_BHQd.is_cuda)(q_BHQd, k_BhKd, v_BhKd, block_mask=block, scale=scale, enable_gqa=True)
    return out


@cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
