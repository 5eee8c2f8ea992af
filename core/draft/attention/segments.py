"""Which rows of a batch see which keys, as the segments of a varlen kernel: made in the collator, on the CPU."""

from typing import TypedDict

import torch
from torch import Tensor


class Segments(TypedDict):
    """Segment i: the queries `cu_q[i]:cu_q[i+1]` over a stretch of keys of the flattened [B·S], causal, last query on last key.

    Kernels for CUDA want one segment after the other, of queries and of keys. So a document's queries are all rows from its first slot
    to its last, and keys that no slot sees have segments of their own, each with one query: rows that were not asked for, whose output
    is dropped and which give no gradient. Other kernels take the slots alone. A plain dict, so that data loaders and devices move it
    as they move the batch.
    """

    cu_q: Tensor
    """[n+1] int32."""
    cu_k: Tensor
    """[n+1] int32, stretches one after the other; or [n, 2], first and end of each, for kernels that do not mind."""
    max_q: int
    """The longest segment of queries; 2 at least: kernels read a 1 as decoding, which is not causal."""
    max_k: int
    place: Tensor | None
    """[B·Q] the row of each slot; None: the rows are the slots."""
    source: Tensor | None
    """[rows] the slot in each row, any where none asked."""
    asked: Tensor | None
    """[rows] whether a slot did; None: all."""
    repeats: Tensor | None
    """[B·Q] slots that are there twice, as padding is; None: there are none."""


def inputs_segments(documents_BS: Tensor) -> Segments:
    """All inputs see their document up to themselves. A document is a run of equal numbers in a row."""
    begins = _begins(documents_BS)
    bounds = torch.tensor([*begins.tolist(), documents_BS.numel()], dtype=torch.int32, device=documents_BS.device)
    longest = _longest(bounds)
    return Segments(cu_q=bounds, cu_k=bounds, max_q=longest, max_k=longest, place=None, source=None, asked=None, repeats=None)


def slots_segments(documents_BS: Tensor, slots_BQ: Tensor) -> Segments:
    """The slots see their document up to themselves; a segment is a run of neighbours, so that no row is in vain."""
    flat_N, begins = _flat(documents_BS, slots_BQ), _begins(documents_BS)
    row_R, place_N = flat_N.unique(return_inverse=True)
    begin_R = begins[torch.searchsorted(begins, row_R, right=True) - 1]
    first_R = torch.ones_like(row_R, dtype=torch.bool)
    first_R[1:] = (row_R[1:] != row_R[:-1] + 1) | (begin_R[1:] != begin_R[:-1])
    starts = first_R.nonzero()[:, 0]
    cu_q = torch.cat([starts, starts.new_tensor([len(row_R)])]).int()
    keys = torch.stack([begin_R[starts], row_R[cu_q[1:] - 1] + 1], dim=1).int()
    max_q, max_k = _longest(cu_q), max(2, int((keys[:, 1] - keys[:, 0]).max()))
    if torch.equal(place_N, torch.arange(len(place_N), device=place_N.device)):
        return Segments(cu_q=cu_q, cu_k=keys, max_q=max_q, max_k=max_k, place=None, source=None, asked=None, repeats=None)
    return Segments(cu_q=cu_q, cu_k=keys, max_q=max_q, max_k=max_k, **_moves(place_N, len(row_R)), asked=None)


def packed_segments(documents_BS: Tensor, slots_BQ: Tensor) -> Segments:
    """The same where segments must stand one after the other."""
    flat_N, begins = _flat(documents_BS, slots_BQ), _begins(documents_BS)
    run_N = torch.searchsorted(begins, flat_N, right=True) - 1
    firsts = torch.full_like(begins, documents_BS.numel()).scatter_reduce_(0, run_N, flat_N, "amin").tolist()
    lasts = torch.full_like(begins, -1).scatter_reduce_(0, run_N, flat_N, "amax").tolist()
    cu_q, cu_k, shifts = [0], [0], []
    for end, first, last in zip([*begins.tolist()[1:], documents_BS.numel()], firsts, lasts, strict=True):
        shifts.append(cu_q[-1] - first)
        if last >= 0:
            cu_q.append(cu_q[-1] + last + 1 - first)
            cu_k.append(last + 1)
        if cu_k[-1] < end:  # keys behind the last slot, or a document without one
            cu_q.append(cu_q[-1] + 1)
            cu_k.append(end)
    moves = _moves(flat_N + flat_N.new_tensor(shifts)[run_N], cu_q[-1])
    asked = torch.zeros(cu_q[-1], dtype=torch.bool, device=flat_N.device).index_fill_(0, moves["place"], True)
    bounds = [torch.tensor(cu, dtype=torch.int32, device=flat_N.device) for cu in (cu_q, cu_k)]
    return Segments(cu_q=bounds[0], cu_k=bounds[1], max_q=_longest(bounds[0]), max_k=_longest(bounds[1]), **moves, asked=asked)


def unrolled_segments(documents_BS: Tensor, slots_BQ: Tensor) -> dict[str, Segments]:
    """What `Unrolled` needs: the segments of its slots, for kernels of either kind, and those of all inputs, which layers below the last
    ask for at step 0. Reads lengths, which a GPU is waited for: call it where the batch is made."""
    return {
        "slots": slots_segments(documents_BS, slots_BQ),
        "packed": packed_segments(documents_BS, slots_BQ),
        "inputs": inputs_segments(documents_BS),
    }


class _Moves(TypedDict):
    place: Tensor
    source: Tensor
    repeats: Tensor | None


def _moves(place_N: Tensor, rows: int) -> _Moves:
    """From slots to rows and back; of slots in one row, the first is asked."""
    index_N = torch.arange(len(place_N), device=place_N.device)
    source = torch.full((rows,), len(place_N), device=place_N.device).scatter_reduce_(0, place_N, index_N, "amin")
    source = source.where(source < len(place_N), 0)
    repeats_N = source[place_N] != index_N
    return {"place": place_N, "source": source, "repeats": repeats_N if bool(repeats_N.any()) else None}


def _begins(documents_BS: Tensor) -> Tensor:
    """Where documents begin in the flattened [B·S]."""
    begins_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    begins_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return begins_BS.flatten().nonzero()[:, 0]


def _flat(documents_BS: Tensor, slots_BQ: Tensor) -> Tensor:
    """Slots in the flattened [B·S]."""
    batch, length = documents_BS.shape
    return (slots_BQ + length * torch.arange(batch, device=slots_BQ.device)[:, None]).flatten()


def _longest(cu: Tensor) -> int:
    return max(2, int(cu.diff().max()))
