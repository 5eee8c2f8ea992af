"""The attention of training-time test, twice: a readable reference, and a flash kernel merged with the diagonals by log-sum-exp."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten


def unrolled_eager(q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask_B1QS: Tensor, scale: float) -> Tensor:
    """The reference: all scores at once, one softmax over `keys[0]` (masked, True = may look) and the same-slot `keys[1:]`."""
    scores_BHQS = (q_BHQd @ keys[0].transpose(-1, -2)) * scale
    scores_BHQS = scores_BHQS.masked_fill(~mask_B1QS, float("-inf"))
    own = [(q_BHQd * k).sum(-1, keepdim=True) * scale for k in keys[1:]]
    weights = torch.softmax(torch.cat([scores_BHQS, *own], dim=-1).float(), dim=-1).to(q_BHQd.dtype)
    slots = keys[0].shape[2]
    out_BHQd = weights[..., :slots] @ values[0]
    for i, v in enumerate(values[1:]):
        out_BHQd = out_BHQd + weights[..., slots + i, None] * v
    return out_BHQd


def unrolled_flash(q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], mask_B1QS: Tensor, scale: float) -> Tensor:
    """The same on the CPU without S×S scores. `mask_B1QS` is additive (0 or -inf) in the dtype of q; no row may be all -inf."""
    own = keys[1:]
    k_own = torch.stack(list(own), dim=3) if own else q_BHQd.new_empty(*q_BHQd.shape[:3], 0, q_BHQd.shape[3])
    v_own = torch.stack(list(values[1:]), dim=3) if own else k_own
    out: Tensor = _UnrolledFlash.apply(q_BHQd, keys[0], values[0], k_own, v_own, mask_B1QS, scale)
    return out


class _UnrolledFlash(torch.autograd.Function):
    """Causal block by the CPU flash kernel, own-slot entries [B, H, Q, k, d] by hand, joined by their log-sum-exp.

    The kernel's backward is fed the *merged* output and log-sum-exp: it recomputes each weight as exp(score - lse) and
    the softmax correction as Σ grad·out, and both must be those of the joint softmax (as in ring attention).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, k_own: Tensor, v_own: Tensor, mask: Tensor, scale: float) -> Tensor:
        out_block, lse_block = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
        scores = torch.einsum("bhqd,bhqkd->bhqk", q, k_own).float() * scale
        lse = torch.logsumexp(torch.cat([lse_block[..., None], scores], dim=-1), dim=-1)
        own = (scores - lse[..., None]).exp().to(q.dtype)
        out = out_block * (lse_block - lse).exp()[..., None].to(q.dtype) + torch.einsum("bhqk,bhqkd->bhqd", own, v_own)
        ctx.save_for_backward(q, k, v, k_own, v_own, mask, out, lse, own)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, k_own, v_own, mask, out, lse, own = ctx.saved_tensors
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=ctx.scale
        )
        d_weights = torch.einsum("bhqd,bhqkd->bhqk", grad, v_own)
        d_scores = own * (d_weights - (grad * out).sum(-1, keepdim=True)) * ctx.scale
        dq = dq + torch.einsum("bhqk,bhqkd->bhqd", d_scores, k_own)
        return dq, dk, dv, d_scores[..., None] * q[..., None, :], own[..., None] * grad[..., None, :], None, None
