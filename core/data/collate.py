"""From packed rows to a batch, with all that the algorithm draws for it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Generator, Tensor

from ..contracts.algorithm import AlgorithmBase
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
