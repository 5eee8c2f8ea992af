"""Drafters that algorithms share: of autoregressive ones, a forward per token of a chain or depth of a tree; and what parallel ones do.

And what is settled before a draft is made: its length, by what was accepted lately; whether an algorithm without weights makes it.
"""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contracts.algorithm import Choose, DrafterBase, tokens_to_draft
from ..contracts.draft import Layout
from ..draft.attention import Causal, DecodingCache, Full
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from .tree import DraftTree, Rank, TreeShape

Sure = tuple[Tensor, Callable[[], Tensor]]
"""Logits [W], and what says how likely the token chosen from them is accepted if those before it are."""
Turn = Generator[Tensor | Sure, Any, None]
"""Logits [W] one after another, told the target id chosen from the latest: `token = yield logits_W`."""
MEMORY = 0.8
"""What the latest rounds count in the next one: about five of them."""


class AutoregressiveDrafter:
    """Feeds the draft its own state and token (EAGLE). An algorithm returns it from `drafter(draft)`.

    Keeps the keys and values of confirmed slots; drafted ones are recomputed from the target's features once accepted.
    """

    def __init__(self, draft: BaseDraft):
        self.draft, self.cache, self.confirmed = draft, DecodingCache(), 0

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Choose) -> tuple[list[int], list[Tensor]]:
        """A chain; see `foredraft.contracts.Drafter`."""
        hidden_11D = self._confirm(ids, aux_1NA)
        tokens: list[int] = []
        scores: list[Tensor] = []
        while True:
            chosen = choose(self.draft.compute_logits(hidden_11D)[0, 0], tokens)
            if chosen is None:
                return tokens, scores
            token, logits_V = chosen
            tokens.append(token)
            scores += [logits_V] if logits_V is not None else []
            if len(tokens) == limit:
                return tokens, scores
            visible = torch.ones(1, len(tokens), dtype=torch.bool, device=ids.device)
            hidden_11D = self._draft(torch.tensor([token], device=ids.device), hidden_11D, visible)

    def propose_tree(self, ids: Tensor, aux_1NA: Tensor, shape: TreeShape, rank: Rank) -> DraftTree:
        """A tree; see `foredraft.decoding.tree.TreeDrafter`. Each depth is one forward over the nodes expanded there (F of them)."""
        hidden_1FD = self._confirm(ids, aux_1NA)
        paths_FK = ids.new_empty(1, 0)
        value_F = torch.zeros(1, device=ids.device)  # log-probability of the path
        node_F = torch.full((1,), -1, device=ids.device)  # index among all candidates; -1 is the root
        visible_FE = torch.ones(1, 0, dtype=torch.bool, device=ids.device)  # own ancestors among the E nodes expanded so far
        tokens, parents, values = [], [], []
        known = 0
        for depth in range(shape.depth):
            if depth:
                hidden_1FD = self._draft(paths_FK[:, -1], hidden_1FD, visible_FE)
            ids_Fk, log_p_Fk = rank(self.draft.compute_logits(hidden_1FD)[0], paths_FK, shape.top_k)
            value_Fk = value_F[:, None] + log_p_Fk
            if shape.min_confidence:
                value_Fk = value_Fk.masked_fill(value_Fk < math.log(shape.min_confidence), float("-inf"))
            tokens.append(ids_Fk.flatten())
            parents.append(node_F.repeat_interleave(ids_Fk.shape[1]))
            values.append(value_Fk.flatten())
            value_F, best_F = values[-1].topk(min(shape.top_k, value_Fk.numel()))
            parent_F = best_F // ids_Fk.shape[1]
            paths_FK = torch.cat([paths_FK[parent_F], tokens[-1][best_F, None]], dim=1)
            itself_FF = torch.eye(len(best_F), dtype=torch.bool, device=ids.device)
            visible_FE = torch.cat([visible_FE[parent_F], itself_FF], dim=1)
            hidden_1FD = hidden_1FD[:, parent_F]
            node_F = known + best_F
            known += value_Fk.numel()
            if not bool(value_F.isfinite().any()):
                break
        return DraftTree.ranked(torch.cat(tokens), torch.cat(parents), torch.cat(values), shape.num_nodes)

    def _confirm(self, ids: Tensor, aux_1NA: Tensor) -> Tensor:
        """Read the tokens accepted since the last call; the state [1, 1, D] that the first drafted token follows from."""
        draft, start = self.draft, self.confirmed
        self.confirmed = start + aux_1NA.shape[1]
        self.cache.crop(start)
        positions = torch.arange(start, self.confirmed, device=ids.device)[None]
        embeds = draft.embed_input_ids(ids[None, start + 1 : self.confirmed + 1])
        context = draft.project_hidden_states(aux_1NA)
        return draft.backbone(embeds, context, Layout(positions, Causal(), 1), self.cache)

    def _draft(self, ids_F: Tensor, hidden_1FD: Tensor, visible_FE: Tensor) -> Tensor:
        """Feed drafted tokens of one depth, each with its parent's state; their own, [1, F, D].

        They see what is confirmed and, of the E entries drafted since (theirs included), what `visible_FE` says.
        """
        depth_F = visible_FE.sum(-1)
        positions = self.confirmed - 1 + depth_F[None]
        pattern = Ancestors(F.pad(visible_FE, (self.confirmed, 0), value=True))
        return self.draft.backbone(self.draft.embed_input_ids(ids_F[None]), hidden_1FD, Layout(positions, pattern), self.cache)


class BlockDrafter:
    """Drafts a block in one forward (see `foredraft.draft.BlockAlgorithm`). An algorithm returns it from `drafter(draft)`.

    Keeps the keys and values of the target's features; a block's own are forgotten. `shift` and `whole` are the algorithm's;
    `turn(states [Q, D], newest id)` gives the logits of the slots, by default all at once.
    """

    def __init__(
        self,
        draft: BaseDraft,
        block_size: int,
        shift: int = 0,
        whole: bool = False,
        turn: Callable[[Tensor, int], Iterable[Tensor] | Turn] | None = None,
    ):
        self.draft, self.block_size, self.first, self.whole = draft, block_size, 1 - shift, whole
        self.turn = turn or (lambda states_QD, newest: draft.compute_logits(states_QD))
        self.cache, self.confirmed = DecodingCache(), 0

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Choose) -> tuple[list[int], list[Tensor]]:
        """See `foredraft.contracts.Drafter`; never more tokens than a block has slots that draft.

        The block is whole, as in training, however few are wanted: its slots see each other.
        """
        draft, size, start, fresh = self.draft, self.block_size, self.confirmed, aux_1NA.shape[1]
        wanted = range(self.first, self.first + min(limit, size - self.first))
        self.confirmed = start + fresh
        self.cache.crop(start)
        ids_1s = F.pad(ids[None, self.confirmed :], (0, size - 1), value=draft.config.mask_token_id)
        positions = torch.arange(start, self.confirmed + size, device=ids.device)[None]
        rows = None if self.whole else torch.tensor([[fresh + j for j in wanted]], device=ids.device)
        embeds, context = draft.embed_input_ids(ids_1s), draft.project_hidden_states(aux_1NA)
        hidden_QD = draft.backbone(embeds, context, Layout(positions, Full(), rows), self.cache)[0]
        hidden_QD = hidden_QD[wanted.start : wanted.stop] if self.whole else hidden_QD
        return choose_in_turn(self.turn(hidden_QD, int(ids[-1])), choose)


@dataclass(frozen=True)
class Ancestors:
    """The pattern of a tree: each query sees the keys that its row of the mask names."""

    mask: Tensor
    """[Q, K], True where a query may look."""

    def visible(self, batch: int, queries: int, entries: Sequence[int], rows: Tensor | None = None) -> Tensor:
        """See `Pattern.visible`."""
        return self.mask.expand(batch, -1, -1)

    def attend(self, q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, rows: Tensor | None = None) -> Tensor:
        """Attention over the one entry of `keys` and `values`; see `Pattern.attend`."""
        return F.scaled_dot_product_attention(q_BHQd, keys[0], values[0], attn_mask=self.mask, scale=scale, enable_gqa=True)


@runtime_checkable
class Trusting(Protocol):
    """A `Choose` that believes a draft that says how sure it is, in place of its probabilities."""

    sure: Callable[[], Tensor] | None
    """Of the next token, once."""


def choose_in_turn(logits: Iterable[Tensor] | Turn, choose: Choose) -> tuple[list[int], list[Tensor]]:
    """What `Drafter.propose` returns, of logits [W] that are there at once, or of a generator that is sent each token chosen.

    A token from each, until none may follow.
    """
    tokens: list[int] = []
    scores: list[Tensor] = []
    turn: Turn = logits if isinstance(logits, Generator) else (logits_W for logits_W in logits)
    told: int | None = None
    while True:
        try:
            said = turn.send(told)
        except StopIteration:
            return tokens, scores
        if not isinstance(said, Tensor):
            said, sure = said
            if isinstance(choose, Trusting):
                choose.sure = sure
        chosen = choose(said, tokens)
        if chosen is None:
            return tokens, scores
        told, logits_V = chosen
        tokens.append(told)
        scores += [logits_V] if logits_V is not None else []


@dataclass
class Recent:
    """How long drafts should be so that they are accepted whole with a chance of `least` or more, by the tokens accepted lately.

    A token counts as tested where those before it were accepted; α is the share of tested ones that were, and α^k the chance of k of them.
    Only rounds that are over count, so samples stay the target's. One token is drafted at least, or α would never change.
    """

    least: float
    accepted: float = 1.0
    tested: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.least < 1:
            raise ForedraftError(f"min_acceptance={self.least}: a chance from 0 (drafts are as long as asked for) to below 1")

    def length(self, most: int) -> int:
        """How many tokens to draft, of `most`; that many until one is rejected."""
        rate = self.accepted / self.tested
        if not self.least or rate == 1:
            return most
        return min(most, max(1, int(math.log(self.least) / math.log(rate)))) if rate else min(most, 1)

    def add(self, drafted: int, accepted: int) -> None:
        """A round is over."""
        if drafted:
            self.accepted = MEMORY * self.accepted + accepted
            self.tested = MEMORY * self.tested + min(accepted + 1, drafted)


class AskedFirst:
    """A drafter that reads the text alone, and another one for where it has nothing to say; each makes as many tokens as by itself."""

    def __init__(self, first: DrafterBase, drafter: Any, num_tokens: int):
        self.first: Any = first.drafter(None)
        self.drafter, self.num_tokens, self.most_first = drafter, num_tokens, tokens_to_draft(None, first.max_tokens)
        self.most = max(self.most_first, num_tokens)
        self.unread: list[Tensor] = []

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Choose) -> tuple[list[int], list[Tensor]]:
        """See `foredraft.contracts.Drafter`."""
        self.unread.append(aux_1NA)
        tokens, logits = self.first.propose(ids, aux_1NA[..., :0], min(limit, self.most_first), choose)
        if tokens:
            return tokens, logits
        aux_1NA, self.unread = torch.cat(self.unread, dim=1), []
        proposed: tuple[list[int], list[Tensor]] = self.drafter.propose(ids, aux_1NA, min(limit, self.num_tokens), choose)
        return proposed
