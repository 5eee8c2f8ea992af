"""What drafts are taught by: the target's word, or the text itself."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ..contracts.signal import Signal


class Supervisor(Protocol):
    """What R rows of draft states are held against; a row may serve several drafting steps."""

    @property
    def top_R(self) -> Tensor:
        """The token a greedy target emits, as a target id."""
        ...

    def probabilities(self, rows_N: Tensor, draft_ids_W: Tensor) -> Tensor:
        """What the draft is to learn over its vocabulary, at some of the rows; float32 [N, W], as a rule summing to one."""
        ...

    def mass(self, rows_N: Tensor) -> Tensor:
        """How much of the whole distribution the draft's vocabulary holds, [N]."""
        ...


@dataclass(frozen=True)
class Teacher:
    """The target's word on R rows."""

    logits_RW: Tensor
    """Its logits over the draft vocabulary, float32."""
    top_R: Tensor
    """Its most likely token, as a target id."""
    logsumexp_R: Tensor
    """Its normaliser over the full vocabulary."""

    @classmethod
    @torch.no_grad()
    def of(cls, signal: Signal, rows_R: Tensor, draft_ids_W: Tensor) -> "Teacher":
        """The teacher at `rows_R`, the plan's `teacher_rows` (indices into the flattened [B·S])."""
        hidden_RT = signal.hidden_BST.flatten(0, 1)[rows_R]
        return cls(signal.head(hidden_RT, draft_ids_W), signal.top_R, signal.logsumexp_R)

    def probabilities(self, rows_N: Tensor, draft_ids_W: Tensor) -> Tensor:
        """See `Supervisor`; the softmax is taken once for all R rows."""
        return self._softmax_RW[rows_N]

    def mass(self, rows_N: Tensor) -> Tensor:
        """See `Supervisor`."""
        return self._mass_R[rows_N]

    @cached_property
    def _softmax_RW(self) -> Tensor:
        return self.logits_RW.softmax(-1)

    @cached_property
    def _mass_R(self) -> Tensor:
        return (self.logits_RW.logsumexp(-1) - self.logsumexp_R).exp()


@dataclass(frozen=True)
class Labels:
    """The text itself as the teacher: all mass on the token that follows (hard-label cross-entropy)."""

    top_R: Tensor
    """The token, as a target id."""

    def probabilities(self, rows_N: Tensor, draft_ids_W: Tensor) -> Tensor:
        """See `Supervisor`; zero where the draft cannot name the token."""
        return (draft_ids_W == self.top_R[rows_N, None]).float()

    def mass(self, rows_N: Tensor) -> Tensor:
        """See `Supervisor`."""
        return torch.ones_like(rows_N, dtype=torch.float32)
