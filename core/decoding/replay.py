"""What a draft would have drafted along a text that the target has said: greedy acceptance, at a pass of the target for each prompt."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..contracts.algorithm import DrafterBase, tokens_to_draft
from ..data import Reader, tokenizer_of
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..target.capture import AuxCapture, decoder_of
from ..target.pairing import check_pair
from .evaluate import Evaluation, Prompt, encode, have_images, machine, sampling, spent
from .generate import algorithm_and_draft, without_model
from .loop import DecodingLoop, DraftingStats

Answered = tuple[list[int], int]
"""The ids of a prompt and its answer, and how many are the prompt's."""


def answers(
    target: PreTrainedModel, reader: Reader, prompts: Sequence[Prompt], max_new_tokens: int, progress: Any = None
) -> list[Answered]:
    """What the target says greedily to each prompt, without a draft. Raises `ForedraftError` for prompts with images."""
    if have_images(prompts):
        raise ForedraftError("drafts are not replayed along answers to images: leave the replay out, so that they decode")
    settings = {"max_new_tokens": max_new_tokens, "pad_token_id": tokenizer_of(reader).pad_token_id or 0, **sampling(0)}
    found = []
    for number, prompt in enumerate(prompts, 1):
        ids_1L = encode(reader, prompt, target)["input_ids"]
        text_1L: Any = target.generate(ids_1L, attention_mask=torch.ones_like(ids_1L), **settings)
        found.append((text_1L[0].tolist(), ids_1L.shape[1]))
        if progress is not None:
            progress(number)
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
    for number, (ids, known) in enumerate(texts, 1):
        loop = DecodingLoop(algorithm, model, num_draft_tokens, None, stats, None, first=ahead, **least)
        loop.model, loop.processors = target, LogitsProcessorList()
        loop.config = GenerationConfig(max_length=known + max_new_tokens, do_sample=False)
        _replay(loop, torch.tensor([ids], device=target.device), known)
        if progress is not None:
            progress(number, stats)
    asked = {"num_draft_tokens": num_draft_tokens, **least, **({"first": ahead.name} if ahead else {}), "max_new_tokens": max_new_tokens}
    return Evaluation(
        tau=stats.tau,
        acceptance=stats.acceptance,
        prompts=len(texts),
        emitted=sum(len(ids) - known for ids, known in texts),
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
