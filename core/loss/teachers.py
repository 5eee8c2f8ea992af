"""What drafts are taught by: the target's word, or the text itself."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..contracts.signal import Signal

# Rows of full-vocabulary logits alive at a time: on the CPU, and elsewhere, where a pass over the head is worth more rows.
CHUNK, CHUNK_ELSEWHERE = 256, 512
# Numbers of a tensor looked at at a time on the CPU: what is read several times stays in its cache.
CACHED = 2**17
# Tokens of which the highest logit is looked for first.
BLOCK = 128


@dataclass(frozen=True)
class Taught:
    """What R teacher rows say over the draft's vocabulary."""

    top_R: Tensor
    """The token a greedy target emits, as a draft id; -1 where the draft cannot name it."""
    mass_R: Tensor
    """How much of the whole distribution the draft's vocabulary holds, float32."""
    p_RW: Tensor | None = None
    """What the draft is to learn, float32, as a rule summing to one. None: all on `top_R`, and nothing where that is -1."""
    text_R: Tensor | None = None
    """The token that follows in the text, as a draft id; -1 where the draft cannot name it. None: not known."""

    @cached_property
    def total_R(self) -> Tensor:
        """Σ p."""
        return (self.top_R >= 0).float() if self.p_RW is None else self.p_RW.sum(-1)

    @cached_property
    def entropy_R(self) -> Tensor:
        """-Σ p log p."""
        return torch.zeros_like(self.mass_R) if self.p_RW is None else -self.p_RW.xlogy(self.p_RW).sum(-1)

    def probabilities(self, rows_N: Tensor, width: int) -> Tensor:
        """p at some of the rows, spelt out over the `width` tokens of the draft's vocabulary, float32 [N, W]."""
        if self.p_RW is not None:
            return self.p_RW.index_select(0, rows_N)
        top_N = self.top_R[rows_N]
        one_NW = torch.zeros(len(top_N), width, device=top_N.device)
        return one_NW.scatter_(1, top_N.clamp(min=0)[:, None], (top_N >= 0).float()[:, None])


class Supervisor(Protocol):
    """What R rows of draft states are held against; a row may serve several drafting steps."""

    costly: ClassVar[bool]
    """Whether to ask is a pass over the target's vocabulary: then rows are asked for once each, a block at a time."""

    def at(self, rows: Tensor | slice, draft_ids_W: Tensor) -> Taught:
        """What some of the rows teach a draft of this vocabulary (target ids, ascending)."""


@dataclass(frozen=True)
class Teacher:
    """The target's word on R rows. A subclass that teaches otherwise changes what `at` gives back."""

    hidden_RT: Tensor
    """The target's states after its final norm."""
    head: Callable[[Tensor], Tensor]
    """Its logits [N, V] of some of them, float32."""
    text_R: Tensor | None = None
    """The tokens that follow in the text, as target ids, for objectives that read them."""

    costly: ClassVar[bool] = True

    @classmethod
    def of(cls, signal: Signal, rows_R: Tensor, ids_BS: Tensor | None = None) -> Self:
        """The teacher at `rows_R`, the plan's `teacher_rows` (indices into the flattened [B·S]), of the text `ids_BS`."""
        text_R = None if ids_BS is None else ids_BS.roll(-1, dims=1).flatten()[rows_R]
        return cls(signal.hidden_BST.flatten(0, 1)[rows_R], signal.head, text_R)

    @torch.no_grad()
    def at(self, rows: Tensor | slice, draft_ids_W: Tensor) -> Taught:
        """See `Supervisor`: one pass over the whole vocabulary, of which the draft's columns are kept."""
        hidden_NT = self.hidden_RT[rows]
        size = CHUNK if in_cache(hidden_NT) else CHUNK_ELSEWHERE
        parts = [_said(self.head(part_NT), draft_ids_W) for part_NT in hidden_NT.split(size)]
        text_N = None if self.text_R is None else draft_index(self.text_R[rows], draft_ids_W)
        top_N, mass_N, p_NW = map(torch.cat, zip(*parts, strict=True))
        return Taught(top_N, mass_N, p_NW, text_N)


def _said(logits_NV: Tensor, draft_ids_W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`top_R`, `mass_R` and `p_RW` of `Taught`."""
    top_N = _argmax(logits_NV)
    if len(draft_ids_W) == logits_NV.shape[-1]:
        return top_N, torch.ones_like(logits_NV[:, 0]), logits_NV.softmax(-1)
    p_NW, normaliser_N = softmax_and_total(logits_NV.index_select(1, draft_ids_W))
    mass_N = (normaliser_N - _logsumexp(logits_NV)).exp()
    return draft_index(top_N, draft_ids_W), mass_N, p_NW


def _argmax(x_NV: Tensor) -> Tensor:
    """`x.argmax(-1)`, the first of equals; a CPU's own looks at one number at a time, its maximum at many."""
    if not in_cache(x_NV) or x_NV.shape[1] < 2 * BLOCK:
        return x_NV.argmax(-1)
    last = x_NV.shape[1] - BLOCK
    peaks_Nb = torch.cat([x_NV.unfold(1, BLOCK, BLOCK).amax(-1), x_NV[:, last:].amax(-1, keepdim=True)], dim=1)
    start_N1 = (peaks_Nb.argmax(-1, keepdim=True) * BLOCK).clamp(max=last)
    return start_N1[:, 0] + x_NV.gather(1, start_N1 + torch.arange(BLOCK)).argmax(-1)


def _logsumexp(x_NV: Tensor) -> Tensor:
    """`x.logsumexp(-1)`, whose exponentials need not all be in memory."""
    return torch.cat([softmax_and_total(x_NV[part])[1] for part in in_pieces(x_NV)]) if in_cache(x_NV) else x_NV.logsumexp(-1)


def softmax_and_total(x_NW: Tensor) -> tuple[Tensor, Tensor]:
    """`x.softmax(-1)` and `x.logsumexp(-1)`, whose exponentials are taken once: the largest probability tells what all were divided by."""
    p_NW = x_NW.softmax(-1)
    return p_NW, x_NW.amax(-1) - p_NW.amax(-1).log()


@dataclass(frozen=True)
class Labels:
    """The text itself as the teacher: all mass on the token that follows (hard-label cross-entropy)."""

    top_R: Tensor
    """The token, as a target id."""

    costly: ClassVar[bool] = False

    def at(self, rows: Tensor | slice, draft_ids_W: Tensor) -> Taught:
        """See `Supervisor`."""
        top_N = draft_index(self.top_R[rows], draft_ids_W)
        return Taught(top_N, torch.ones_like(top_N, dtype=torch.float32), None, top_N)


def draft_index(ids_N: Tensor, draft_ids_W: Tensor) -> Tensor:
    """The draft ids of target ids; -1 for those that the draft cannot name."""
    index_N = torch.searchsorted(draft_ids_W, ids_N).clamp(max=len(draft_ids_W) - 1)
    return torch.where(draft_ids_W[index_N] == ids_N, index_N, -1)


def is_fake(tensor: Tensor) -> bool:
    """Fake tensors hold no values, and stand for those of a GPU: a step that is run on them is counted, whatever machine counts."""
    return isinstance(tensor, FakeTensor)


def in_cache(tensor: Tensor) -> bool:
    """Whether pieces should fit a CPU's cache; a GPU wants few launches."""
    return tensor.device.type == "cpu" and not is_fake(tensor)


def in_pieces(x_NW: Tensor, pieces: int = 1) -> list[slice]:
    """Rows of x, as many at a time as a CPU's cache holds `pieces` times; elsewhere all of them."""
    number, width = x_NW.shape
    size = max(1, pieces * CACHED // width if in_cache(x_NW) else number)
    return [slice(at, at + size) for at in range(0, max(1, number), size)]
