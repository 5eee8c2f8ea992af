"""From packed rows to a batch, with all that is drawn and worked out for it: slots, and the segments by which kernels see them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from safetensors.torch import load
from torch import Generator, Tensor
from torch.nn import functional as F

from ..contracts.algorithm import AlgorithmBase, Plan
from ..contracts.draft import Batch


class DraftCollator:
    """Stacks rows into tensors and adds the algorithm's plan, drawn on the CPU from generators seeded by (seed, epoch, row).

    Plans may pad what is trained to a `multiple`, which they find in the batch: kernels and compilers for GPUs like few widths.
    """

    def __init__(self, algorithm: AlgorithmBase, seed: int = 0, multiple: int = 1):
        self.algorithm, self.seed, self.multiple = algorithm, seed, multiple
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()
        self.read_states: Callable[[Mapping[str, Any]], dict[str, Tensor] | None] | None = None
        """Reads what is stored of the target's states of a batch, into `states`; where batches are made, so that training need not wait."""

    @property
    def epoch(self) -> int:
        """Which pass over the rows this is; set at any time, and seen by workers that outlive an epoch."""
        return int(self._epoch)

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch.fill_(number)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`input_ids`, `documents`, `spans`, `positions` [B, S], `row` [B], `ends` (see `ends_of`), `multiple`, and the plan.

        Where rows have images `pixels`, for each row its target's inputs beside the ids by name, or None.
        """
        batch: dict[str, Any] = {
            k: torch.from_numpy(np.array([r[k] for r in rows], np.int64)) for k in ("input_ids", "documents", "spans", "row")
        }
        batch |= pixels_of(rows)
        batch["positions"] = positions_within(batch["documents"])
        batch["ends"], batch["multiple"] = ends_of(batch["positions"]), self.multiple
        generators = [Generator().manual_seed(seed_of(self.seed, self.epoch, row)) for row in batch["row"].tolist()]
        if self.read_states is not None and (states := self.read_states(batch)) is not None:
            batch["states"] = states
        return self.algorithm.plan(batch, generators).joined(batch)


def pixels_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Tensor] | None]]:
    """`pixels` of rows where any has images: what the target reads beside the ids of each, by name, or None."""
    found = [load(kept) if (kept := row.get("pixels")) else None for row in rows]
    return {"pixels": found} if any(found) else {}


def seed_of(*parts: object) -> int:
    """A seed below 2^63 that follows from `parts`, in every version of Python and on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1


def positions_within(documents_BS: Tensor) -> Tensor:
    """The position of each token in its document, [B, S]: 0 where a document starts."""
    index_S = torch.arange(documents_BS.shape[1])
    starts_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    starts_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return index_S - torch.where(starts_BS, index_S, 0).cummax(dim=1).values


def ends_of(positions_BS: Tensor) -> tuple[Tensor, int]:
    """Where documents begin and end in rows laid end to end, [n+1] int32, and how long the longest is. Waits for the device."""
    starts_n = (positions_BS.flatten() == 0).nonzero().flatten()
    ends_n1 = torch.cat([starts_n, starts_n.new_tensor([positions_BS.numel()])])
    return ends_n1.int(), int(ends_n1.diff().max())


def reachable(spans_BS: Tensor, documents_BS: Tensor, step: int) -> Tensor:
    """[B, S], True where slot t may be trained at drafting step k = `step`: it predicts x_{t+2+k}, having read x_{t+1} .. x_{t+1+k}.

    All of these lie in one assistant span, and in the document of x_t: nothing is predicted across a turn or a document.
    """
    mask_BS = torch.zeros_like(spans_BS, dtype=torch.bool)
    count = max(0, spans_BS.shape[1] - 2 - step)
    first, last = spans_BS[:, 1 : 1 + count], spans_BS[:, 2 + step :]
    own = documents_BS[:, :count] == documents_BS[:, 1 : 1 + count]  # no slot leads into a document that begins with a span
    mask_BS[:, :count] = (first >= 0) & (first == last) & own
    return mask_BS


def padded_width(batch: Batch, rows: Sequence[Tensor]) -> int:
    """How long `rows` of a batch are padded to be stacked: as the longest, one at least, to the multiple that the collator asks for."""
    multiple: int = batch.get("multiple", 1)
    return multiple * -(-max(1, *(len(row) for row in rows)) // multiple)


def plan_unrolled(batch: Batch, steps: int, ahead: int = 0) -> Plan:
    """The slots that serving reaches: x_{t+1} .. x_{t+2+k} in one assistant span of x_t's document.

    `slots` [B, Q] are those of step 0, or so many `ahead` of them (drafts that read the newest token where these read the one behind
    it), padded with slot 0; `queries[k]` [N_k] index the flattened [B·Q]. `segments`: see `unrolled_segments`.
    """
    spans_BS, documents_BS = batch["spans"], batch["documents"]
    length = spans_BS.shape[1]
    slots = [mask_S.nonzero()[:, 0] for mask_S in reachable(spans_BS, documents_BS, 0)]
    width = padded_width(batch, slots)
    queries, rows = [], []
    for k in range(steps):
        mask_BS = reachable(spans_BS, documents_BS, k)
        at = [mask_S[s].nonzero()[:, 0] for s, mask_S in zip(slots, mask_BS, strict=True)]
        queries.append(torch.cat([b * width + q for b, q in enumerate(at)]))
        rows.append(torch.cat([b * length + slots[b][q] + 1 + k for b, q in enumerate(at)]))
    slots_BQ = torch.stack([F.pad(s, (0, width - len(s))) for s in slots]) + ahead
    return Plan.taught(queries, rows, slots=slots_BQ, segments=unrolled_segments(documents_BS, slots_BQ))


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
    """What the pattern `Unrolled` needs: the segments of its slots, for kernels of either kind, and those of all inputs, which layers below
    the last ask for at step 0. Reads lengths, which a GPU is waited for: call it where the batch is made."""
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
