"""`generate`: transformers' own `target.generate`, with a draft. The output is the target's; only the speed changes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from ..contracts.algorithm import tokens_to_draft
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..target.capture import AuxCapture
from ..target.pairing import check_pair
from .candidates import DraftCandidateGenerator
from .stats import DraftingStats
from .tree import TreeShape
from .verification import TreeDecoding


def generate(
    target: PreTrainedModel,
    draft: BaseDraft,
    input_ids: Tensor,
    *,
    num_draft_tokens: int | None = None,
    tree: TreeShape | None = None,
    stats: DraftingStats | None = None,
    stopping_criteria: StoppingCriteriaList | list[StoppingCriteria] | None = None,
    stop_strings: str | list[str] | None = None,
    streamer: Any = None,
    **kwargs: Any,
) -> Any:
    """What `target.generate(input_ids, **kwargs)` returns, drafted and verified; greedy and sampling, one sequence at a time.

    Takes the arguments of transformers' assisted generation: streamer, logits processors, sampling, stopping criteria and
    `stop_strings` (asked at every token, as without a draft); no beams, batches, padding or filled caches.
    `num_draft_tokens` are drafted per pass of the target, as a chain (default: all that the draft makes at once, else 4); with
    `tree`, a tree of that shape in their place. `stats` collects what was accepted.

    Raises `ForedraftError` if the draft was made for a target of another shape, or for what is not supported: more tokens than
    the draft makes at once; trees need an algorithm that drafts them, and a target with plain attention (eager or SDPA, no
    sliding windows or recurrent states).
    """
    _check_ids(target, input_ids)
    check_pair(target, draft)
    _check_settings(target, kwargs)
    num_draft_tokens = tokens_to_draft(num_draft_tokens, draft.algorithm.max_tokens if draft.algorithm else None)
    stats = stats if stats is not None else DraftingStats()
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if stop_strings is not None:
        tokenizer = kwargs.pop("tokenizer", None)
        if tokenizer is None:
            raise ForedraftError("stop_strings need the tokenizer: generate(..., stop_strings=..., tokenizer=tokenizer)")
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    if tree is not None:
        with AuxCapture(target, draft.config.aux_layers) as captured:
            decode = TreeDecoding(draft, captured, tree, stats, streamer)
            return target.generate(input_ids, custom_generate=decode, stopping_criteria=criteria, streamer=streamer, **kwargs)
    stopper = _AtEveryToken(criteria, input_ids.shape[1], streamer) if criteria else None
    if stopper is not None:
        kwargs["stopping_criteria"] = StoppingCriteriaList([stopper])
    with drafting(target, draft, num_draft_tokens, stats):
        out = target.generate(
            input_ids, streamer=_HeldStream(stopper) if streamer is not None and stopper else streamer, prompt_lookup_num_tokens=1, **kwargs
        )
    return out if stopper is None else _cut(out, stopper.end, input_ids.shape[1])


@contextmanager
def drafting(target: PreTrainedModel, draft: BaseDraft, num_tokens: int, stats: DraftingStats) -> Iterator[None]:
    """While open, assisted generation of `target` gets its candidates from `draft`; restored afterwards, whatever happens."""

    def candidate_generator(generation_config: Any, logits_processor: Any = None, **_: Any) -> DraftCandidateGenerator:
        return DraftCandidateGenerator(draft, captured, num_tokens, generation_config, logits_processor, stats)

    with AuxCapture(target, draft.config.aux_layers) as captured:
        target._get_candidate_generator = candidate_generator
        try:
            yield
        finally:
            del target._get_candidate_generator


def _check_ids(target: PreTrainedModel, input_ids: Any) -> None:
    """Raises `ForedraftError` unless these are the ids of one prompt, which the target has an embedding for."""
    shape = "token ids of shape [1, L], as a LongTensor: tokenizer(text, return_tensors='pt').input_ids"
    if not isinstance(input_ids, Tensor):
        raise ForedraftError(f"input_ids is a {type(input_ids).__name__}: pass {shape}")
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int64, torch.int32) or not input_ids.shape[1]:
        raise ForedraftError(f"input_ids is {list(input_ids.shape)} of {input_ids.dtype}: pass {shape}")
    if input_ids.shape[0] != 1:
        raise ForedraftError(f"a draft decodes one sequence at a time, found a batch of {input_ids.shape[0]}: call generate for each")
    low, high, known = int(input_ids.min()), int(input_ids.max()), target.get_input_embeddings().weight.shape[0]
    if low < 0 or high >= known:
        raise ForedraftError(
            f"input_ids holds {low if low < 0 else high}, the target has embeddings for 0 to {known - 1}: is it this target's tokenizer?"
        )


def _check_settings(target: PreTrainedModel, settings: Mapping[str, Any]) -> None:
    """Raises `ForedraftError` for what assisted generation does not do, or would do without the draft."""
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
    for name in ("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "custom_generate"):
        if settings.get(name, getattr(given, name, None)):
            raise ForedraftError(f"{name}: this way of decoding takes no draft; leave it out, or decode by target.generate")


class _AtEveryToken(StoppingCriteria):
    """Asks the user's criteria at each token a verification emitted (transformers asks at the last); holds the stream until then."""

    def __init__(self, criteria: StoppingCriteriaList, seen: int, streamer: Any):
        self.criteria, self.seen, self.streamer = criteria, seen, streamer
        self.end: int | None = None
        self.held: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        overshoot = 0
        for end in range(self.seen + 1, input_ids.shape[1] + 1):
            if bool(self.criteria(input_ids[:, :end], scores).all()):
                self.end, overshoot = end, input_ids.shape[1] - end
                break
        self.seen = input_ids.shape[1]
        if overshoot and self.held:
            self.held[-1] = self.held[-1][..., : self.held[-1].shape[-1] - overshoot]
        self._release()
        return torch.full((input_ids.shape[0],), self.end is not None, device=input_ids.device)

    def _release(self) -> None:
        for value in self.held:
            self.streamer.put(value)
        self.held.clear()


class _HeldStream(BaseStreamer):
    """A streamer whose tokens wait for the verdict of `_AtEveryToken`."""

    def __init__(self, stopper: _AtEveryToken):
        self.stopper = stopper

    def put(self, value: Tensor) -> None:
        self.stopper.held.append(value)

    def end(self) -> None:
        self.stopper.streamer.end()


def _cut(out: Any, end: int | None, prompt: int) -> Any:
    """`out` without what lies behind token `end`."""
    if end is None:
        return out
    if not isinstance(out, ModelOutput):
        return out[:, :end]
    surplus = out["sequences"].shape[1] - end
    for name, value in out.items():
        if name == "sequences":
            out[name] = value[:, :end]
        elif name == "past_key_values" and surplus:
            value.crop(-surplus)
        elif isinstance(value, tuple):
            out[name] = value[: end - prompt]
    return out
