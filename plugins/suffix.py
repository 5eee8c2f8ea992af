"""Suffix decoding: what followed the newest tokens wherever they stood before, and how often. No draft model. arXiv:2411.04975."""

from typing import Any

import numpy as np
from pydantic import Field
from torch import Tensor

from foredraft import hookimpl
from foredraft.contracts import Choose, DrafterBase, DraftModel, Frozen

Array = np.ndarray[Any, Any]


class SuffixOptions(Frozen):
    """Options of suffix decoding; the defaults of `max_depth`, `max_spec_factor` and `min_token_prob` are those of vLLM's."""

    max_depth: int = Field(24, ge=1, description="tokens at the end of the text that are looked for, at most")
    max_spec_factor: float = Field(1.0, gt=0, description="tokens drafted for each token that was found again")
    min_token_prob: float = Field(0.1, ge=0, le=1, description="a draft ends before a token that so rarely came so far")
    num_tokens: int = Field(24, ge=1, le=512, description="tokens drafted at once, at most")


class Suffix(DrafterBase[SuffixOptions]):
    """Of every suffix of the text that stood in it before, follows the most frequent continuation, and drafts the most promising one.

    Promising is the sum, over the drafted tokens, of the share of occurrences that went on so far: the tokens to be accepted, if what
    comes is as what was (the paper's score, of a path). A longer match may draft more. The paper's trees of other requests' answers are
    not kept: prompt and answer of this one text count.
    """

    name = "suffix"
    summary = "the most frequent continuation of the newest tokens earlier in the text; no draft model, nothing to train"

    Options = SuffixOptions

    @property
    def max_tokens(self) -> int:
        """As the options say."""
        return self.options.num_tokens

    def drafter(self, draft: DraftModel | None) -> "Suffix":
        """Itself: all that it knows is the text."""
        return self

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Choose) -> tuple[list[int], list[Tensor]]:
        """See `foredraft.contracts.Drafter`; tokens without logits."""
        text, best, most = ids.cpu().numpy(), list[int](), 0.0
        ends = np.arange(1, len(text))  # where the suffix of 0 tokens ended before: a token follows each
        for length in range(1, min(self.options.max_depth, len(text) - 1) + 1):
            ends = ends[ends >= length]
            ends = ends[text[ends - length] == text[-length]]
            if not len(ends):
                break
            tokens, score = self._follow(text, ends, min(limit, max(1, int(self.options.max_spec_factor * length))))
            if score >= most:  # of equals the longer match
                best, most = tokens, score
        return best, []

    def _follow(self, text: Array, ends: Array, limit: int) -> tuple[list[int], float]:
        """The most frequent path from these places, and the sum of its tokens' shares; of equals the latest."""
        tokens, score, share = list[int](), 0.0, 1.0
        while len(tokens) < limit and len(ends := ends[ends < len(text)]):
            following = text[ends]
            found, counts = np.unique(following, return_counts=True)
            often = np.isin(following, found[counts == counts.max()])
            token = following[often][-1]
            share *= counts.max() / len(ends)
            if share < self.options.min_token_prob:
                break
            tokens.append(int(token))
            score += share
            ends = ends[following == token] + 1
        return tokens, score


@hookimpl
def foredraft_algorithms() -> list[type[Any]]:
    """The algorithms of this file."""
    return [Suffix]
