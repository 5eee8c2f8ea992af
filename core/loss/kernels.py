"""`rows.differentiate` on an accelerator: two Triton kernels over rows of logits, and between them what the objective says of each row.

Without [N, W] in memory but the logits, read twice and written once: so any `RowObjective` runs, of third parties too. Needs Triton,
which torch brings where it is built for CUDA. Tested interpreted and compiled without a device; it has not run on one yet.
"""

# mypy: allow-untyped-defs

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import Against, Found, RowSums

# Tokens of a row looked at at a time, and the warps that do; not tuned on a device.
BLOCK, WARPS = 4096, 8


@torch.no_grad()
def differentiate(logits_NW: Tensor, against: Against, wanted: bool) -> Found:
    """See `rows.differentiate`; the objective must be a `RowObjective`."""
    number, width = logits_NW.shape
    taught, top_N, said_N = against.taught, against.top_N, against.logits_of_text(logits_NW)
    p_RW = logits_NW if taught.p_RW is None else taught.p_RW  # not read where all is on one token
    shared = (against.rows_N, taught.top_R, taught.mass_R, width, logits_NW.stride(0), p_RW.stride(0))
    settings: dict[str, Any] = {"HARD": taught.p_RW is None, "BLOCK": min(BLOCK, triton.next_power_of_2(width)), "num_warps": WARPS}
    sums_5N = torch.empty(5, number, device=logits_NW.device)
    with torch.cuda.device_of(logits_NW):
        if number:
            sum_rows[(number,)](logits_NW, p_RW, taught.total_R, sums_5N, number, *shared, **settings)
        normaliser_N, cross_entropy_N, accepted_N, hit_N, low_N = sums_5N
        sums = RowSums(against, cross_entropy_N, accepted_N, normaliser_N, said_N)
        loss_N, a_N, b_N, c_N = sums.cost()
        if wanted and number:
            a_N, b_N = (torch.zeros_like(loss_N) if d_N is None else d_N.contiguous() for d_N in (a_N, b_N))
            scale_N = a_N * against.total_N - b_N * low_N + (0 if c_N is None else c_N)
            text = (taught.top_R, a_N) if c_N is None else (taught.text_R, c_N)  # the former are not read
            at_last = {"TEXT": c_N is not None, **settings}
            differentiate_rows[(number,)](logits_NW, p_RW, normaliser_N, a_N, b_N, scale_N, *text, *shared, **at_last)
    return Found(loss_N, hit_N, accepted_N, (top_N >= 0) * cross_entropy_N)


@triton.jit
def _taught(p_ptr, at, inside, top, HARD: tl.constexpr):
    return tl.where(at == top, 1.0, 0.0) if HARD else tl.load(p_ptr + at, mask=inside, other=0.0)


@triton.jit
def sum_rows(
    x_ptr, p_ptr, total_ptr, out_ptr, number, rows_ptr, top_ptr, mass_ptr, width, x_stride, p_stride,
    HARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of row n: log Σ exp x, -Σ p log q, Σ min(p · mass, q), whether nothing is above x[top], Σ q where q < p · mass; out is [5, N]."""
    n = tl.program_id(0).to(tl.int64)
    r = tl.load(rows_ptr + n)
    top = tl.load(top_ptr + r)
    mass = tl.load(mass_ptr + r)
    x_ptr += n * x_stride
    p_ptr += r * p_stride
    peak = float("-inf")
    z = 0.0
    dot = 0.0
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        x = tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
        p = _taught(p_ptr, at, inside, top, HARD)
        dot += tl.sum(tl.where(inside, p * x, 0.0), axis=0)
        higher = tl.maximum(peak, tl.max(x, axis=0))
        z = z * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), axis=0)
        peak = higher
    normaliser = peak + tl.log(z)
    accepted = 0.0
    low = 0.0
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        x = tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
        held = mass * _taught(p_ptr, at, inside, top, HARD)
        q = tl.exp(x - normaliser)
        accepted += tl.sum(tl.minimum(held, q), axis=0)
        low += tl.sum(tl.where(q < held, q, 0.0), axis=0)
    own = tl.load(x_ptr + tl.maximum(top, 0)).to(tl.float32)
    out_ptr += n
    tl.store(out_ptr, normaliser)
    tl.store(out_ptr + number, tl.load(total_ptr + r) * normaliser - dot)
    tl.store(out_ptr + 2 * number, accepted)
    tl.store(out_ptr + 3 * number, ((top >= 0) & (own >= peak)).to(tl.float32))
    tl.store(out_ptr + 4 * number, low)


@triton.jit
def differentiate_rows(
    x_ptr, p_ptr, normaliser_ptr, a_ptr, b_ptr, scale_ptr, text_ptr, c_ptr, rows_ptr, top_ptr, mass_ptr, width, x_stride, p_stride,
    TEXT: tl.constexpr, HARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write (scale + b · 1[q < p · mass]) · q - a · p - c · 1[text] over the logits of row n."""
    n = tl.program_id(0).to(tl.int64)
    r = tl.load(rows_ptr + n)
    top = tl.load(top_ptr + r)
    mass = tl.load(mass_ptr + r)
    normaliser = tl.load(normaliser_ptr + n)
    a = tl.load(a_ptr + n)
    b = tl.load(b_ptr + n)
    scale = tl.load(scale_ptr + n)
    if TEXT:
        text = tl.load(text_ptr + r)
        c = tl.load(c_ptr + n)
    x_ptr += n * x_stride
    p_ptr += r * p_stride
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        x = tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
        p = _taught(p_ptr, at, inside, top, HARD)
        q = tl.exp(x - normaliser)
        d = (scale + tl.where(q < p * mass, b, 0.0)) * q - a * p
        if TEXT:
            d -= tl.where(at == text, c, 0.0)
        tl.store(x_ptr + at, d.to(x_ptr.dtype.element_ty), mask=inside)
