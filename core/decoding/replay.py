"""What a draft would have drafted along a text that the target has said: greedy acceptance, at a pass of the target for each prompt."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..contracts.algorithm import DrafterBase, tokens_to_draft
from ..draft.model import BaseDraft
from ..progress import Progress
from ..target.capture import AuxCapture, decoder_of
from ..target.pairing import check_pair
from .evaluate import Evaluation, machine, sampling, spent
from .generate import algorithm_and_draft, without_model
from .loop import DecodingLoop, DraftingStats

Answered = tuple[Tensor, int]
"""The ids [L] of a prompt and its answer, and how many are the prompt's."""
AT_ONCE = 8
"""Prompts that are answered in one batch."""


def answers(target: PreTrainedModel, prompts: Sequence[Tensor], max_new_tokens: int, told: str = "", show: bool = True) -> list[Answered]:
    """What the target says greedily to each prompt ([L]), without a draft."""
    found, end = list[Answered](), target.generation_config.eos_token_id
    ends = torch.tensor([] if end is None else end, dtype=torch.long, device=target.device)
    settings = {"max_new_tokens": max_new_tokens, "pad_token_id": 0, **sampling(0)}
    size = 1 if target._is_stateful else AT_ONCE  # states of fixed size may not leave padding out
    with Progress(told or "the target answers", len(prompts), show=show) as advance:
        for start in range(0, len(prompts), size):
            asked = [ids_L.to(target.device) for ids_L in prompts[start : start + size]]
            ids_BL, mask_BL = (
                pad_sequence(rows, batch_first=True, padding_side="left") for rows in (asked, [torch.ones_like(ids) for ids in asked])
            )
            texts: Any = target.generate(ids_BL, attention_mask=mask_BL, **settings)
            for ids_L, new_N in zip(asked, texts[:, ids_BL.shape[1] :], strict=True):
                ended = torch.isin(new_N, ends).nonzero()
                found.append((torch.cat([ids_L, new_N[: int(ended[0]) + 1] if len(ended) else new_N]), len(ids_L)))
            advance(len(asked))
    return found


def evaluate_replayed(
    target: PreTrainedModel,
    draft: BaseDraft | DrafterBase | str,
    texts: Sequence[Answered],
    *,
    num_draft_tokens: int | None = None,
    min_confidence: float = 0.0,
    min_acceptance: float = 0.0,
    first: DrafterBase | str | None = None,
    max_new_tokens: int = 128,
    progress: Any = None,
) -> Evaluation:
    """What `evaluate` says of greedy chains, but for speeds, from `answers` of at most so many new tokens.

    A draft changes no greedy output, so that all it is asked, and what of its drafts is accepted, follows from the text. Hidden states
    come from one forward over the text, and may differ from those of decoding in their last digits. Raises what `generate` raises.
    """
    algorithm, model = algorithm_and_draft(draft)
    if model is not None:
        check_pair(target, model)
    stats, ahead = DraftingStats(), None if first is None else without_model(first)
    num_draft_tokens = tokens_to_draft(num_draft_tokens, algorithm.max_tokens)
    least = {"min_confidence": min_confidence, "min_acceptance": min_acceptance}
    for number, (ids_L, known) in enumerate(texts, 1):
        loop = DecodingLoop(
            algorithm, model, num_draft_tokens, None, stats, None, first=ahead, min_confidence=min_confidence, min_acceptance=min_acceptance
        )
        loop.model, loop.processors = target, LogitsProcessorList()
        loop.config = GenerationConfig(max_length=known + max_new_tokens, do_sample=False)
        _replay(loop, ids_L[None].to(target.device), known)
        if progress is not None:
            progress(number, stats)
    asked = {"num_draft_tokens": num_draft_tokens, **least, **({"first": ahead.name} if ahead else {}), "max_new_tokens": max_new_tokens}
    return Evaluation(
        tau=stats.tau,
        acceptance=stats.acceptance,
        prompts=len(texts),
        emitted=sum(len(ids_L) - known for ids_L, known in texts),
        tokens_per_second=None,
        plain_tokens_per_second=None,
        identical=None,
        different=[],
        **spent(stats),
        settings={"algorithm": algorithm.name, "shape": "chain", **asked, "temperature": 0.0, **machine(target)},
    )


@torch.no_grad()
def _replay(loop: DecodingLoop, text_1L: Tensor, known: int) -> None:
    """Add to the loop's counts what decoding the text behind its first `known` ids would add."""
    aux_1LA = torch.empty(*text_1L.shape, 0)
    if loop.draft is not None:
        with AuxCapture(loop.model, loop.draft.config.aux_layers) as captured:
            decoder_of(loop.model)(input_ids=text_1L, use_cache=False)
        aux_1LA = captured.aux_BSA
    ids, read, known = text_1L[0].tolist(), 0, known + 1  # the pass over the prompt says a token
    while known < len(ids):
        loop.ids, began = text_1L[:, :known], time.perf_counter()
        drafted, reach = loop.propose(aux_1LA[:, read : known - 1])
        drafting = time.perf_counter() - began
        row: int | None = 0
        emitted = 0
        while row is not None and known + emitted < len(ids):
            row, emitted = drafted.children.get((row, ids[known + emitted])), emitted + 1
        loop.recent.add(drafted.deepest, emitted - 1)
        loop.stats.add(reach, emitted - 1, drafting)
        read, known = known - 1, known + emitted
