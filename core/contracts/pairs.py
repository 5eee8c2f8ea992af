"""In which order a loss looks at its pairs, each a draft state and the teacher row it is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

UNIT = 128
"""Teacher rows from one mark of `Pairs` to the next."""

Pairs = tuple["Tensor", list[int]]
"""Which pairs [N] follow each other by teacher row, and how many of them precede teacher rows 0, `UNIT`, 2 · `UNIT`, ..."""


def pairs_by_teacher(rows: Sequence[Tensor]) -> Pairs:
    """The pairs `rows[k]` [N_k] of all drafting steps, one behind the other, in the order of their teacher rows.

    Made where the rows are planned, since the marks are Python's: asked for on another device than the CPU, it waits for it.
    """
    import torch

    rows_N, order_N = torch.cat(list(rows)).cpu().sort(stable=True)
    units = int(rows_N[-1]) // UNIT + 1 if len(rows_N) else 0
    return order_N, torch.searchsorted(rows_N, UNIT * torch.arange(units + 1)).tolist()
