"""Varlen attention as an operator of torch, so that fake tensors, compilers and counters of operations know it; kernels behind it."""

import torch
from torch import Tensor

from .kernels import KERNELS, Bounds, precise


@torch.library.custom_op("foredraft::varlen", mutates_args=())
def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, kernel: str
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of causal attention by segments, see `kernels`; its gradient is `varlen_backward`'s, given by the caller."""
    out, lse = KERNELS[kernel].forward(q, k, v, Bounds(cu_q, cu_k, max_q, max_k), scale)
    return out, lse


@varlen.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, kernel: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=precise(q))


@torch.library.custom_op("foredraft::varlen_backward", mutates_args=())
def varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for an output and log-sum-exp that may be those of a merge."""
    dq, dk, dv = KERNELS[kernel].backward(grad, q, k, v, out, lse, Bounds(cu_q, cu_k, max_q, max_k), scale)
    return dq, dk, dv


@varlen_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
