"""Which rows of a batch see which keys, as the segments of a varlen kernel: made in the collator, on the CPU."""

from itertools import pairwise
from typing import TypedDict

import torch
from torch import Tensor


class Segments(TypedDict):
    """Segment i: the queries `cu_q[i]:cu_q[i+1]` over the keys `cu_k[i]:cu_k[i+1]` of the flattened [B·S], causal, last query on last key.

    Kernels want one segment after the other, of queries and of keys. So a document's queries are all rows from its first slot to its
    last, and keys that no slot sees have segments of their own, each with one query: rows that were not asked for, whose output is
    dropped and which give no gradient. A plain dict, so that data loaders and devices move it as they move the batch.
    """

    cu_q: Tensor
    """[n+1] int32."""
    cu_k: Tensor
    """[n+1] int32."""
    max_q: int
    """The longest segment of queries; 2 at least: kernels read a 1 as decoding, which is not causal."""
    max_k: int
    place: Tensor | None
    """[B·Q] the row of each slot; None: the rows are the slots."""
    source: Tensor | None
    """[rows] the slot in each row, any where none asked."""
    asked: Tensor | None
    """[rows] whether a slot did."""
    repeats: Tensor | None
    """[B·Q] slots that are there twice, as padding is; None: there are none."""


def segments(documents_BS: Tensor, slots_BQ: Tensor | None = None) -> Segments:
    """The segments by which `slots_BQ` see their documents up to themselves, or by which all inputs do.

    A document is a run of equal numbers in a row. A slot that repeats is padding: it is answered as the first of its kind and passes no
    gradient on. Reads lengths, so that a GPU is waited for: call it where the batch is made.
    """
    batch, length = documents_BS.shape
    device = documents_BS.device
    begins_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    begins_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    begins = [*begins_BS.flatten().nonzero()[:, 0].tolist(), batch * length]
    if slots_BQ is None:
        return _packed(begins, begins, device) | {"place": None, "source": None, "asked": None, "repeats": None}  # type: ignore[return-value]
    slot_N = (slots_BQ + length * torch.arange(batch, device=device)[:, None]).flatten()
    run_N = (begins_BS.flatten().cumsum(0) - 1)[slot_N]
    count = len(begins) - 1
    first_n = torch.full((count,), batch * length, device=device).scatter_reduce_(0, run_N, slot_N, "amin")
    last_n = torch.full((count,), -1, device=device).scatter_reduce_(0, run_N, slot_N, "amax")
    cu_q, cu_k, shifts = [0], [0], []
    for end, first, last in zip(begins[1:], first_n.tolist(), last_n.tolist(), strict=True):
        shifts.append(cu_q[-1] - first)
        if last >= 0:
            cu_q.append(cu_q[-1] + last + 1 - first)
            cu_k.append(last + 1)
        if cu_k[-1] < end:  # keys behind the last slot, or a document without one
            cu_q.append(cu_q[-1] + 1)
            cu_k.append(end)
    place_N = slot_N + torch.tensor(shifts, device=device)[run_N]
    index_N = torch.arange(len(slot_N), device=device)
    source = torch.full((cu_q[-1],), len(slot_N), device=device).scatter_reduce_(0, place_N, index_N, "amin")
    asked = source < len(slot_N)
    source = source.where(asked, 0)
    repeats_N = source[place_N] != index_N
    repeats = repeats_N if bool(repeats_N.any()) else None
    return _packed(cu_q, cu_k, device) | {"place": place_N, "source": source, "asked": asked, "repeats": repeats}  # type: ignore[return-value]


def unrolled_segments(documents_BS: Tensor, slots_BQ: Tensor) -> dict[str, Segments]:
    """What `Unrolled` needs: the segments of its slots, and those of all inputs, which layers below the last ask for at step 0."""
    return {"slots": segments(documents_BS, slots_BQ), "inputs": segments(documents_BS)}


def _packed(cu_q: list[int], cu_k: list[int], device: torch.device) -> dict[str, Tensor | int]:
    bounds = {name: torch.tensor(cu, dtype=torch.int32, device=device) for name, cu in (("cu_q", cu_q), ("cu_k", cu_k))}
    longest_q, longest_k = (max(b - a for a, b in pairwise(cu)) for cu in (cu_q, cu_k))
    return {**bounds, "max_q": max(2, longest_q), "max_k": max(2, longest_k)}
