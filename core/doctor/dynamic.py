"""The dynamic check: the draft runs on text of its target, as in training and as in serving, and so do variants with one thing changed."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..auto import auto_draft
from ..data import DraftCollator
from ..decoding import DraftingStats, generate, load_prompts
from ..decoding.evaluate import Prompt, encode
from ..draft import BaseDraft
from ..errors import ForedraftError
from ..losses import estimated_tau
from ..target import Target, load_target, load_tokenizer
from .finding import Finding, error, note, warning
from .subject import Subject
from .suspects import SUSPECTS

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short Python function that returns the n-th Fibonacci number.",
    "A train leaves at 9:40 and arrives at 11:05. How long does the journey take?",
    "Translate into French: The library opens at nine and closes at six.",
)
NEW_TOKENS = 64
LOW = 1.3
"""τ below which a draft is hardly worth its cost."""
GAIN = 0.3
"""A variant fits if it wins this share of the tokens that the draft as it is misses."""
GAP = 0.35
"""Share of the teacher-forced drafted tokens that decoding may lose: its estimate takes steps for independent."""


@dataclass(frozen=True)
class Acceptance:
    """How much of a draft is accepted."""

    forced: list[float]
    """Per drafting step, the share of text positions at which the draft's top token is the target's, fed with the text."""
    decoded: DraftingStats
    """The same draft in greedy decoding."""

    @property
    def forced_tau(self) -> float:
        """Tokens per target pass that the teacher-forced shares promise."""
        return estimated_tau(self.forced)

    def __str__(self) -> str:
        return f"τ {self.forced_tau:.2f} teacher-forced, {self.decoded.tau:.2f} decoded"


def measured(subject: Subject, prompts: str | Path | None = None) -> list[Finding]:
    """What running the draft with its target finds; a note where one of them cannot be run. A peer's draft is read into ours first.

    Raises `ForedraftError` if the file of prompts cannot be read.
    """
    if subject.target is None or not subject.target.tensors:
        return [_unmeasured("no weights of the target are at hand")]
    target_path = str(subject.target.path)
    try:
        tokenizer, target = load_tokenizer(target_path), load_target(target_path, "auto").eval()
        draft = _load(subject, target_path).to(target.dtype).eval()
    except Exception as problem:  # whatever a checkpoint that the other checks found broken makes a loader raise
        return [_unmeasured(str(problem) or type(problem).__name__)]
    return run(target, draft, read_prompts(tokenizer, prompts))


def _load(subject: Subject, target: str) -> BaseDraft:
    if subject.made:
        return auto_draft(subject.draft.path)
    from ..formats import import_draft

    with TemporaryDirectory() as folder:
        return auto_draft(import_draft(subject.draft.path, Path(folder) / "draft", target).path)


def _unmeasured(why: str) -> Finding:
    return note("acceptance-unmeasured", why, "acceptance is not known", "mend what the other findings say, and give a target with weights")


def read_prompts(tokenizer: PreTrainedTokenizerBase, file: str | Path | None, limit: int = 8) -> list[Tensor]:
    """Prompts [1, L] from JSONL, or a few of our own, as the target sees them."""
    asked: Sequence[Prompt] = load_prompts(file, limit) if file else [[{"role": "user", "content": text}] for text in PROMPTS]
    return [encode(tokenizer, prompt) for prompt in asked]


def run(target: PreTrainedModel, draft: BaseDraft, prompts: Sequence[Tensor], new_tokens: int = NEW_TOKENS) -> list[Finding]:
    """Measure the draft on the target's own greedy answers to `prompts` ([1, L] each); name the suspect whose variant is much better."""
    texts = answers(target, prompts, new_tokens)
    if not texts:
        return [_unmeasured("the target answers none of the prompts with more than two tokens")]
    try:
        steps = len(forced(target, draft, texts))
        as_it_is = measure(target, draft, texts, new_tokens, steps)
    except ForedraftError as problem:
        return [_unmeasured(str(problem))]
    told = note("acceptance", f"{as_it_is}, {steps} tokens drafted at most", "nothing", "nothing to do")
    best: tuple[float, Finding] | None = None
    for suspect in SUSPECTS:
        for change, apply in suspect.variants(draft, target):
            variant = copy.deepcopy(draft)
            with torch.no_grad():
                apply(variant)
            tau = estimated_tau(forced(target, variant, texts))
            if (best and tau <= best[0]) or not _better(tau, as_it_is.forced_tau, steps):
                continue
            changed = measure(target, variant, texts, new_tokens, steps)
            if _better(changed.decoded.tau, as_it_is.decoded.tau, steps):
                best = tau, error(f"suspect-{suspect.id}", f"{as_it_is}; with {change}, {changed}", suspect.breaks, suspect.mend)
    if best:
        return [best[1], told]
    if as_it_is.forced_tau - as_it_is.decoded.tau > max(GAP * (as_it_is.forced_tau - 1), 0.3):
        lost = "drafting does not see what training saw, past the first token: states fed back, positions or the mask token"
        return [error("acceptance-gap", str(as_it_is), lost, "compare the first step with the later ones: `foredraft eval`"), told]
    if as_it_is.decoded.tau < LOW:
        return [
            warning("acceptance-low", str(as_it_is), "drafting costs more than it saves", "train it longer, or on text like this"),
            told,
        ]
    return [told]


def _better(tau: float, before: float, steps: int) -> bool:
    return tau - before > max(GAIN * (steps + 1 - before), 0.2)


@torch.no_grad()
def answers(target: PreTrainedModel, prompts: Sequence[Tensor], new_tokens: int) -> list[tuple[Tensor, int]]:
    """The target's greedy continuations: ids [L] and the length of the prompt, of those long enough to draft in."""
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    made = [(target.generate(ids.to(target.device), **settings)[0], ids.shape[1]) for ids in prompts]
    return [(ids, length) for ids, length in made if len(ids) > length + 2]


def measure(target: PreTrainedModel, draft: BaseDraft, texts: Sequence[tuple[Tensor, int]], new_tokens: int, steps: int) -> Acceptance:
    """Both numbers."""
    shares, stats = forced(target, draft, texts), DraftingStats()
    for ids, length in texts if any(shares) else ():
        settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        generate(target, draft, ids[None, :length], num_draft_tokens=steps, stats=stats, **settings)
    return Acceptance(shares, stats)


@torch.no_grad()
def forced(target: PreTrainedModel, draft: BaseDraft, texts: Sequence[tuple[Tensor, int]]) -> list[float]:
    """Per drafting step, how often the draft's top token is the target's, fed with the text as in training.

    A draft whose tensors point outside the vocabulary has none right.
    """
    if draft.algorithm is None:
        raise ForedraftError("this draft has no algorithm to run")
    if not draft.complete:
        draft.take_head(target)
    ids_W = draft.draft_ids
    longest = max(len(ids) for ids, _ in texts)
    batch = DraftCollator(draft.algorithm)([_row(ids, length, longest, i) for i, (ids, length) in enumerate(texts)])
    batch = {k: _to(v, target.device) for k, v in batch.items()}
    if int(ids_W.min()) < 0 or int(ids_W.max()) >= draft.config.vocab_size:
        return [0.0] * len(batch["counts"])
    signal = Target(target, draft.config.aux_layers).capture(batch)
    step = draft.algorithm.loss(draft, batch, signal, batch["counts"])
    return (step.metrics["correct"] / step.metrics["count"].clamp(min=1)).tolist()


def _row(ids: Tensor, length: int, longest: int, row: int) -> dict[str, object]:
    """A packed row: the prompt is context, the answer is supervised, padding is neither."""
    pad = longest - len(ids)
    spans = [-1] * length + [0] * (len(ids) - length) + [-1] * pad
    return {"input_ids": ids.tolist() + [0] * pad, "documents": [0] * len(ids) + [-1] * pad, "spans": spans, "row": row}


def _to(value: object, device: torch.device) -> object:
    if isinstance(value, list):
        return [_to(v, device) for v in value]
    return value.to(device) if isinstance(value, Tensor) else value
