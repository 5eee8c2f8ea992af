"""What is settled before a draft is made: its length, by what was accepted lately; and whether an algorithm without weights makes it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contracts.algorithm import Choose, DrafterBase, tokens_to_draft
from ..errors import ForedraftError

MEMORY = 0.8
"""What the latest rounds count in the next one: about five of them."""


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
