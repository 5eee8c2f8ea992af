"""Which slots are trained: exactly those that serving reaches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..contracts.draft import Batch


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
