"""The dynamic check: the draft runs on text of its target, as in training and as in serving, and so do variants with one thing changed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..contracts.finding import Finding, error, note, warning
from ..contracts.loading import PLAIN, Loading
from ..decoding import load_prompts
from ..decoding.evaluate import Prompt, encode
from ..decoding.replay import Answered, answers
from ..draft.model import BaseDraft
from ..errors import ForedraftError
from ..formats import open_draft
from ..progress import Progress
from ..target.loading import load_target, load_tokenizer
from .bench import Acceptance, Bench, Forced
from .static import ORDER, ask_engines, examine_subject, worst_first
from .subject import Subject
from .suspects import SUSPECTS, Suspect

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short Python function that returns the n-th Fibonacci number.",
    "A train leaves at 9:40 and arrives at 11:05. How long does the journey take?",
    "Translate into French: The library opens at nine and closes at six.",
)
NEW_TOKENS = 64
LOW = 1.3
"""τ below which a draft is hardly worth its cost."""
CERTAIN = 3.0
"""Standard errors, over the samples of the texts, by which a variant must be better."""
GAIN = 0.2
"""Tokens per target pass that it must gain,"""
NATS = 0.1
"""or nats per drafted token, which tell where hardly anything is accepted, too."""
MUCH = 0.4
"""What a tempting change must gain: this share of those that were accepted, and so many nats."""
LARGE = 0.5
"""A gain of so many tokens per target pass, or of this share of those that were accepted, is an error's."""
CLOSE = 0.9
"""A variant that gains this share of what the best one gains explains it as well,"""
APART = 2.0
"""unless the samples tell them apart by so many standard errors, in chance or in nats."""
GAP = 0.35
"""Share of the teacher-forced drafted tokens that decoding may lose: its estimate takes steps for independent."""


@dataclass
class Runner:
    """Runs drafts of one target, which is loaded, and asked for its answers, once."""

    prompts: str | Path | None = None
    loading: Loading = PLAIN
    show: bool = False
    """Whether progress is shown, on stderr."""
    _read: tuple[PreTrainedModel, list[Answered]] | None = None

    def findings(self, subject: Subject, found: Sequence[Finding] = ()) -> list[Finding]:
        """What running the draft with its target finds; a note where one of them cannot be run. A peer's draft is read into ours first.

        `found` is what the files tell: see `run`. Raises `ForedraftError` if the file of prompts cannot be read.
        """
        prompts = asked(self.prompts)
        if subject.target is None or not subject.target.tensors:
            return [_unmeasured("no weights of the target are at hand")]
        if subject.quantised:
            return [_unmeasured(subject.quantised)]
        try:
            bench = self._bench(subject, prompts)
        except Exception as problem:  # whatever a checkpoint that the other checks found broken makes a loader raise
            return [_unmeasured((str(problem) or type(problem).__name__)[:300])]
        try:
            return run(*bench, found)
        except (ForedraftError, IndexError, RuntimeError, ValueError) as problem:  # a config may name tokens that are not there
            return [_unmeasured(f"{type(problem).__name__}: {problem}"[:300])]

    def accepted(self, subject: Subject) -> float | None:
        """The chance that a drafted token of this draft is accepted, on the target's answers; None where it cannot be run."""
        if subject.target is None or not subject.target.tensors or subject.quantised:
            return None
        try:
            bench, draft = self._bench(subject, asked(self.prompts))
            forced = bench.forced(draft)
        except Exception:  # as in `findings`
            return None
        return float(forced.accepted_UK.sum() / forced.count_UK.sum())

    def _bench(self, subject: Subject, prompts: Sequence[Prompt]) -> tuple[Bench, BaseDraft]:
        assert subject.target is not None
        path = str(subject.target.path)
        draft = open_draft(subject.draft.path, path, loading=self.loading, registry=subject.registry)
        if self._read is None:
            tokenizer, target = load_tokenizer(path, self.loading), load_target(path, "auto", self.loading).eval()
            asked = [encode(tokenizer, prompt)["input_ids"][0] for prompt in prompts]
            texts = [(ids, length) for ids, length in answers(target, asked, NEW_TOKENS, show=self.show) if len(ids) > length + 2]
            if not texts:
                raise ForedraftError("the target answers none of the prompts with more than two tokens")
            self._read = target, texts
        target, texts = self._read
        draft = draft.to(target.device, target.dtype).eval()
        return Bench(target, draft, texts, self.show, recorded=bool(subject.made)), draft


def _unmeasured(why: str) -> Finding:
    return note("acceptance-unmeasured", why, "acceptance is not known", "mend what the other findings say, and give a target with weights")


def asked(file: str | Path | None, limit: int = 8) -> Sequence[Prompt]:
    """Prompts from JSONL, or a few of our own."""
    return load_prompts(file, limit) if file else [[{"role": "user", "content": text}] for text in PROMPTS]


@dataclass(frozen=True)
class Trial:
    """A variant of a draft that is better than the draft on the texts."""

    suspect: Suspect
    change: str
    draft: BaseDraft
    before: Forced
    after: Forced

    @cached_property
    def gain_U(self) -> Tensor:
        """What the chance to be accepted gains, per sample."""
        return self.after.chance_U - self.before.chance_U

    @cached_property
    def nats_U(self) -> Tensor:
        """What the loss falls by, per sample."""
        return self.before.nats_U - self.after.nats_U

    @property
    def fits(self) -> bool:
        """Whether it gains so much, and in so many samples, that chance is no explanation."""
        tempting = self.suspect.tempting
        least = max(GAIN, MUCH * (self.before.tau - 1)) if tempting else GAIN
        tokens = self.after.tau - self.before.tau >= least and _standard_errors(self.gain_U) >= CERTAIN
        # Nats tell of drafts that are hardly accepted: others have room to gain by what is wrong, too. Where the draft's
        # vocabulary changes, they are of other tokens.
        tells = self.before.tau < LOW and self.suspect.id != "d2t" and float(self.gain_U.mean()) > 0
        return tokens or (tells and float(self.nats_U.mean()) >= (MUCH if tempting else NATS) and _standard_errors(self.nats_U) >= CERTAIN)

    def as_good_as(self, best: "Trial") -> bool:
        """Whether it explains as much as the best one."""
        share = float(self.gain_U.mean()) / float(best.gain_U.mean())
        apart = max(_standard_errors(best.gain_U - self.gain_U), _standard_errors(best.nats_U - self.nats_U))
        return share >= CLOSE and apart < APART


def _standard_errors(difference_U: Tensor) -> float:
    """A mean in standard errors; 0 of a single sample."""
    count = len(difference_U)
    return float(difference_U.mean() / (difference_U.std() / count**0.5 + 1e-9)) if count > 1 else 0.0


def trials(bench: Bench, draft: BaseDraft, before: Forced) -> Iterator[Trial]:
    """All variants of all suspects that fit. One that is no better on the first quarter of the texts is not looked at further."""
    quarter = max(2, bench.samples // 4)
    first, rest = slice(0, quarter), slice(quarter, None)
    with Progress("trying what may be wrong", len(SUSPECTS), show=bench.show) as advance:
        for suspect in SUSPECTS:
            for variant in suspect.variants(draft, bench.target):
                made = variant.of(draft)
                after, same = bench.forced(made, first), before.part(first)
                if after.chance_U.mean() <= same.chance_U.mean() and after.nats_U.mean() >= same.nats_U.mean():
                    continue
                trial = Trial(suspect, variant.change, made, before, after + bench.forced(made, rest) if bench.samples > quarter else after)
                if trial.fits:
                    yield trial
            advance()


def run(bench: Bench, draft: BaseDraft, found: Sequence[Finding] = ()) -> list[Finding]:
    """Measure the draft on the target's answers; name the suspect whose variant is best, if it is much better.

    Of several that explain it equally well, one that the files name (`found`) is named, else none. Where the files hold errors, low
    acceptance is no news.
    """
    before = bench.forced(draft)
    as_it_is = Acceptance(before.tau, bench.decoded(draft))
    told = note("acceptance", f"{as_it_is}, {bench.steps} tokens drafted at most", "nothing", "nothing to do")
    fitting = sorted(trials(bench, draft, before), key=lambda t: -float(t.gain_U.mean()))
    if fitting and (finding := _named(bench, fitting, as_it_is, found)):
        return [finding, told]
    if any(f.severity == "error" for f in found):
        return [told]
    if as_it_is.forced_tau - as_it_is.decoded_tau > max(GAP * (as_it_is.forced_tau - 1), 0.3):
        lost = "drafting does not see what training saw, past the first token: states fed back, positions or the mask token"
        return [error("acceptance-gap", str(as_it_is), lost, "compare the first step with the later ones: `foredraft eval`"), told]
    if as_it_is.decoded_tau < LOW:
        return [
            warning("acceptance-low", str(as_it_is), "drafting costs more than it saves", "train it longer, or on text like this"),
            told,
        ]
    return [told]


def _named(bench: Bench, fitting: Sequence[Trial], as_it_is: Acceptance, found: Sequence[Finding]) -> Finding | None:
    """The suspect of the best trial, which comes first; None if decoding does not gain from it."""
    best = fitting[0]
    equal = [t for t in fitting if t.as_good_as(best)]
    backed = [t for t in equal if _same_cause(t.suspect, found)]
    if any(t.suspect != best.suspect for t in equal) and not backed:
        each = "; ".join(f"with {t.change}, τ {t.after.tau:.2f} teacher-forced" for t in equal)
        return warning(
            "suspects-close",
            f"{as_it_is}; {each}: these explain it equally well",
            "; ".join(dict.fromkeys(t.suspect.breaks for t in equal)),
            "compare with what the training was told; a change that is right makes `foredraft eval` better",
        )
    best = (backed or equal)[0]
    changed = Acceptance(best.after.tau, bench.decoded(best.draft))
    if changed.decoded_tau < as_it_is.decoded_tau:
        return None
    gain = changed.forced_tau - as_it_is.forced_tau
    large = gain >= LARGE or gain >= max(GAIN, LARGE * (as_it_is.forced_tau - 1))
    nats = float(best.nats_U.mean())
    says = f"{as_it_is}; with {best.change}, {changed}" + (f" ({nats:.2f} nats less per drafted token)" if nats >= NATS else "")
    return (error if large else warning)(f"suspect-{best.suspect.id}", says, best.suspect.breaks, best.suspect.mend)


def _same_cause(suspect: Suspect, found: Iterable[Finding]) -> Finding | None:
    """A finding in the files that names this cause."""
    return next((f for f in found if f.id.startswith(suspect.named)), None)


def diagnose(subject: Subject, engines: Iterable[Any] = (), asked: bool = False, runner: Runner | None = None) -> list[Finding]:
    """All that the files, engines (`asked` for by name) and, with a runner, a run tell: each cause once, worst first."""
    static = examine_subject(subject)
    ran = runner.findings(subject, static) if runner else []
    return worst_first(merged([*static, *ask_engines(subject.draft, engines, asked)], ran))


def merged(found: Sequence[Finding], ran: Sequence[Finding]) -> list[Finding]:
    """Findings of the files and of the run, each cause told once: a suspect that the files name is told with what they say."""
    suspects = {f"suspect-{s.id}": s for s in SUSPECTS}
    both = list(found)
    for finding in ran:
        known = _same_cause(suspects[finding.id], found) if finding.id in suspects else None
        if known is None:
            both.append(finding)
        else:
            severity = min(known.severity, finding.severity, key=ORDER.__getitem__)
            both[both.index(known)] = replace(known, severity=severity, found=f"{known.found}; measured: {finding.found}")
    return both
