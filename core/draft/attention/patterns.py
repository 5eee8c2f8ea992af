"""Attention patterns: who sees whom, as `attend(q, keys, values, scale, rows)`. They know nothing of architectures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernels import PACKED, kernel_for
from .masked import block_mask, dense_mask, masked_dense, masked_flex
from .segments import Segments, packed_segments, slots_segments, unrolled_segments
from .unrolled import joint_attention, unrolled_eager

Backend = Literal["auto", "eager", "flex"]


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


def expand_heads(x_BhKd: Tensor, heads: int) -> Tensor:
    """Repeat grouped key/value heads until there are `heads` of them."""
    repeats = heads // x_BhKd.shape[1]
    return x_BhKd if repeats == 1 else x_BhKd.repeat_interleave(repeats, dim=1)


@dataclass(frozen=True)
class Causal:
    """A query sees its own and earlier positions of its document."""

    documents: Tensor | None = None
    """[B, S] document of each position; None: all one document."""
    backend: Backend = "auto"

    def visible(self, batch: int, queries: int, entries: Sequence[int], rows: Tensor | None = None) -> Tensor:
        """See `Pattern.visible`."""
        device = self.documents.device if self.documents is not None else None
        return causal_mask(self.documents, rows, queries, entries[0], device)[:, 0].expand(batch, -1, -1)

    def attend(self, q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, rows: Tensor | None = None) -> Tensor:
        """Attention over the one entry of `keys` and `values`; see `Pattern.attend`."""
        k, v = expand_heads(keys[0], q_BHQd.shape[1]), expand_heads(values[0], q_BHQd.shape[1])
        queries, known = q_BHQd.shape[2], k.shape[2]
        plain = self.documents is None and rows is None and queries in (1, known)
        if plain and self.backend != "eager":
            return F.scaled_dot_product_attention(q_BHQd, k, v, is_causal=queries > 1, scale=scale)
        mask = causal_mask(self.documents, rows, queries, known, q_BHQd.device)
        if self.backend == "eager":
            return unrolled_eager(q_BHQd, [k], [v], mask, scale)
        return F.scaled_dot_product_attention(q_BHQd, k, v, attn_mask=mask, scale=scale)


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
        return joint_attention(q_BHQd, keys, values, self._segments(len(keys), rows, kernel), scale, kernel)

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


MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) → may the query look; index tensors that broadcast. The form that FlexAttention takes."""


@dataclass(frozen=True)
class Masked:
    """A query sees the keys that a function of indices names (P-EAGLE, DFlash, trees). It must see one at least."""

    sees: MaskFunction
    """Of indices of inputs: queries as well as keys are counted among all inputs."""
    backend: Backend = "auto"
    _blocks: dict[tuple[int, ...], Any] = field(default_factory=dict, repr=False)

    def visible(self, batch: int, queries: int, entries: Sequence[int], rows: Tensor | None = None) -> Tensor:
        """See `Pattern.visible`."""
        return dense_mask(self.sees, _places(rows, queries, entries[0], None).expand(batch, -1), entries[0])[:, 0]

    def attend(self, q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, rows: Tensor | None = None) -> Tensor:
        """Attention over the one entry of `keys` and `values`; see `Pattern.attend`."""
        k, v = keys[0], values[0]
        rows_BQ = _places(rows, q_BHQd.shape[2], k.shape[2], q_BHQd.device).expand(len(q_BHQd), -1)
        if self.backend == "flex" or (self.backend == "auto" and q_BHQd.device.type == "cuda"):
            shape = (*rows_BQ.shape, k.shape[2], rows is None)
            if shape not in self._blocks:  # the layers of a draft share it
                self._blocks[shape] = block_mask(self.sees, rows_BQ, k.shape[2])
            return masked_flex(q_BHQd, k, v, self._blocks[shape], scale)
        k, v = expand_heads(k, q_BHQd.shape[1]), expand_heads(v, q_BHQd.shape[1])
        if self.backend == "eager":
            return unrolled_eager(q_BHQd, [k], [v], dense_mask(self.sees, rows_BQ, k.shape[2]), scale)
        return masked_dense(q_BHQd, k, v, self.sees, rows_BQ, scale)


def _places(rows_BQ: Tensor | None, queries: int, keys: int, device: torch.device | None) -> Tensor:
    """Where the queries stand among the keys, [B or 1, Q]."""
    return rows_BQ if rows_BQ is not None else torch.arange(keys - queries, keys, device=device)[None]


@dataclass(frozen=True)
class Full:
    """A query sees all keys: a block that is drafted at once."""

    def visible(self, batch: int, queries: int, entries: Sequence[int], rows: Tensor | None = None) -> Tensor:
        """See `Pattern.visible`."""
        return torch.ones(batch, queries, entries[0], dtype=torch.bool)

    def attend(self, q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, rows: Tensor | None = None) -> Tensor:
        """Attention over the one entry of `keys` and `values`; see `Pattern.attend`."""
        k, v = expand_heads(keys[0], q_BHQd.shape[1]), expand_heads(values[0], q_BHQd.shape[1])
        return F.scaled_dot_product_attention(q_BHQd, k, v, scale=scale)
