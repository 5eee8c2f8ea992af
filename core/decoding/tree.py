"""What was drafted, as a tree (EAGLE-2, arXiv:2406.16858), and its verification: which of it is accepted, and at what cost.

Its shape and its re-ranking; the rule by which tokens are accepted; the target's attention over several tokens, which copies no keys.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from pydantic import Field, ValidationError
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..contracts.options import Frozen
from ..errors import ForedraftError

GROUPED = "foredraft_grouped"


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


class Lossy(Frozen):
    """Rules that accept more than the target itself would have said: the output is NOT the target's any more. Off unless asked for.

    One of the two. `lenience` l: a drafted token is accepted with probability min(1, p / (l·q)), greedily where p is at least l times
    the target's likeliest; no token comes with more than p / l (after arXiv:2211.17192, appendix A.5; what is drawn after a rejection is of
    p - l·q here). `typical` ε, δ: one is accepted where p exceeds min(ε, δ·exp(-H(p))), H the target's entropy there (arXiv:2401.10774, on
    typical acceptance).
    """

    lenience: float | None = Field(default=None, gt=0, lt=1)
    typical: tuple[float, float] | None = None

    @classmethod
    def parse(cls, text: str) -> "Lossy":
        """The rule written as `lenience=0.8` or `typical=0.09,0.3`. Raises `ForedraftError` for anything else."""
        name, _, values = text.partition("=")
        try:
            first, *rest = (float(value) for value in values.split(","))
            if name == "lenience" and not rest:
                return cls(lenience=first)
            if name == "typical" and len(rest) == 1 and min(first, rest[0]) > 0:
                return cls(typical=(first, rest[0]))
            raise ValueError
        except ValueError as error:
            raise ForedraftError(
                f"lossy rule '{text}': expected lenience=L, with L between 0 and 1, or typical=EPSILON,DELTA, as in typical=0.09,0.3"
            ) from error

    def __str__(self) -> str:
        return f"lenience {self.lenience:g}" if self.lenience else "typical {:g}, {:g}".format(*(self.typical or ()))

    def least(self, p_V: Tensor) -> Tensor:
        """What a token's probability must reach, where that alone decides."""
        if self.typical is None:
            return p_V.max() * (self.lenience or 1.0)
        epsilon, delta = self.typical
        entropy = torch.special.entr(p_V).sum()
        return torch.clamp(delta * torch.exp(-entropy), max=epsilon)


def choose_token(scores_V: Tensor, offered: Sequence[int], q_V: Tensor | None, do_sample: bool, lossy: Lossy | None = None) -> int:
    """The token that follows, where the target has these scores; `offered` are the drafted ones, drawn from `q_V` if that is given.

    Exact unless `lossy`: the target's own, or of one drawn from q it or a sample of max(p - q, 0).
    """
    p_V = scores_V.softmax(-1)
    by_chance = do_sample and (lossy is None or lossy.typical is None)
    if lossy is not None and offered and not by_chance:
        best = max(offered, key=lambda token: float(p_V[token]))
        if p_V[best] >= lossy.least(p_V):
            return best
    if not do_sample:
        return int(scores_V.argmax())
    if by_chance and (lossy is not None or q_V is not None):
        lenience = 1.0 if lossy is None else lossy.lenience or 1.0
        for token in offered:
            mass_V = lenience * (F.one_hot(p_V.new_tensor(token, dtype=torch.long), len(p_V)) if q_V is None else q_V.to(p_V.device))
            if bool(torch.rand((), device=p_V.device) * mass_V[token] < p_V[token]):
                return token
            left_V = (p_V - mass_V).clamp(min=0)
            p_V = torch.where(left_V.any(), left_V / left_V.sum(), p_V)  # nothing is left where p and q differ by rounding alone
    return int(torch.multinomial(p_V, 1))


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """While open, SDPA attention of a model on the CPU copies no keys and values: what it computes is the same.

    Where a mask is given, as it is as soon as a pass holds several tokens, transformers copies those of each group for every query head: on
    other devices masks and groups do not go together, on the CPU it is time lost.
    """
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    if (
        model.device.type != "cpu"
        or config._attn_implementation != "sdpa"
        or getattr(config, "num_key_value_heads", heads) in (None, heads)
    ):
        yield
        return
    AttentionInterface.register(GROUPED, _forward)
    AttentionMaskInterface.register(GROUPED, sdpa_mask)
    config._attn_implementation = GROUPED
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def _forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    if attention_mask is None or module.training or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None
