"""What the target says of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Signal:
    """What the target said of a batch. The teacher's rows are those the algorithm's plan asked for, in that order."""

    aux_BSA: Tensor
    """Concatenated hidden states of the aux layers; empty in the last dimension if the algorithm does not need them."""
    hidden_BST: Tensor
    """Hidden states after the target's final norm; empty in the last dimension if the algorithm does not need them."""
    top_R: Tensor
    """The teacher's most likely token at each of the plan's `teacher_rows`."""
    logsumexp_R: Tensor
    """The normaliser over the full vocabulary at each of the plan's `teacher_rows`, float32."""
    head: Callable[[Tensor, Tensor | None], Tensor]
    """The target's logits (soft-cap and scaling included) of post-norm states [N, T], over the tokens [W] or all (None), float32."""
