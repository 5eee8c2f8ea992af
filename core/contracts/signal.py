"""What the target says of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Signal:
    """What the target said of a batch."""

    aux_BSA: Tensor
    """Concatenated hidden states of the aux layers; empty in the last dimension if the algorithm does not need them."""
    hidden_BST: Tensor
    """Hidden states after the target's final norm; empty in the last dimension if the algorithm does not need them."""
    head: Callable[[Tensor], Tensor]
    """The target's logits (soft-cap and scaling included) of post-norm states [N, T], over its whole vocabulary, float32."""
    places_CBS: Tensor | None = None
    """Where the target's rotary embedding has its tokens, in C components (3 of M-RoPE: time, height, width); None: they are counted."""
