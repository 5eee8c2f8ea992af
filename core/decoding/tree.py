"""What was drafted, as a tree (EAGLE-2, arXiv:2406.16858): its shape, its re-ranking, and what a verification needs to know of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from ..contracts.options import Frozen
from ..errors import ForedraftError


class TreeShape(Frozen):
    """How a tree grows: at each depth the `top_k` most likely nodes get `top_k` children each, then the best `num_nodes` of all stay.

    Likely is by the product of draft probabilities along the path (section 4 of the paper). A tree costs `depth` forwards of
    the draft, as a chain of that length does, and one forward of the target over `num_nodes` + 1 tokens.
    """

    depth: int = Field(5, ge=1, description="longest path: the most tokens that one pass of the target can accept")
    top_k: int = Field(8, ge=1, description="nodes expanded at each depth, and children of each")
    num_nodes: int = Field(32, ge=1, description="drafted tokens that stay for verification")
    min_confidence: float = Field(
        default=0.0, ge=0, lt=1, description="see `generate`: less likely paths end, so that a tree may be smaller"
    )

    @classmethod
    def parse(cls, text: str) -> "TreeShape":
        """The shape written as `depth,top_k,num_nodes`. Raises `ForedraftError` for anything else."""
        try:
            depth, top_k, num_nodes = (int(part) for part in text.split(","))
            return cls(depth=depth, top_k=top_k, num_nodes=num_nodes)
        except (ValueError, ValidationError) as error:
            raise ForedraftError(f"tree '{text}': expected depth,top_k,num_nodes, each at least 1, such as 5,8,32") from error

    def __str__(self) -> str:
        return f"tree of depth {self.depth}, top-k {self.top_k}"


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens as a tree; a chain is one of a single branch. Row 0 is its root, the newest token of the text; row i + 1 is the
    drafted token i."""

    tokens: Sequence[int]
    """The drafted target ids."""
    parents: Sequence[int]
    """The row of each one's parent: an earlier row."""
    logits: Sequence[Tensor] = ()
    """What the tokens of a chain were sampled from, [V] each; none: they are point masses."""

    @classmethod
    def ranked(cls, tokens_N: Tensor, parents_N: Tensor, values_N: Tensor, num_nodes: int) -> "DraftTree":
        """The `num_nodes` candidates of highest value (log-probability of the path; -inf never stays).

        `parents_N` are indices of candidates (-1: the root) that come before their children. A parent's value is never below its
        child's, and of equals the earlier wins: what stays is connected.
        """
        kept = values_N.sort(descending=True, stable=True).indices[:num_nodes]
        kept = kept[values_N[kept].isfinite()]
        rows = torch.zeros(len(values_N) + 1, dtype=torch.long, device=values_N.device)  # the last one is -1's: the root
        rows[kept] = torch.arange(1, len(kept) + 1, device=values_N.device)
        return cls(tokens_N[kept].tolist(), rows[parents_N[kept]].tolist())

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before."""
        return list(self.parents) == list(range(len(self.tokens)))

    @cached_property
    def visible(self) -> Tensor:
        """[N + 1, N + 1] on the CPU, True where a row may look: at itself and its ancestors."""
        mask = torch.eye(len(self.tokens) + 1, dtype=torch.bool)
        for row, parent in enumerate(self.parents, 1):
            mask[row] |= mask[parent]
        return mask

    @property
    def depths(self) -> Tensor:
        """[N + 1] the distance of each row from the root."""
        return self.visible.sum(-1) - 1

    @property
    def deepest(self) -> int:
        """How many tokens of it could be accepted at most."""
        return len(self.tokens) if self.is_chain else int(self.depths.max())

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """From a row and a token to the row of its child with that token."""
        return {(parent, token): row for row, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True), 1)}


class Rank(Protocol):
    """Ranks what may follow, as the caller's generation settings say."""

    def __call__(self, logits_NW: Tensor, drafted_NK: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """For each of N paths of K drafted tokens: the `count` (at most W) likeliest next target ids, and their log-probabilities.

        Both [N, count], likeliest first; -inf marks a token that may not follow.
        """


@runtime_checkable
class TreeDrafter(Protocol):
    """A `Drafter` that can also grow trees."""

    def propose_tree(self, ids: Tensor, aux_1NA: Tensor, shape: TreeShape, rank: Rank) -> DraftTree:
        """Draft a tree after `ids` [L]; `aux_1NA` as in `Drafter.propose`."""
