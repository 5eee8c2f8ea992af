"""Varlen attention by several kernels, each as `forward` and `backward`; which one a device can run.

q [rows, H, d], k and v [keys, h, d], cu_q and cu_k [n+1] int32: segment i's queries see its keys causally, the last query the last key
(cu_k may be [n, 2] for kernels that are not `PACKED`, see `Segments`).
`forward` returns the output [rows, H, d] and the log-sum-exp of the scores [H, rows]. `backward` is given both, and takes them at
their word: each weight is exp(score - lse), the softmax's correction Σ grad·out. Where they are those of a softmax over more keys than
these (a merge), so is the gradient; rows whose log-sum-exp is +inf give none.
"""

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import ForedraftError

aten: Any = torch.ops.aten

CHUNK = 512
"""Queries at a time where scores are spelt out."""


class Bounds(NamedTuple):
    """How queries and keys fall into segments, see `Segments`."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int

    def spans(self) -> list[tuple[int, int, int, int]]:
        """First query, last, first key, last of each segment, ends exclusive; waits for the device."""
        keys = self.cu_k if self.cu_k.ndim == 2 else torch.stack([self.cu_k[:-1], self.cu_k[1:]], dim=1)
        return [(*rows, *among) for rows, among in zip(pairwise(self.cu_q.tolist()), keys.tolist(), strict=True)]


class Eager:
    """The readable one: scores of a few queries at a time, in float32 at least; any device, any dtype."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float) -> tuple[Tensor, Tensor]:
        """See the module."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=precise(q))
        for rows, keys, unseen in _chunks(bounds, q.device):
            scores = _scores(q[rows], k[keys], scale).masked_fill(unseen, float("-inf"))
            lse[:, rows] = scores.logsumexp(-1).flatten(0, 1)
            out[rows] = torch.einsum("hgnm,mhd->nhgd", scores.softmax(-1), v[keys].to(scores.dtype)).flatten(1, 2).to(q.dtype)
        return out, lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Bounds, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the module."""
        exact = precise(q)
        dq, dk, dv = torch.empty_like(q), *(torch.zeros_like(x, dtype=exact) for x in (k, v))
        for rows, keys, unseen in _chunks(bounds, q.device):
            query, upstream, answer = (x[rows].to(exact).unflatten(1, (k.shape[1], -1)) for x in (q, grad, out))
            key, value = k[keys].to(exact), v[keys].to(exact)
            scores = _scores(q[rows], k[keys], scale).masked_fill(unseen, float("-inf"))
            weights = (scores - lse[:, rows].unflatten(0, (k.shape[1], -1))[..., None]).exp()
            correction = (upstream * answer).sum(-1).permute(1, 2, 0)[..., None]
            d_scores = weights * (torch.einsum("nhgd,mhd->hgnm", upstream, value) - correction) * scale
            dq[rows] = torch.einsum("hgnm,mhd->nhgd", d_scores, key).flatten(1, 2).to(q.dtype)
            dk[keys] += torch.einsum("hgnm,nhgd->mhd", d_scores, query)
            dv[keys] += torch.einsum("hgnm,nhgd->mhd", weights, upstream)
        return dq, dk.to(k.dtype), dv.to(v.dtype)


class FlashCPU:
    """Torch's flash kernel for the CPU, segment by segment: the keys before the first query's own, all seen, and the square behind them."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float) -> tuple[Tensor, Tensor]:
        """See the module."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=precise(q))
        for rows, parts in _blocks(bounds):
            done: list[tuple[Tensor, Tensor]] = []
            for keys, causal in parts:
                args = (_heads(q, rows), _heads(k, keys), _heads(v, keys), 0.0, causal)
                done.append(aten._scaled_dot_product_flash_attention_for_cpu(*args, scale=scale))
            total = torch.stack([part_lse for _, part_lse in done]).logsumexp(0) if len(done) > 1 else done[0][1]
            lse[:, rows] = total[0]
            for i, (part, part_lse) in enumerate(done):
                share = part * (part_lse - total).exp()[..., None].to(q.dtype) if len(done) > 1 else part
                target = out[rows].transpose(0, 1)
                target.add_(share[0]) if i else target.copy_(share[0])
        return out, lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Bounds, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the module."""
        dq, dk, dv = torch.empty_like(q), *(torch.zeros_like(x, dtype=precise(x)) for x in (k, v))
        for rows, parts in _blocks(bounds):
            for i, (keys, causal) in enumerate(parts):
                args = (*(_heads(x, at) for x, at in ((grad, rows), (q, rows), (k, keys), (v, keys), (out, rows))), lse[None, :, rows])
                parts_of = aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, 0.0, causal, scale=scale)
                d_query, d_key, d_value = (x[0].transpose(0, 1) for x in parts_of)
                dq[rows] = dq[rows] + d_query if i else d_query
                dk[keys] += d_key
                dv[keys] += d_value
        return dq, dk.to(k.dtype), dv.to(v.dtype)


class Flash:
    """Torch's own flash kernels for CUDA; FlashAttention 3 or 4 where `torch.nn.attention.activate_flash_attention_impl` says so."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float) -> tuple[Tensor, Tensor]:
        """See the module."""
        padded = (_padded(x) for x in (q, k, v))
        out, lse, *_ = aten._flash_attention_forward(*padded, *bounds, 0.0, True, False, scale=scale)
        return out[..., : q.shape[-1]].contiguous(), lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Bounds, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the module."""
        padded = (_padded(x) for x in (grad, q, k, v, out))
        # The state of dropout's random numbers, which nothing reads without dropout.
        state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        dq, dk, dv = aten._flash_attention_backward(*padded, lse, *bounds, 0.0, True, state, unused, scale=scale)
        size = q.shape[-1]
        return dq[..., :size].contiguous(), dk[..., :size].contiguous(), dv[..., :size].contiguous()


class FlashAttn:
    """The package `flash-attn`, version 2."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float) -> tuple[Tensor, Tensor]:
        """See the module."""
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        padded = (_padded(x) for x in (q, k, v))
        out, lse, *_ = _flash_attn_varlen_forward(*padded, *bounds, 0.0, scale, True)
        return out[..., : q.shape[-1]].contiguous(), lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Bounds, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the module."""
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        padded = [_padded(x) for x in (grad, q, k, v, out)]
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in padded[1:4]]
        _flash_attn_varlen_backward(*padded, lse, *found, *bounds, 0.0, scale, True, -1, -1, 0.0, None, False)
        dq, dk, dv = (x[..., : q.shape[-1]].contiguous() for x in found)
        return dq, dk, dv


PACKED = ("flash", "flash-attn")
"""Kernels that want one segment after the other."""

KERNELS: dict[str, Any] = {"eager": Eager, "flash-cpu": FlashCPU, "flash": Flash, "flash-attn": FlashAttn}


WORDS = {
    "eager": "scores spelt out for a few queries at a time",
    "flash-cpu": "torch's flash kernel for the CPU",
    "flash": "torch's flash kernels for CUDA",
    "flash-attn": "the package flash-attn",
    "flex": "FlexAttention over tables of blocks",
    "dense": "masks of a few queries at a time",
}


def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int, asked: str = "auto") -> str:
    """The kernel, of `KERNELS`, for varlen attention on `device`.

    `asked`: "flash" (torch's own, of the CPU or of CUDA), "flash-attn" (the package), "flex" (FlexAttention), "eager", or "auto": the
    first that runs of flash, flex and eager. Raises `ForedraftError` for a kernel that does not run here, saying what it wants.
    """
    if device.type == "cpu" and asked in ("auto", "flash"):
        return "flash-cpu"
    if asked not in ("auto", "eager", "flash", "flash-attn", "flex"):
        raise ForedraftError(f"unknown attention kernel '{asked}': choose auto, flash, flash-attn, flex or eager")
    return _first(("flash", "flex", "eager") if asked == "auto" else (asked,), device, dtype, head_dim)


def ranged_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, asked: str = "auto") -> str:
    """The kernel for attention over ranges of keys (`Ranged`): "flex" or "dense", masks of a few queries at a time.

    `asked`: "flex", "eager" (the masks), or "auto": the first that runs. Raises `ForedraftError` for a kernel that knows no ranges, or
    does not run here, saying what it wants.
    """
    names = {"auto": ("flex", "dense"), "flex": ("flex",), "eager": ("dense",)}
    if asked not in names:
        raise ForedraftError(
            f"attention kernel '{asked}': this draft's queries see ranges of keys, which it does not know; leave the kernel to 'auto' "
            "(FlexAttention on CUDA, masks of a few queries at a time elsewhere), or ask for 'eager'"
        )
    return _first(names[asked], device, dtype, head_dim)


def _first(names: Sequence[str], device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The first kernel that lacks nothing; raises for the last."""
    for name in names:
        missing = _missing(name, device, dtype, head_dim)
        if not missing:
            return name
    raise ForedraftError(
        f"attention kernel '{name}' wants {', '.join(missing)}; found {dtype} on {device.type}, heads of {head_dim}: "
        "mend that, or leave the kernel to 'auto'"
    )


def _missing(kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
    """What a kernel wants and does not find."""
    if kernel in ("eager", "dense"):
        return []
    wants = {"a CUDA device": device.type == "cuda"}
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    if kernel == "flex":
        # Other cards have 100 KiB of shared memory, for which FlexAttention's blocks of wider heads are too large.
        most = 256 if capability == (8, 0) or capability[0] in (9, 10) else 256 // dtype.itemsize
        wants[f"heads of 16 to {most}"] = 16 <= head_dim <= most
    else:
        wants |= {"bfloat16 or float16": dtype in (torch.bfloat16, torch.float16), "heads of 256 at most": head_dim <= 256}
    if device.type == "cuda":
        wants["compute capability 8.0 or above"] = capability >= (8, 0)
    if kernel == "flex":
        wants["the package: pip install triton"] = find_spec("triton") is not None
        wants["TORCH_COMPILE_DISABLE unset"] = os.environ.get("TORCH_COMPILE_DISABLE") != "1"
    if kernel == "flash-attn":
        wants["the package: pip install 'foredraft[flash]'"] = find_spec("flash_attn") is not None
    return [want for want, there in wants.items() if not there]


def precise(x: Tensor) -> torch.dtype:
    """The dtype that sums over x are taken in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def _scores(q_nHd: Tensor, k_mhd: Tensor, scale: float) -> Tensor:
    """[h, H/h, n, m]: grouped heads are seen together, never copied."""
    exact = precise(q_nHd)
    return torch.einsum("nhgd,mhd->hgnm", q_nHd.to(exact).unflatten(1, (k_mhd.shape[1], -1)), k_mhd.to(exact)) * scale


def _chunks(bounds: Bounds, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows, the keys that any of them sees, and which of these each does not see [n, m]."""
    for q, q_end, k, k_end in bounds.spans():
        ahead = (k_end - k) - (q_end - q)
        for start in range(q, q_end, CHUNK):
            end = min(start + CHUNK, q_end)
            last_n = torch.arange(start - q, end - q, device=device) + ahead
            seen = ahead + end - q
            yield slice(start, end), slice(k, k + seen), torch.arange(seen, device=device) > last_n[:, None]


def _blocks(bounds: Bounds) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
    """Rows, and their keys in parts: those that all of them see, and the square of which they see the lower half."""
    for q, q_end, k, k_end in bounds.spans():
        square = k_end - (q_end - q)
        parts = [(slice(k, square), False)] if square > k else []
        yield slice(q, q_end), [*parts, (slice(square, k_end), True)]


def _heads(x_THd: Tensor, rows: slice) -> Tensor:
    """[1, H, n, d] as the CPU's kernel reads it."""
    return x_THd[rows].transpose(0, 1)[None]


def _padded(x_THd: Tensor) -> Tensor:
    """With heads of a multiple of 8, as the kernels for CUDA want them; zeros change no score and no output."""
    missing = -x_THd.shape[-1] % 8
    return F.pad(x_THd, (0, missing)) if missing else x_THd
