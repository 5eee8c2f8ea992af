"""Attention patterns: who sees whom, as `attend(q, keys, values, scale, rows)`. They know nothing of architectures.

And the cache whose entry they read while a draft decodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from ...data.collate import Segments, inputs_segments
from .flex import BlockTable, block_table, masked_flex
from .geometry import take_rows
from .kernels import kernel_for, ranged_kernel
from .masked import MaskFunction, causal_mask, dense_mask, in_ranges, masked_dense
from .unrolled import joint_attention


@dataclass(frozen=True)
class Causal:
    """A query sees its own and earlier positions of its document."""

    documents: Tensor | None = None
    """[B, S] document of each position, a run of equal numbers; None: all one document."""
    kernel: str = "auto"
    """Of training, where there are documents, see `kernel_for`."""
    _made: dict[str, Segments] = field(default_factory=dict, repr=False)

    def visible(self, batch: int, queries: int, entries: Sequence[int], rows: Tensor | None = None) -> Tensor:
        """See `Pattern.visible`."""
        device = self.documents.device if self.documents is not None else None
        return causal_mask(self.documents, rows, queries, entries[0], device)[:, 0].expand(batch, -1, -1)

    def attend(self, q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, rows: Tensor | None = None) -> Tensor:
        """Attention over the one entry of `keys` and `values`; see `Pattern.attend`."""
        queries, known = q_BHQd.shape[2], keys[0].shape[2]
        if self.documents is not None and rows is None and queries == known:
            if not self._made:  # all layers share them
                self._made["inputs"] = inputs_segments(self.documents)
            kernel = kernel_for(q_BHQd.device, q_BHQd.dtype, q_BHQd.shape[-1], self.kernel)
            return joint_attention(q_BHQd, keys, values, self._made["inputs"], scale, kernel)
        partial = self.documents is not None or rows is not None or queries not in (1, known)
        mask = causal_mask(self.documents, rows, queries, known, q_BHQd.device) if partial else None
        causal = not partial and queries > 1
        return F.scaled_dot_product_attention(q_BHQd, keys[0], values[0], attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)


@dataclass(frozen=True)
class Masked:
    """A query sees the keys that a function of indices names, whatever it is; dense, in chunks. It must see one at least."""

    sees: MaskFunction
    """Of indices of inputs: queries as well as keys are counted among all inputs."""

    def visible(self, batch: int, queries: int, entries: Sequence[int], rows: Tensor | None = None) -> Tensor:
        """See `Pattern.visible`."""
        return dense_mask(self.sees, _places(rows, queries, entries[0], None).expand(batch, -1), entries[0])[:, 0]

    def attend(self, q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, rows: Tensor | None = None) -> Tensor:
        """Attention over the one entry of `keys` and `values`; see `Pattern.attend`."""
        rows_BQ = _places(rows, q_BHQd.shape[2], keys[0].shape[2], q_BHQd.device).expand(len(q_BHQd), -1)
        return masked_dense(q_BHQd, keys[0], values[0], self.sees, rows_BQ, scale)


class Ranges(TypedDict):
    """What `Ranged` reads, made in the collator by `ranges`; a plain dict, so that it is moved as the batch is."""

    first: Tensor
    """[B, N, R] of each input, the first key of each of its ranges."""
    end: Tensor
    """[B, N, R] the key behind its last one; no higher than `first`: it sees none there."""
    queries: BlockTable
    """Of the last layer's queries."""
    every: BlockTable
    """Of the lower layers'."""


def ranges(first_BNR: Tensor, end_BNR: Tensor, rows_BQ: Tensor, own: int | None = None) -> Ranges:
    """Of N inputs, of which those at `rows_BQ` are queries in the last layer, and the last `own` (all) in those below."""
    inputs = first_BNR.shape[1]
    every = torch.arange(inputs - (own or inputs), inputs).expand(len(rows_BQ), -1)
    tables = [block_table(take_rows(first_BNR, at), take_rows(end_BNR, at), inputs) for at in (rows_BQ, every)]
    return Ranges(first=first_BNR, end=end_BNR, queries=tables[0], every=tables[1])


@dataclass(frozen=True)
class Ranged:
    """A query sees a few ranges of keys (P-EAGLE, DFlash): FlexAttention where it runs, elsewhere dense in chunks."""

    ranges: Ranges
    kernel: str = "auto"
    """See `ranged_kernel`."""

    @property
    def sees(self) -> MaskFunction:
        """See `in_ranges`."""
        return in_ranges(self.ranges["first"], self.ranges["end"])

    def visible(self, batch: int, queries: int, entries: Sequence[int], rows: Tensor | None = None) -> Tensor:
        """See `Pattern.visible`."""
        return Masked(self.sees).visible(batch, queries, entries, rows)

    def attend(self, q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, rows: Tensor | None = None) -> Tensor:
        """Attention over the one entry of `keys` and `values`; see `Pattern.attend`."""
        if ranged_kernel(q_BHQd.device, q_BHQd.dtype, q_BHQd.shape[-1], self.kernel) == "flex":
            rows_BQ = _places(rows, q_BHQd.shape[2], keys[0].shape[2], q_BHQd.device).expand(len(q_BHQd), -1)
            table = self.ranges["every" if rows is None else "queries"]
            return masked_flex(q_BHQd, keys[0], values[0], self.sees, rows_BQ, table, scale)
        return Masked(self.sees).attend(q_BHQd, keys, values, scale, rows)


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
        return F.scaled_dot_product_attention(q_BHQd, keys[0], values[0], scale=scale, enable_gqa=True)


class DecodingCache:
    """The draft's cache while it decodes: transformers' `DynamicCache`, cut back to the slots whose context the target has confirmed."""

    def __init__(self) -> None:
        self._cache = DynamicCache()

    def __len__(self) -> int:
        return max((layer.get_seq_length() for layer in self._cache.layers), default=0)

    def extend(self, layer: int, k_BHQd: Tensor, v_BHQd: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Append, and return everything so far as one entry."""
        keys, values = self._cache.update(k_BHQd, v_BHQd, layer)
        return [keys], [values]

    def crop(self, length: int) -> None:
        """Forget all beyond the first `length` slots, in every layer that has more."""
        for layer in self._cache.layers:
            if layer.get_seq_length() > length:
                layer.crop(length - layer.get_seq_length())
