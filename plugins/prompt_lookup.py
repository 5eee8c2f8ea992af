"""Prompt lookup: what followed the newest tokens where they stood before. No draft model. github.com/apoorvumang/prompt-lookup-decoding."""

from typing import Any

from pydantic import Field
from torch import Tensor

from foredraft import hookimpl
from foredraft.contracts import Choose, DrafterBase, DraftModel, Frozen


class PromptLookupOptions(Frozen):
    """Options of prompt lookup."""

    max_ngram: int = Field(3, ge=1, description="tokens at the end of the text that are looked for; where they are not found, fewer")
    num_tokens: int = Field(10, ge=1, le=512, description="tokens drafted at once, at most")


class PromptLookup(DrafterBase[PromptLookupOptions]):
    """Finds the longest n-gram that ends the text in the text before, and drafts what followed it: for answers that quote their prompts."""

    name = "prompt_lookup"
    summary = "what followed the newest tokens earlier in the text; no draft model, nothing to train"

    Options = PromptLookupOptions

    @property
    def max_tokens(self) -> int:
        """As the options say."""
        return self.options.num_tokens

    def drafter(self, draft: DraftModel | None) -> "PromptLookup":
        """Itself: all that it knows is the text."""
        return self

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Choose) -> tuple[list[int], list[Tensor]]:
        """See `foredraft.contracts.Drafter`; tokens without logits."""
        for n in range(min(self.options.max_ngram, len(ids) - 1), 0, -1):
            ends = (ids[:-1].unfold(0, n, 1) == ids[-n:]).all(-1).nonzero().flatten() + n
            whole = ends[ends + limit <= len(ids)]
            if len(ends):  # the latest that `limit` tokens follow, else the earliest, which most do
                start = int(whole[-1] if len(whole) else ends[0])
                return ids[start : start + limit].tolist(), []
        return [], []


@hookimpl
def foredraft_algorithms() -> list[type[Any]]:
    """The algorithms of this file."""
    return [PromptLookup]
