"""Where a draft is measured: on its target's greedy answers to some prompts, fed with them as in training and decoding as in serving."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..contracts.signal import Signal
from ..data import DraftCollator
from ..decoding import DraftingStats, generate
from ..decoding.evaluate import sampling
from ..decoding.replay import Answered
from ..draft.model import BaseDraft
from ..loss import estimated_tau
from ..loss.readable import METRICS
from ..progress import Progress
from ..target.capture import depth_of
from ..target.pairing import check_pair
from ..target.target import Target

STRETCH = 16
"""Tokens of an answer that one sample looks at, at least."""
SAMPLES = 8
"""Batches of such stretches, at most, on each of which drafts are compared."""
KNOWN = 3
"""Drafting steps that every method trains, where none is recorded: past those, a sound draft may gain by what is wrong."""


@dataclass(frozen=True)
class Forced:
    """How a draft does when fed with the texts: sums over the drafted tokens of U samples of them, by K drafting steps."""

    count_UK: Tensor
    correct_UK: Tensor
    """Its top token is the target's."""
    accepted_UK: Tensor
    """The chance that sampling accepts its token."""
    cross_entropy_UK: Tensor
    """Nats, against the target's distribution over the draft's vocabulary, where that holds the target's top token."""

    @property
    def tau(self) -> float:
        """Tokens per target pass that the greedy shares promise."""
        return estimated_tau((self.correct_UK.sum(0) / self.count_UK.sum(0).clamp(min=1)).tolist())

    @property
    def nats_U(self) -> Tensor:
        """Per sample, the cross-entropy of a drafted token."""
        return self.cross_entropy_UK.sum(1) / self.count_UK.sum(1)

    @property
    def chance_U(self) -> Tensor:
        """Per sample, the chance that a drafted token is accepted."""
        return self.accepted_UK.sum(1) / self.count_UK.sum(1)

    def part(self, samples: slice) -> "Forced":
        """Some of the samples."""
        return Forced(*(sums[samples] for sums in vars(self).values()))

    def __add__(self, other: "Forced") -> "Forced":
        """These samples and others."""
        return Forced(*(torch.cat(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Acceptance:
    """How much of a draft is accepted."""

    forced_tau: float
    """Tokens per target pass that the draft promises when fed with the text."""
    decoded: list[float]
    """In greedy decoding, the share of drafts whose token at that place was accepted, and so all before it."""

    @property
    def decoded_tau(self) -> float:
        """Tokens per target pass in decoding, wherever as many tokens could be drafted: answers end in shorter drafts."""
        return 1 + sum(self.decoded)

    def __str__(self) -> str:
        return f"τ {self.forced_tau:.2f} teacher-forced, {self.decoded_tau:.2f} decoded"


@dataclass(frozen=True)
class _Sample:
    """Stretches of the texts, each behind all that comes before it."""

    batch: dict[str, Any]
    texts: list[int]
    signal: Signal
    """What the target says, without aux states."""


class Bench:
    """Drafts of one algorithm are measured here on a target's answers, changed or not; the target reads these once."""

    def __init__(self, target: PreTrainedModel, draft: BaseDraft, texts: Sequence[Answered], show: bool = False, recorded: bool = True):
        """`recorded`: whether the draft's algorithm is known to be as in training; else only so many steps count as all train."""
        self.target, self.algorithm, self.texts, self.show = target, draft.algorithm, texts, show
        check_pair(target, draft)
        count = depth_of(target.config)
        collate, reader = DraftCollator(self.algorithm), Target(target, tuple(range(1, count)))
        whole = [collate([_row(ids, length, len(ids), len(ids), i)]) for i, (ids, length) in enumerate(texts)]
        read = [reader.capture(_to(batch, target.device)) for batch in whole]
        steps, limit = len(whole[0]["counts"]), draft.algorithm.max_tokens
        self.steps = steps if recorded or limit else min(steps, KNOWN)
        self._aux = [[*signal.aux_BSA.chunk(count - 1, dim=-1), signal.hidden_BST] for signal in read]
        size = max(STRETCH, 2 * self.steps)
        stretches = [
            (number, start, min(start + size, len(ids)))
            for number, (ids, length) in enumerate(texts)
            for start in range(length, len(ids) - 2, size)
        ]
        self.samples = min(SAMPLES, len(stretches))
        """On how many samples drafts are compared."""
        self._samples = []
        for group in (stretches[g :: self.samples] for g in range(self.samples)):
            longest = max(end for _, _, end in group)
            batch = collate([_row(texts[number][0], start, end, longest, i) for i, (number, start, end) in enumerate(group)])
            hidden_BST = torch.cat([_padded(read[number].hidden_BST, longest) for number, _, _ in group])
            signal = Signal(hidden_BST[..., :0], hidden_BST, reader.head)
            self._samples.append(_Sample(_to(batch, target.device), [number for number, _, _ in group], signal))

    @torch.no_grad()
    def forced(self, draft: BaseDraft, samples: slice = slice(None)) -> Forced:
        """The draft on some of the samples, or all; a draft whose tensors point outside the vocabulary has none right."""
        sums, names = [], _names_tokens(draft)
        for s in self._samples[samples]:
            counts_K, length = s.batch["counts"], s.batch["input_ids"].shape[1]
            metrics = {"count": counts_K}
            if names:
                aux = [torch.cat([_padded(self._aux[text][i - 1], length) for text in s.texts]) for i in draft.config.aux_layers]
                signal = replace(s.signal, aux_BSA=torch.cat(aux, dim=-1))
                metrics = self.algorithm.loss(draft, s.batch, signal).metrics
            sums.append(torch.stack([metrics.get(name, 0 * counts_K)[: self.steps].double() for name in METRICS]).cpu())
        return Forced(*torch.stack(sums, dim=1))

    def decoded(self, draft: BaseDraft) -> list[float]:
        """In greedy decoding, the share of drafts whose token at each place was accepted, and so all before it."""
        stats = DraftingStats()
        if not _names_tokens(draft):
            return []
        with Progress("the draft decodes", len(self.texts), show=self.show) as advance:
            for ids, length in self.texts:
                prompt = ids[None, :length]
                how = {"max_new_tokens": len(ids) - length, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt), **sampling(0)}
                generate(self.target, draft, prompt, num_draft_tokens=self.steps, stats=stats, **how)
                advance()
        return stats.acceptance


def _names_tokens(draft: BaseDraft) -> bool:
    ids_W = draft.draft_ids
    return int(ids_W.min()) >= 0 and int(ids_W.max()) < draft.config.vocab_size


def _row(ids: Tensor, start: int, end: int, longest: int, row: int) -> dict[str, object]:
    """A packed row: a text up to `end`, supervised from `start` on; padding behind it."""
    pad = longest - end
    spans = [-1] * start + [0] * (end - start) + [-1] * pad
    return {"input_ids": ids[:end].tolist() + [0] * pad, "documents": [0] * end + [-1] * pad, "spans": spans, "row": row}


def _padded(states_1SD: Tensor, length: int) -> Tensor:
    """[1, length, D]: cut, or zeros behind."""
    return torch.nn.functional.pad(states_1SD, (0, 0, 0, length - states_1SD.shape[1]))


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _to(v, device) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value
