"""The generation settings as a drafter meets them: which token follows a text, and which are likeliest to."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList


@dataclass(frozen=True)
class Chooser:
    """What may follow the text `ids` [1, L], by logits over the draft vocabulary: the `Choose` and the `Rank` that drafters are given."""

    ids: Tensor
    processors: LogitsProcessorList
    do_sample: bool
    draft_ids_W: Tensor
    """The target id of each draft id."""
    vocab_size: int
    """The target's."""

    def choose(self, logits_W: Tensor, drafted: list[int]) -> tuple[int, Tensor | None] | None:
        """See `Choose`."""
        if not self.do_sample and not self.processors:
            return int(self.draft_ids_W[logits_W.argmax()]), None
        logits_V = self.processed(logits_W, self.ids.new_tensor(drafted))
        if not bool(torch.isfinite(logits_V).any()):
            return None
        if not self.do_sample:
            return int(logits_V.argmax()), None
        return int(torch.multinomial(logits_V.softmax(-1), 1)), logits_V

    def rank(self, logits_NW: Tensor, drafted_NK: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `Rank`."""
        if self.processors:
            # One by one: processors may tell the sequences of a batch apart, and these are all the first.
            rows = [self.processed(z, path) for z, path in zip(logits_NW, drafted_NK, strict=True)]
            logits_NW = torch.stack(rows).to(logits_NW.device)[:, self.draft_ids_W]
        log_p_NW = logits_NW.float().log_softmax(-1)
        log_p_NW = log_p_NW.masked_fill(log_p_NW.isnan(), float("-inf"))  # where nothing is allowed
        log_p_Nk, best_Nk = log_p_NW.topk(min(count, len(self.draft_ids_W)))
        return self.draft_ids_W[best_Nk], log_p_Nk

    def processed(self, logits_W: Tensor, drafted_K: Tensor) -> Tensor:
        """Logits after the text and the drafted tokens as the settings have them, [V]: -inf for what the draft cannot name.

        On the target's device, where processors keep their tensors.
        """
        logits_V = logits_W.new_full((self.vocab_size,), float("-inf"), dtype=torch.float32)
        logits_V[self.draft_ids_W] = logits_W.float()
        text_1L = torch.cat([self.ids, drafted_K.to(self.ids)[None]], dim=1)
        return self.processors(text_1L, logits_V.to(self.ids.device)[None])[0]
