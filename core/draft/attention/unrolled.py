"""Training-time test: a draft run on its own outputs, and the attention of that.

A varlen kernel runs over the causal keys, and is merged with the own-slot entries by log-sum-exp.

Kernels stand behind an operator of torch, so that fake tensors, compilers and counters of operations know them; FlexAttention is one
of torch's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...contracts.draft import Batch, DraftModel, Layout
from ...data.collate import Segments, packed_segments, slots_segments, unrolled_segments
from .flex import VarlenFlex
from .geometry import Lookup, Regions, region
from .kernels import KERNELS, PACKED, Bounds, kernel_for, precise
from .masked import causal_mask


def unrolled(draft: DraftModel, batch: Batch, aux_BSA: Tensor, steps: int, through_time: bool = True) -> list[Tensor]:
    """The draft's states at `batch["slots"]` after each step: K tensors [B, Q, D].

    Slot t reads the target's state after x_t and the embedding of x_{t+1}; at step k its own state of step k-1, and x_{t+1+k}: with a
    gradient, unless `through_time` is off.
    """
    ids_BS, slots_BQ, positions_BS = batch["input_ids"], batch["slots"], batch["positions"]
    last = ids_BS.shape[1] - 1
    pattern = Unrolled(batch["documents"], slots_BQ, draft.kernel, batch.get("segments"), draft.regions)
    cache = UnrolledCache()
    context = draft.project_hidden_states(aux_BSA)
    embeds: Any = Lookup(draft.embed_input_ids(ids_BS.roll(-1, dims=1)))  # all steps read the same tokens
    hidden_BQD = draft.backbone(embeds, context, Layout(positions_BS, pattern, slots_BQ), cache)
    states = [hidden_BQD]
    positions_BQ = positions_BS.gather(1, slots_BQ)
    for k in range(1, steps):
        fed_BQD = hidden_BQD if through_time else hidden_BQD.detach()
        hidden_BQD = draft.backbone(embeds.at((slots_BQ + k).clamp(max=last)), fed_BQD, Layout(positions_BQ + k, pattern), cache)
        states.append(hidden_BQD)
    return states


class UnrolledCache:
    """Keys and values of training-time test: step 0 of all slots, then one entry per step for the active slots.

    `extend` returns the list `[K_0 [B, H, S, d], K_1 [B, H, Q, d], ..., K_k]`, which the pattern `Unrolled` reads.
    """

    def __init__(self) -> None:
        self._steps: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def extend(self, layer: int, k_BHQd: Tensor, v_BHQd: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Add one step."""
        keys, values = self._steps.setdefault(layer, ([], []))
        keys.append(k_BHQd)
        values.append(v_BHQd)
        return list(keys), list(values)


@dataclass(frozen=True)
class Unrolled:
    """Training-time test (EAGLE-3, section 3.2): the causal keys of step 0, then the own slot at steps 1 to k, one joint softmax.

    The first call is causal over all inputs; those after it are of the slots alone.
    """

    documents: Tensor
    """[B, S] document of each input of the first call: a run of equal numbers."""
    slots: Tensor
    """[B, Q] the inputs of the first call that are drafted on. One that repeats another of its row is padding: it must bring the same
    query, and passes no gradient on."""
    kernel: str = "auto"
    """See `kernel_for`."""
    segments: Mapping[str, Segments] | None = None
    """`unrolled_segments(documents, slots)`, where the batch has them; else they are made here, which a GPU waits for."""
    regions: Regions = None
    """Of the merge, see `region`."""
    _made: dict[str, Segments] = field(default_factory=dict, repr=False)

    def visible(self, batch: int, queries: int, entries: Sequence[int], rows: Tensor | None = None) -> Tensor:
        """See `Pattern.visible`."""
        own_BQQ = torch.eye(queries, dtype=torch.bool, device=self.slots.device).expand(batch, -1, -1)
        places, length = (rows if len(entries) == 1 else self.slots), self.documents.shape[1]
        context_BQS = causal_mask(self.documents, places, length, length, self.documents.device)[:, 0]
        return torch.cat([context_BQS] + [own_BQQ] * (len(entries) - 1), dim=-1)

    def attend(self, q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, rows: Tensor | None = None) -> Tensor:
        """Attention over `keys[0]` [B, h, S, d] and the same-slot entries `keys[1:]` [B, h, Q, d]; see `Pattern.attend`."""
        kernel = kernel_for(q_BHQd.device, q_BHQd.dtype, q_BHQd.shape[-1], self.kernel)
        return joint_attention(q_BHQd, keys, values, self._segments(len(keys), rows, kernel), scale, kernel, self.regions)

    def _segments(self, entries: int, rows: Tensor | None, kernel: str) -> Segments:
        """Of the slots, of all inputs, or of other rows of the first call; all layers and steps share them."""
        if entries == 1 and rows is not None and rows is not self.slots:
            return (packed_segments if kernel in PACKED else slots_segments)(self.documents, rows)
        if self.segments is None and not self._made:
            self._made.update(unrolled_segments(self.documents, self.slots))
        made = self._made if self.segments is None else self.segments
        if entries == 1 and rows is None:
            return made["inputs"]
        return made["packed" if kernel in PACKED else "slots"]


def joint_attention(
    q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], segments: Segments, scale: float, kernel: str, regions: Regions = None
) -> Tensor:
    """One softmax over the causal `keys[0]` [B, h, S, d], by `segments`, and the own-slot entries `keys[1:]` [B, h, Q, d]: [B, H, Q, d]."""
    out_NHd: Tensor = _Joint.apply(segments, scale, kernel, regions, *(x.transpose(1, 2).flatten(0, 1) for x in (q_BHQd, *keys, *values)))
    return out_NHd.unflatten(0, (len(q_BHQd), -1)).transpose(1, 2)


class _Joint(torch.autograd.Function):
    """The backward kernel is fed the *merged* output and log-sum-exp: it recomputes each weight as exp(score - lse) and the softmax's
    correction as Σ grad·out, and both must be those of the joint softmax (as in ring attention)."""

    @staticmethod
    def forward(ctx: Any, segments: Segments, scale: float, kernel: str, regions: Regions, q: Tensor, *entries: Tensor) -> Tensor:
        # What is a view, or wants a gradient, would have regions compiled for itself.
        q, *entries = (x.detach() for x in (q, *entries))  # type: ignore[assignment]
        keys, values = entries[: len(entries) // 2], entries[len(entries) // 2 :]
        given = (_rows(q, segments), keys[0], values[0])
        ctx.flexed = VarlenFlex(*given, _bounds(segments), scale, any(ctx.needs_input_grad)) if kernel == "flex" else None
        block, lse_HR = varlen(*given, *_bounds(segments), scale, kernel) if ctx.flexed is None else (ctx.flexed.out, ctx.flexed.lse)
        block, lse = _slots(block, segments), _slots(lse_HR.T, segments)
        scores = [region(regions, _products, q, k) * scale for k in keys[1:]]
        total = torch.stack([lse, *scores], dim=-1).logsumexp(-1) if scores else lse
        out = block * (lse - total).exp()[..., None].to(q.dtype) if scores else block
        weights = [(score - total).exp() for score in scores]
        for weight, v in zip(weights, values[1:], strict=True):
            region(regions, _add, out, weight, v)
        ctx.save_for_backward(q, *entries, out, total, *weights)
        ctx.segments, ctx.scale, ctx.kernel, ctx.regions = segments, scale, kernel, regions
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, *rest = ctx.saved_tensors
        steps = (len(rest) - 1) // 3
        keys, values, (out, lse), weights = rest[:steps], rest[steps : 2 * steps], rest[2 * steps : 2 * steps + 2], rest[2 * steps + 2 :]
        segments, grad = ctx.segments, grad.contiguous().detach()
        lse_RH = _rows(lse, segments)
        if segments["asked"] is not None:
            lse_RH = lse_RH.masked_fill(~segments["asked"][:, None], float("inf"))
        rows = [_rows(x, segments) for x in (grad, q)]
        given = (*rows, keys[0], values[0], _rows(out, segments), lse_RH.T.contiguous())
        dq, *first = varlen_backward(*given, *_bounds(segments), ctx.scale, ctx.kernel) if ctx.flexed is None else ctx.flexed.back(*given)
        dq = _slots(dq, segments)
        if segments["repeats"] is not None:
            dq = dq.masked_fill(segments["repeats"][:, None, None], 0)
        correction = (grad * out).sum(-1, dtype=lse.dtype)
        d_keys, d_values = [first[0]], [first[1]]
        for k, v, weight in zip(keys[1:], values[1:], weights, strict=True):
            d_score = weight * ctx.scale * (region(ctx.regions, _products, grad, v) - correction)
            region(ctx.regions, _add, dq, d_score, k)
            d_keys.append(region(ctx.regions, _gathered, d_score, q, k))
            d_values.append(region(ctx.regions, _gathered, weight, grad, v))
        return None, None, None, None, dq, *d_keys, *d_values


def _bounds(segments: Segments) -> Bounds:
    return Bounds(segments["cu_q"], segments["cu_k"], segments["max_q"], segments["max_k"])


def _rows(x_NX: Tensor, segments: Segments) -> Tensor:
    """From slots to the kernel's rows."""
    return x_NX if segments["source"] is None else x_NX.index_select(0, segments["source"])


def _slots(x_RX: Tensor, segments: Segments) -> Tensor:
    """From the kernel's rows to slots."""
    return x_RX if segments["place"] is None else x_RX.index_select(0, segments["place"])


def _products(x_NHd: Tensor, y_Nhd: Tensor) -> Tensor:
    """Σ_d x·y of every query head with its group's entry, [N, H]."""
    return (_grouped(x_NHd, y_Nhd) * y_Nhd[:, :, None]).sum(-1, dtype=precise(x_NHd)).flatten(1)


def _add(out_NHd: Tensor, weight_NH: Tensor, y_Nhd: Tensor) -> None:
    """out += weight·y."""
    _grouped(out_NHd, y_Nhd).add_(_grouped(weight_NH.to(y_Nhd.dtype), y_Nhd)[..., None] * y_Nhd[:, :, None])


def _gathered(weight_NH: Tensor, x_NHd: Tensor, like_Nhd: Tensor) -> Tensor:
    """Σ over a group's heads of weight·x, [N, h, d]."""
    return (_grouped(weight_NH.to(x_NHd.dtype), like_Nhd)[..., None] * _grouped(x_NHd, like_Nhd)).sum(2)


def _grouped(x_NHX: Tensor, like_Nhd: Tensor) -> Tensor:
    """[N, h, H/h, X], or without the last dimension."""
    return x_NHX.unflatten(1, (like_Nhd.shape[1], -1))


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
