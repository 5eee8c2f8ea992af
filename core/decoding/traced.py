"""An answer as it was drafted: which of its tokens the draft had right, and what it had said where it was wrong."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, StoppingCriteriaList

from ..contracts.algorithm import tokens_to_draft
from ..data import Reader, tokenizer_of
from ..draft.model import BaseDraft
from .evaluate import Prompt, encode
from .loop import DecodingLoop, DraftingStats


@dataclass(frozen=True)
class Piece:
    """Some tokens on end that have one origin."""

    text: str
    origin: Literal["accepted", "target", "rejected"]
    """Drafted and right; said by the target; drafted, and not said."""


@dataclass(frozen=True)
class Traced:
    """One answer."""

    prompt: str
    pieces: list[Piece]
    tau: float


class Noting:
    """A drafter whose proposals are written down, by how many tokens were known."""

    def __init__(self, drafter: Any):
        self.drafter, self.proposed = drafter, dict[int, list[int]]()

    def propose(self, ids: torch.Tensor, *rest: Any) -> Any:
        """As the drafter's own."""
        tokens, logits = self.drafter.propose(ids, *rest)
        self.proposed[len(ids)] = [int(token) for token in tokens]
        return tokens, logits


def trace(target: PreTrainedModel, draft: BaseDraft, reader: Reader, prompt: Prompt, max_new_tokens: int = 64) -> Traced:
    """Answer a prompt greedily, by chains of as many tokens as the draft makes at once, or 4."""
    inputs: dict[str, Any] = encode(reader, prompt, target)
    ids, tokenizer, stats = inputs["input_ids"], tokenizer_of(reader), DraftingStats()
    loop = DecodingLoop(draft.algorithm, draft, tokens_to_draft(None, draft.algorithm.max_tokens), None, stats, None)
    loop.drafter = noting = Noting(loop.drafter)
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": tokenizer.pad_token_id or 0}
    out = target.generate(
        **inputs, custom_generate=loop, stopping_criteria=StoppingCriteriaList(), max_new_tokens=max_new_tokens, **settings
    )
    text, known, pieces = out[0].tolist(), ids.shape[1], list[tuple[list[int], Any]]()
    while known < len(text):
        proposed = noting.proposed.get(known, [])
        right = next((i for i, token in enumerate(proposed) if text[known + i : known + i + 1] != [token]), len(proposed))
        own = text[known + right : known + right + 1]
        pieces += [(proposed[:right], "accepted"), (proposed[right:], "rejected"), (own, "target")]
        known += right + len(own)
    said = "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
    return Traced(said, [Piece(tokenizer.decode(tokens), origin) for tokens, origin in pieces if tokens], stats.tau)
