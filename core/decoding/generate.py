"""`generate`: transformers' own `target.generate`, with a draft. The output is the target's; only the speed changes."""

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from ..contracts.algorithm import AlgorithmBase, DrafterBase, tokens_to_draft
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..registry import default_registry
from ..target.pairing import check_pair
from ..target.weights import known_ids
from .loop import DecodingLoop, DraftingStats
from .tree import Lossy, TreeShape


def generate(
    target: PreTrainedModel,
    draft: BaseDraft | DrafterBase | str,
    input_ids: Tensor,
    *,
    num_draft_tokens: int | None = None,
    tree: TreeShape | None = None,
    min_confidence: float = 0.0,
    min_acceptance: float = 0.0,
    first: DrafterBase | str | None = None,
    lossy: Lossy | None = None,
    stats: DraftingStats | None = None,
    stopping_criteria: StoppingCriteriaList | list[StoppingCriteria] | None = None,
    stop_strings: str | list[str] | None = None,
    streamer: Any = None,
    **kwargs: Any,
) -> Any:
    """What `target.generate(input_ids, **kwargs)` returns, drafted and verified; greedy and sampling, one sequence at a time.

    `draft` is a draft model or, where an algorithm needs none (prompt lookup), the algorithm or its name. Streamer, logits
    processors, sampling, stopping criteria and `stop_strings` are those of transformers and asked at every token, as without a
    draft; no beams, batches, padding or filled caches.
    Images come as `target.generate` takes them: all that its processor makes of a prompt, by name.
    `num_draft_tokens` are drafted per pass of the target, as a chain (default: all that the draft makes at once, else 4); with
    `tree`, a tree of that shape in their place. A draft ends earlier where, by its own probabilities (DSpark: its confidence head's), all
    up to the next token would be accepted with less than `min_confidence`; of a tree the branches do. With `min_acceptance`
    it is only as long as, at the rate at which tokens were accepted lately, is accepted whole with that chance. `first` names an algorithm
    without weights that drafts in the draft's place where it finds something in the text. `stats` collects what was accepted.
    With `lossy` the output is no longer the target's: see `Lossy`.

    Raises `ForedraftError` if the draft was made for a target of another shape, or for what is not supported: more tokens than
    the draft makes at once; targets or caches that cannot go back to before a rejected token; trees need an algorithm that
    drafts them, and a target with plain attention (eager or SDPA, no sliding windows).
    """
    _check_ids(target, input_ids)
    algorithm, model = algorithm_and_draft(draft)
    if model is not None:
        check_pair(target, model)
    _check_settings(target, kwargs)
    num_draft_tokens = tokens_to_draft(num_draft_tokens, algorithm.max_tokens)
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if (given := kwargs.get("generation_config")) is not None and given.stop_strings is not None:
        stop_strings = given.stop_strings if stop_strings is None else stop_strings
        kwargs["generation_config"] = copy(given)
        kwargs["generation_config"].stop_strings = None  # transformers hands no tokenizer on to a loop of others
    if stop_strings is not None:
        tokenizer = kwargs.pop("tokenizer", None)
        if tokenizer is None:
            raise ForedraftError("stop_strings need the tokenizer: generate(..., stop_strings=..., tokenizer=tokenizer)")
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    stats = stats if stats is not None else DraftingStats()
    ahead = None if first is None else without_model(first)
    loop = DecodingLoop(algorithm, model, num_draft_tokens, tree, stats, streamer, min_confidence, lossy, min_acceptance, ahead)
    try:
        return target.generate(input_ids, custom_generate=loop, stopping_criteria=criteria, streamer=streamer, **kwargs)
    finally:
        if model is not None:
            model.places_CBL = None  # of this text


def algorithm_and_draft(draft: BaseDraft | DrafterBase | str) -> tuple[DrafterBase, BaseDraft | None]:
    """How to draft, and the model for it; None where the algorithm has none.

    Raises `ForedraftError` for an algorithm without the draft that it needs.
    """
    how: BaseDraft | DrafterBase = default_registry().make_algorithm(draft, {}) if isinstance(draft, str) else draft
    if isinstance(how, AlgorithmBase):
        raise ForedraftError(
            f"algorithm '{how.name}' drafts with a model: name a draft by it in its place, as of auto_draft(...) or --draft DIRECTORY"
        )
    return (how, None) if isinstance(how, DrafterBase) else (how.algorithm, how)


def without_model(how: DrafterBase | str) -> DrafterBase:
    """An algorithm that needs no draft, by its name or as it is. Raises `ForedraftError` for any other."""
    algorithm, model = algorithm_and_draft(how)
    if model is not None:
        raise ForedraftError(
            f"first is a draft by '{algorithm.name}': only what reads the text alone is asked first, such as prompt_lookup"
        )
    return algorithm


def _check_ids(target: PreTrainedModel, input_ids: Any) -> None:
    """Raises `ForedraftError` unless these are the ids of one prompt, which the target has an embedding for."""
    shape = "token ids of shape [1, L], as a LongTensor: tokenizer(text, return_tensors='pt').input_ids"
    if not isinstance(input_ids, Tensor):
        raise ForedraftError(f"input_ids is a {type(input_ids).__name__}: pass {shape}")
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int64, torch.int32) or not input_ids.shape[1]:
        raise ForedraftError(f"input_ids is {list(input_ids.shape)} of {input_ids.dtype}: pass {shape}")
    if input_ids.shape[0] != 1:
        raise ForedraftError(f"a draft decodes one sequence at a time, found a batch of {input_ids.shape[0]}: call generate for each")
    low, high, known = int(input_ids.min()), int(input_ids.max()), known_ids(target.get_input_embeddings())
    if low < 0 or high >= known:
        raise ForedraftError(
            f"input_ids holds {low if low < 0 else high}, the target has embeddings for 0 to {known - 1}: is it this target's tokenizer?"
        )


def _check_settings(target: PreTrainedModel, settings: Mapping[str, Any]) -> None:
    """Raises `ForedraftError` for what a draft cannot do, or would not be asked for."""
    mask, cache = settings.get("attention_mask"), settings.get("past_key_values")
    if mask is not None and not bool(mask.all()):
        raise ForedraftError("the attention mask hides tokens of the prompt: pass the prompt without padding")
    if cache is not None and cache.get_seq_length() > 0:
        raise ForedraftError(
            "past_key_values already holds tokens whose hidden states the draft has not seen: pass the whole prompt instead"
        )
    given = settings.get("generation_config") or target.generation_config
    for name in ("num_beams", "num_return_sequences"):
        if (count := settings.get(name, getattr(given, name, None)) or 1) > 1:
            raise ForedraftError(f"{name}={count}: a draft decodes one sequence at a time, greedy or sampled; set it to 1")
    others = (
        "penalty_alpha",
        "dola_layers",
        "constraints",
        "force_words_ids",
        "custom_generate",
        "assistant_model",
        "prompt_lookup_num_tokens",
    )
    for name in others:
        if settings.get(name, getattr(given, name, None)):
            raise ForedraftError(f"{name}: this way of decoding takes no draft; leave it out, or decode by target.generate")
