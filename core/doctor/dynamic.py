"""The dynamic check: the draft runs on text of its target, as in training and as in serving, and so do variants with one thing changed."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data import DraftCollator
from ..decoding import DraftingStats, generate, load_prompts
from ..decoding.evaluate import Prompt, encode
from ..draft import BaseDraft
from ..errors import ForedraftError
from ..loading import PLAIN, Loading
from ..losses import estimated_tau
from ..pairing import check_pair
from ..target import Signal, Target, load_target, load_tokenizer
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
"""A variant fits if it wins this share of the tokens that the draft as it is misses,"""
RATIO = 0.5
"""or this share of those that it gets right."""
GAP = 0.35
"""Share of the teacher-forced drafted tokens that decoding may lose: its estimate takes steps for independent."""


@dataclass(frozen=True)
class Acceptance:
    """How much of a draft is accepted."""

    forced: list[float]
    """Per drafting step, the share of text positions at which the draft's top token is the target's, fed with the text."""
    decoded: list[float]
    """In greedy decoding, the share of drafts whose token at that place was accepted, and so all before it."""

    @property
    def forced_tau(self) -> float:
        """Tokens per target pass that the teacher-forced shares promise."""
        return estimated_tau(self.forced)

    @property
    def decoded_tau(self) -> float:
        """Tokens per target pass in decoding, wherever as many tokens could be drafted: answers end in shorter drafts."""
        return 1 + sum(self.decoded)

    def __str__(self) -> str:
        return f"τ {self.forced_tau:.2f} teacher-forced, {self.decoded_tau:.2f} decoded"


def measured(subject: Subject, prompts: str | Path | None = None, loading: Loading = PLAIN) -> list[Finding]:
    """What running the draft with its target finds; a note where one of them cannot be run. A peer's draft is read into ours first.

    Raises `ForedraftError` if the file of prompts cannot be read.
    """
    if subject.target is None or not subject.target.tensors:
        return [_unmeasured("no weights of the target are at hand")]
    if subject.quantised:
        return [_unmeasured(subject.quantised)]
    from ..formats import open_draft

    target_path = str(subject.target.path)
    try:
        tokenizer, target = load_tokenizer(target_path, loading), load_target(target_path, "auto", loading).eval()
        draft = open_draft(subject.draft.path, target_path, loading=loading).to(target.device, target.dtype).eval()
    except Exception as problem:  # whatever a checkpoint that the other checks found broken makes a loader raise
        return [_unmeasured(str(problem) or type(problem).__name__)]
    asked = read_prompts(tokenizer, prompts)
    try:
        return run(target, draft, asked)
    except (IndexError, RuntimeError, ValueError) as problem:  # a config may name tokens or layers that are not there
        return [_unmeasured(f"{type(problem).__name__}: {problem}"[:300])]


def _unmeasured(why: str) -> Finding:
    return note("acceptance-unmeasured", why, "acceptance is not known", "mend what the other findings say, and give a target with weights")


def read_prompts(tokenizer: PreTrainedTokenizerBase, file: str | Path | None, limit: int = 8) -> list[Tensor]:
    """Prompts [1, L] from JSONL, or a few of our own, as the target sees them."""
    asked: Sequence[Prompt] = load_prompts(file, limit) if file else [[{"role": "user", "content": text}] for text in PROMPTS]
    return [encode(tokenizer, prompt) for prompt in asked]


def run(target: PreTrainedModel, draft: BaseDraft, prompts: Sequence[Tensor], new_tokens: int = NEW_TOKENS) -> list[Finding]:
    """Measure the draft on the target's own greedy answers to `prompts` ([1, L] each); name the suspect whose variant is much better."""
    try:
        bench = Bench(target, draft, prompts, new_tokens)
        as_it_is = bench.measure(draft)
    except ForedraftError as problem:
        return [_unmeasured(str(problem))]
    told = note("acceptance", f"{as_it_is}, {bench.steps} tokens drafted at most", "nothing", "nothing to do")
    best: tuple[float, Finding] | None = None
    for suspect in SUSPECTS:
        for change, apply in suspect.variants(draft, target):
            variant = copy.deepcopy(draft)
            with torch.no_grad():
                apply(variant)
            tau = estimated_tau(bench.forced(variant))
            if (best and tau <= best[0]) or not bench.better(tau, as_it_is.forced_tau):
                continue
            changed = bench.measure(variant)
            if bench.better(changed.decoded_tau, as_it_is.decoded_tau):
                best = tau, error(f"suspect-{suspect.id}", f"{as_it_is}; with {change}, {changed}", suspect.breaks, suspect.mend)
    if best:
        return [best[1], told]
    if as_it_is.forced_tau - as_it_is.decoded_tau > max(GAP * (as_it_is.forced_tau - 1), 0.3):
        lost = "drafting does not see what training saw, past the first token: states fed back, positions or the mask token"
        return [error("acceptance-gap", str(as_it_is), lost, "compare the first step with the later ones: `foredraft eval`"), told]
    if as_it_is.decoded_tau < LOW:
        return [
            warning("acceptance-low", str(as_it_is), "drafting costs more than it saves", "train it longer, or on text like this"),
            told,
        ]
    return [told]


class Bench:
    """A target's greedy answers to some prompts, on which drafts of one algorithm are measured; the target reads them once."""

    def __init__(self, target: PreTrainedModel, draft: BaseDraft, prompts: Sequence[Tensor], new_tokens: int):
        if draft.algorithm is None:
            raise ForedraftError("this draft has no algorithm to run")
        self.target, self.algorithm = target, draft.algorithm
        self.new_tokens = new_tokens
        asked = [ids.to(target.device) for ids in prompts]
        made = [(target.generate(ids, **self._settings(ids))[0], ids.shape[1]) for ids in asked]
        self.texts = [(ids, length) for ids, length in made if len(ids) > length + 2]
        """Ids [L], prompt and answer, and the length of the prompt; of answers long enough to draft in."""
        if not self.texts:
            raise ForedraftError("the target answers none of the prompts with more than two tokens")
        longest = max(len(ids) for ids, _ in self.texts)
        batch = DraftCollator(self.algorithm)([_row(ids, length, longest, i) for i, (ids, length) in enumerate(self.texts)])
        self.batch: dict[str, Any] = {name: _to(value, target.device) for name, value in batch.items()}
        self.steps = len(batch["counts"])
        self._signals: dict[tuple[int, ...], Signal] = {}

    def _settings(self, ids_1L: Tensor) -> dict[str, Any]:
        # transformers would hide prompt tokens that equal the one for padding, were there no mask.
        mask = torch.ones_like(ids_1L)
        return {"max_new_tokens": self.new_tokens, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}

    def signal(self, layers: tuple[int, ...]) -> Signal:
        """What the target says of the texts to a draft that reads these aux layers."""
        if layers not in self._signals:
            self._signals[layers] = Target(self.target, layers).capture(self.batch)
        return self._signals[layers]

    @torch.no_grad()
    def forced(self, draft: BaseDraft) -> list[float]:
        """Per drafting step, how often the draft's top token is the target's, fed with the text as in training.

        A draft whose tensors point outside the vocabulary has none right.
        """
        check_pair(self.target, draft)
        ids_W = draft.draft_ids
        if int(ids_W.min()) < 0 or int(ids_W.max()) >= draft.config.vocab_size:
            return [0.0] * self.steps
        step = self.algorithm.loss(draft, self.batch, self.signal(draft.config.aux_layers), self.batch["counts"])
        return (step.metrics["correct"] / step.metrics["count"].clamp(min=1)).tolist()

    def measure(self, draft: BaseDraft) -> Acceptance:
        """Both numbers; a draft that names tokens outside the vocabulary is not run."""
        shares, stats = self.forced(draft), DraftingStats()
        for ids, length in self.texts if any(shares) else ():
            prompt = ids[None, :length]
            generate(self.target, draft, prompt, num_draft_tokens=self.steps, stats=stats, **self._settings(prompt))
        return Acceptance(shares, stats.acceptance)

    def better(self, tau: float, before: float) -> bool:
        """Whether a τ is so much above another one that chance is no explanation."""
        gain = tau - before
        return gain > 0.2 and (gain > GAIN * (self.steps + 1 - before) or gain > RATIO * (before - 1))


def _row(ids: Tensor, length: int, longest: int, row: int) -> dict[str, object]:
    """A packed row: the prompt is context, the answer is supervised, padding is neither."""
    pad = longest - len(ids)
    spans = [-1] * length + [0] * (len(ids) - length) + [-1] * pad
    return {"input_ids": ids.tolist() + [0] * pad, "documents": [0] * len(ids) + [-1] * pad, "spans": spans, "row": row}


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_to(v, device) for v in value]
    return value.to(device) if isinstance(value, Tensor) else value
