"""Measures a draft: τ, acceptance per position, and speed against plain decoding of the same prompts in the same run."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..contracts.algorithm import DrafterBase, tokens_to_draft
from ..data import Conversation, Reader, Skipped, Unusable, conversation_of, prompt_inputs, read_records, tokenizer_of
from ..data.images import images_in
from ..data.records import folder_of
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from .generate import algorithm_and_draft, generate, without_model
from .loop import DraftingStats
from .tree import Lossy, TreeShape

Prompt = list[dict[str, Any]]


@dataclass
class Evaluation:
    """A measured τ and all that it depends on."""

    tau: float
    acceptance: list[float]
    """Share of drafts accepted at position 1, 2, ...; of trees, at that depth."""
    prompts: int
    emitted: int
    """Tokens generated with the draft, the one that prefill emits included."""
    tokens_per_second: float | None
    """None where nothing was generated (`evaluate_replayed`)."""
    plain_tokens_per_second: float | None
    identical: int | None
    """Prompts whose greedy output equals plain decoding's; None when sampling or without the baseline."""
    different: list[int]
    """The other prompts, by number."""
    draft_ms: float = 0.0
    """Of a round of drafting, on average."""
    pass_ms: float = 0.0
    """Of the target's pass that verifies it."""
    drafted: float = 0.0
    """Tokens of a draft, on average; of trees, how deep they might be."""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def speedup(self) -> float | None:
        """Drafted over plain tokens per second."""
        if self.tokens_per_second is None or self.plain_tokens_per_second is None:
            return None
        return self.tokens_per_second / self.plain_tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        """All fields, and the speed-up, ready for JSON."""
        return {**asdict(self), "speedup": self.speedup}


def load_prompts(file: str | Path, limit: int | None = None, *, strict: bool = False) -> list[Prompt]:
    """What is asked in any source that `Conversations.load` reads: up to the last user turn, of several in a row
    without answers (`turns`) the first.

    Records without a question are skipped, with a warning. Raises `ForedraftError` at the first one if `strict`, and if no prompt is there.
    """
    prompts: list[Prompt] = []
    skipped, folder = Skipped(strict), folder_of(file)
    for where, record in read_records(file):
        if len(prompts) == limit:
            break
        try:
            prompts.append(_prompt(record, folder))
        except Unusable as reason:
            skipped.add(where, reason)
    if not prompts:
        raise ForedraftError(f"prompts '{file}' holds none" + (f":\n  {skipped}" if skipped else ""))
    skipped.warn()
    return prompts


def have_images(prompts: Iterable[Prompt]) -> bool:
    """Whether any of them does, so that the target's processor is needed."""
    return any(map(images_in, prompts))


def _prompt(record: Any, folder: Path | None) -> Prompt:
    conversation = conversation_of(record, folder)
    users = [i for i, message in enumerate(conversation) if message["role"] == "user"]
    if not users:
        raise Unusable("no user turn to answer")
    asked = users[-1] if len(users) < len(conversation) else 0  # nothing but questions: each waits for the answer to the one before
    return Conversation(conversation[: asked + 1], conversation.tools)


def encode(reader: Reader, prompt: Prompt, target: PreTrainedModel | None = None) -> dict[str, Tensor]:
    """What asks the target for an answer, see `prompt_inputs`, for `generate`: the ids as `input_ids` [1, L], images if there are any.

    On the device of `target`, pixels in its precision (Llama 4's processor makes them bfloat16 whatever that is).
    """
    inputs = prompt_inputs(reader, prompt)
    if target is None:
        return inputs
    return {name: value.to(target.device, target.dtype if value.is_floating_point() else None) for name, value in inputs.items()}


def evaluate(
    target: PreTrainedModel,
    draft: BaseDraft | DrafterBase | str,
    tokenizer: Reader,
    prompts: Sequence[Prompt],
    *,
    num_draft_tokens: int | None = None,
    tree: TreeShape | None = None,
    min_confidence: float = 0.0,
    min_acceptance: float = 0.0,
    first: DrafterBase | str | None = None,
    lossy: Lossy | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    baseline: bool = True,
    seed: int = 0,
    progress: Any = None,
) -> Evaluation:
    """Generate for every prompt with the draft and, with `baseline`, without it, in turn, so that both meet the same machine.

    `draft`, `tree` and all down to `lossy` as in `generate`. τ is micro-averaged over all prompts. `temperature` 0 is greedy;
    `progress`, if given, is called after each prompt. Prompts with images need the target's processor as `tokenizer`. Raises what
    `generate` raises, and `ForedraftError` for prompts that are no lists of messages.
    """
    _check_prompts(prompts)
    algorithm, _ = algorithm_and_draft(draft)
    num_draft_tokens = tokens_to_draft(num_draft_tokens, algorithm.max_tokens)
    settings = {"max_new_tokens": max_new_tokens, "pad_token_id": tokenizer_of(tokenizer).pad_token_id or 0, **sampling(temperature)}
    stats, different = DraftingStats(), []
    length = {"num_draft_tokens": num_draft_tokens, "min_confidence": min_confidence, "min_acceptance": min_acceptance}
    ahead = None if first is None else without_model(first)
    how: dict[str, Any] = {**length, "tree": tree, "first": ahead, "lossy": lossy}
    drafted, plain = _Timed(partial(generate, target, draft, **how)), _Timed(target.generate)
    asked = [encode(tokenizer, prompt, target) for prompt in prompts]  # what the chat template refuses is told before hours of work
    for timed in (drafted, plain):
        timed.run(**asked[0], attention_mask=torch.ones_like(asked[0]["input_ids"]), **{**settings, "max_new_tokens": 8})
    for number, inputs in enumerate(asked):
        torch.manual_seed(seed + number)
        text = drafted(inputs, stats=stats, **settings)
        if baseline and not torch.equal(plain(inputs, **settings), text) and not temperature:
            different.append(number)
        if progress is not None:
            progress(number + 1, stats)
    return Evaluation(
        tau=stats.tau,
        acceptance=stats.acceptance,
        prompts=len(prompts),
        emitted=drafted.tokens,
        tokens_per_second=drafted.per_second,
        plain_tokens_per_second=plain.per_second if baseline else None,
        identical=len(prompts) - len(different) if baseline and not temperature else None,
        different=different,
        **spent(stats),
        settings={
            "algorithm": algorithm.name,
            "shape": str(tree or "chain"),
            **length,
            **({"num_draft_tokens": tree.num_nodes} if tree else {}),
            **({"first": ahead.name} if ahead else {}),
            **({"lossy": str(lossy)} if lossy else {}),
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            **machine(target),
        },
    )


def spent(stats: DraftingStats) -> dict[str, float]:
    """What a round of drafting and verifying took and drafted, as an `Evaluation` says it."""
    rounds = max(1, stats.passes)
    return {
        "draft_ms": 1000 * stats.drafting / rounds,
        "pass_ms": 1000 * stats.verifying / rounds,
        "drafted": sum(stats.drafted) / rounds,
    }


def machine(target: PreTrainedModel) -> dict[str, Any]:
    """In what, and on what, it was measured."""
    return {"dtype": str(target.dtype).removeprefix("torch."), "device": str(target.device.type), "threads": torch.get_num_threads()}


def sampling(temperature: float) -> dict[str, Any]:
    """What `generate` is told for a temperature; 0 is greedy."""
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}


@dataclass
class _Timed:
    """A way to decode, the tokens that it gave and the seconds that it took."""

    run: Callable[..., Any]
    tokens: int = 0
    seconds: float = 0.0

    def __call__(self, inputs: Mapping[str, Tensor], **settings: Any) -> Tensor:
        start, ids_1L = time.perf_counter(), inputs["input_ids"]
        # Without a mask transformers hides what looks like padding.
        out: Tensor = self.run(**inputs, attention_mask=torch.ones_like(ids_1L), **settings)
        self.seconds += time.perf_counter() - start
        self.tokens += out.shape[1] - ids_1L.shape[1]
        return out

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds


def _check_prompts(prompts: Sequence[Prompt]) -> None:
    """Raises `ForedraftError` unless there are prompts, each a list of messages."""
    if not prompts:
        raise ForedraftError("there are no prompts to evaluate on")
    for prompt in prompts:
        if not (isinstance(prompt, list) and prompt and all(isinstance(message, Mapping) for message in prompt)):
            raise ForedraftError(
                f"a prompt is a list of messages, found {prompt!r:.60}: pass [{{'role': 'user', 'content': 'text'}}], or load_prompts(file)"
            )
