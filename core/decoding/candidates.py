"""A draft inside transformers' assisted generation: the candidate generator that asks a drafter."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

from ..contracts.algorithm import Drafter
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..target.capture import AuxCapture
from .stats import DraftingStats


class DraftCandidateGenerator(CandidateGenerator):
    """Drafts for `target.generate`: reads the target's hidden states of what was accepted, proposes what may follow."""

    requires_model_outputs = True
    model_kwargs_overrides: ClassVar[dict[str, Any]] = {}  # the aux states come by AuxCapture

    def __init__(
        self,
        draft: BaseDraft,
        captured: AuxCapture,
        num_tokens: int,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None,
        stats: DraftingStats,
    ):
        self.draft, self.captured, self.num_tokens, self.stats = draft, captured, num_tokens, stats
        self.do_sample, self.max_length = generation_config.do_sample, generation_config.max_length
        self.processors = logits_processor or LogitsProcessorList()
        self.drafter = drafter_of(draft)
        self.draft_ids = draft.draft_ids
        self.known, self.prefilled = 0, False

    @torch.no_grad()
    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Candidate ids [1, L + drafted] and, when sampling, the logits [1, drafted, V] they were drawn from."""
        if kwargs["is_first_iteration"]:  # the target has not seen the prompt yet
            return input_ids, None
        fresh = input_ids.shape[1] - 1 - self.known
        limit = min(self.num_tokens, self.max_length - input_ids.shape[1] - 1)
        if limit <= 0:
            return input_ids, None
        aux_1NA = self.captured.aux_BSA[:, :fresh]
        self.known += fresh
        ids = input_ids[0].to(self.draft.device)
        tokens, logits = self.drafter.propose(ids, aux_1NA.to(self.draft.device), limit, lambda z, drafted: self._choose(ids, z, drafted))
        if not tokens:
            return input_ids, None
        candidates = torch.cat([input_ids, torch.tensor([tokens], device=input_ids.device)], dim=1)
        return candidates, torch.stack(logits)[None] if logits else None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Count what was accepted; the first call is the prefill's."""
        if self.prefilled:
            self.stats.add(scores.shape[1] - 1, int(num_matches))
        self.prefilled = True

    def _choose(self, ids_L: Tensor, logits_W: Tensor, drafted: list[int]) -> tuple[int, Tensor | None] | None:
        if not self.do_sample and not self.processors:
            return int(self.draft_ids[logits_W.argmax()]), None
        so_far_L = torch.cat([ids_L, torch.tensor(drafted, dtype=ids_L.dtype, device=ids_L.device)])
        logits_V = processed(self.processors, so_far_L, logits_W, self.draft_ids, self.draft.config.vocab_size)
        if not bool(torch.isfinite(logits_V).any()):
            return None
        if not self.do_sample:
            return int(logits_V.argmax()), None
        return int(torch.multinomial(logits_V.softmax(-1), 1)), logits_V


def drafter_of(draft: BaseDraft) -> Drafter:
    """A fresh drafter of the draft's algorithm. Raises `ForedraftError` if it has none."""
    if draft.algorithm is None:
        raise ForedraftError("this draft has no algorithm to draft with: load it with auto_draft(...)")
    return draft.algorithm.drafter(draft)


def processed(processors: LogitsProcessorList, ids_L: Tensor, logits_W: Tensor, draft_ids_W: Tensor, vocab_size: int) -> Tensor:
    """Draft logits after the text `ids_L` as the generation settings have them, [V]: -inf for what the draft cannot name."""
    logits_V = logits_W.new_full((vocab_size,), float("-inf"), dtype=torch.float32)
    logits_V[draft_ids_W] = logits_W.float()
    return processors(ids_L[None], logits_V[None])[0]
