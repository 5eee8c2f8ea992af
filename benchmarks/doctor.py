"""Measures `foredraft doctor` by planted defects: how many it names by the right cause, and how often it complains of a sound draft.

Every defect is planted in sound, trained drafts. It counts where it does harm: where the draft no longer loads, an engine that served it
refuses it or is known to read it otherwise, or τ falls by a tenth, in a measure of this file's own; for fields that servers read in
several places, in the worst of their readings. Doctor names it if an error or a warning matches what the defect `says`.
`python benchmarks/doctor.py` runs all, `--quick` a part; what is trained is kept in `.cache/doctor`.
"""

import argparse
import hashlib
import inspect
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import doctor_config  # noqa: F401 - these three fill DEFECTS
import doctor_vocabulary  # noqa: F401
import doctor_weights  # noqa: F401
import torch
from doctor_bases import BASES, CACHE, LETTERS, draft_path, target_model, target_path, texts
from doctor_plant import DEFECTS, Defect, NotHere, Plant, readings
from matrix import rows_of
from torch import Tensor
from transformers.utils import logging

from foredraft import BaseDraft, DraftCollator, Target, auto_draft, generate
from foredraft.contracts.finding import Finding
from foredraft.decoding.loop import DraftingStats
from foredraft.doctor import Runner, diagnose, open_subject
from foredraft.formats.importing import import_draft
from foredraft.loss import estimated_tau
from foredraft.registry import default_registry

FALL, DRAFTED, PROMPT, NEW = 0.1, 4, 6, 32
WEAK = 2.0
"""τ below which it is no false alarm to call acceptance low."""


@dataclass(frozen=True)
class Case:
    """What became of a planted defect."""

    kind: str
    base: str
    harm: str | None
    """None: it does none, and does not count."""
    verdict: str
    """right, wrong (another cause), unspecific (acceptance is low), silent."""
    findings: list[str]


def main() -> None:
    """Run what was asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each defect in one draft, and one set of prompts for sound drafts")
    parser.add_argument("--only", default="", help="`KIND BASE` that match this regular expression; `sound BASE` for sound drafts")
    parser.add_argument("--json", type=Path, help="write all cases there")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    bases = 1 if asked.quick else None
    planted = [(d, base) for d in DEFECTS for base in d.bases[:bases] if re.search(asked.only, f"{d.name} {base}")]
    sound = [base for base in BASES if re.search(asked.only, f"sound {base}")]
    alarms = [alarm for base in sound for alarm in false_alarms(base, 1 if asked.quick else 2)]
    cases = [case for d, base in planted if (case := run(d, base))]
    report(cases, alarms, len(sound))
    if asked.json:
        asked.json.write_text(json.dumps({"cases": [asdict(c) for c in cases], "sound": sound, "alarms": alarms}, indent=1))


def run(defect: Defect, base: str) -> Case | None:
    """Plant it, see what harm it does, and ask doctor; None where it cannot be planted."""
    plant = Plant.of(base)
    try:
        defect.plant(plant)
    except NotHere:
        return None
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        path = plant.write(Path(folder) / "draft")
        harm = defect.engine or kept_harm(defect, path, plant, Path(folder))
        verdict, findings = judge(defect, path, plant) if harm else ("", [])
    print(f"{verdict or 'harmless':10} {defect.name} × {base} ({time.time() - started:.0f} s): {harm or ''}", flush=True)
    return Case(defect.name, base, harm, verdict, findings)


# What harm a defect does.


def kept_harm(defect: Defect, path: Path, plant: Plant, scratch: Path) -> str | None:
    """What `harm_of` says; kept on disk, as doctor has no part in it."""
    code = re.sub(r"\s", "", inspect.getsource(defect.plant).split("def ", 1)[1])
    source = hashlib.sha256(f"def{code}".encode()).hexdigest()[:12]
    file = CACHE / "harm" / f"{defect.name}-{plant.base}-{source}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(harm_of(path, plant, scratch)))
    found: str | None = json.loads(file.read_text())
    return found


def harm_of(path: Path, plant: Plant, scratch: Path) -> str | None:
    """What breaks, in a few words."""
    sound = json.loads((draft_path(plant.base) / "config.json").read_text())
    for engine in serving(sound):
        if engine().refuses(plant.config):
            return f"{engine.name} refuses it"
    try:
        fallen = fall(path, plant)
    except Exception as problem:  # whatever a broken draft makes a loader raise
        return f"does not load: {type(problem).__name__}: {str(problem)[:80]!r}"
    for i, config in enumerate(readings(plant.config) if not fallen and "foredraft" in plant.config else []):
        other = Plant(plant.base, config, plant.tensors, plant.target).write(scratch / f"reading-{i}")
        try:
            fallen = fallen or fall(other, plant)
        except Exception as problem:
            return f"does not load as some server reads it: {type(problem).__name__}"
    return fallen


def fall(path: Path, plant: Plant) -> str | None:
    """By how much τ falls, teacher-forced or, where that stays, decoded; None if by less than a tenth."""
    family = plant.target.name
    draft = load(path, plant.target, family)
    for name, tau in (("teacher-forced", forced), ("decoded", decoded)):
        was, now = sound_tau(plant.base, name), tau(draft, family)
        if now < (1 - FALL) * was:
            return f"τ {was:.2f} to {now:.2f}, {name}"
    return None


@cache
def sound_tau(base: str, name: str) -> float:
    """τ of a base as it is."""
    family = BASES[base].family
    return (forced if name == "teacher-forced" else decoded)(load(draft_path(base), target_path(family), family), family)


def load(path: Path, target: Path, family: str) -> BaseDraft:
    """The draft in a directory, in whatever format, complete."""
    if "foredraft" in json.loads((path / "config.json").read_text()):
        draft = auto_draft(path)
    else:
        with tempfile.TemporaryDirectory() as folder:
            draft = auto_draft(import_draft(path, Path(folder) / "draft", str(target)).path)
    if not draft.complete:
        draft.take_head(target_model(family))
    return draft.eval()


@cache
def answers(family: str) -> Tensor:
    """[4, PROMPT + NEW] what the target says to four prompts."""
    asked, model = texts(30_000, 4, PROMPT, noise=0), target_model(family)
    return torch.cat([model.generate(ids[None], max_new_tokens=NEW, do_sample=False) for ids in asked])


@torch.no_grad()
def forced(draft: BaseDraft, family: str) -> float:
    """τ by the shares of the target's own text that the draft foretells, fed with that text."""
    batch = DraftCollator(draft.algorithm)(rows_of(answers(family)))
    signal = Target(target_model(family), draft.config.aux_layers).capture(batch)
    metrics = draft.algorithm.loss(draft, batch, signal).metrics
    return estimated_tau((metrics["correct"] / metrics["count"].clamp(min=1)).tolist())


@torch.no_grad()
def decoded(draft: BaseDraft, family: str) -> float:
    """τ in greedy decoding."""
    stats = DraftingStats()
    for ids in answers(family)[:, :PROMPT]:
        generate(target_model(family), draft, ids[None], num_draft_tokens=DRAFTED, stats=stats, max_new_tokens=NEW, do_sample=False)
    return stats.tau


# What doctor says.


@cache
def prompts(seed: int) -> Path:
    """A file of two prompts in the targets' language."""
    file = Path(tempfile.mkdtemp()) / "prompts.jsonl"
    asked = ["".join(LETTERS[i] for i in ids) for ids in texts(seed, 2, PROMPT, noise=0).tolist()]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    return file


def judge(defect: Defect, path: Path, plant: Plant) -> tuple[str, list[str]]:
    """The verdict and all that the command tells; nothing is measured where the files tell, as that takes nothing away."""
    said = told(path, plant.target, plant.base, None)
    if not named(defect, said):
        said = told(path, plant.target, plant.base, Runner(prompts(40_000)))
    loud = [f for f in said if f.severity != "note"]
    if named(defect, said):
        verdict = "right"
    else:
        verdict = "wrong" if any(not f.id.startswith("acceptance") for f in loud) else "unspecific" if loud else "silent"
    return verdict, [f"{f.severity} {f.id}: {f.found}" for f in said]


def told(path: Path, target: Path, base: str, runner: Runner | None) -> list[Finding]:
    """What the command tells, asked for the engines that serve the sound draft; nothing is measured without a runner."""
    sound = json.loads((draft_path(base) / "config.json").read_text())
    return diagnose(open_subject(path, target), serving(sound), asked=True, runner=runner)


def serving(config: Mapping[str, Any]) -> list[Any]:
    """The engine classes that serve a draft."""
    return [engine for engine in default_registry().engines().values() if not engine().refuses(config)]


def named(defect: Defect, findings: Sequence[Finding]) -> bool:
    """Whether an error or a warning names the defect."""
    return any(f.severity != "note" and re.search(defect.says, f"{f.id} {f.found}", re.IGNORECASE) for f in findings)


def false_alarms(base: str, sets: int) -> list[str]:
    """Warnings and errors about a sound draft, over some sets of prompts."""
    path, target = draft_path(base), target_path(BASES[base].family)
    said = [f for seed in range(sets) for f in told(path, target, base, Runner(prompts(40_000 + seed)))]
    weak = sound_tau(base, "decoded") < WEAK
    loud = [f for f in said if f.severity != "note" and not (weak and f.id == "acceptance-low")]
    print(f"sound      {base}: τ {sound_tau(base, 'decoded'):.2f}, {len(loud)} alarms", flush=True)
    return sorted({f"{base}: {f.severity} {f.id}: {f.found}" for f in loud})


# The report.


def report(cases: Sequence[Case], alarms: Sequence[str], sound: int) -> None:
    """A line for each kind, the two rates, and what was missed."""
    harmful = [c for c in cases if c.harm]
    verdicts = ("right", "wrong", "unspecific", "silent")
    print(f"\n| defect | cases | {' | '.join(verdicts)} | harmless |\n|{'---|' * 7}")
    for kind in dict.fromkeys(c.kind for c in cases):
        of = Counter(c.verdict if c.harm else "harmless" for c in cases if c.kind == kind)
        print(f"| {kind} | {of.total()} | {' | '.join(str(of[v] or '') for v in (*verdicts, 'harmless'))} |")
    right = sum(c.verdict == "right" for c in harmful)
    print(f"\n{len(cases)} planted, {len(harmful)} do harm; named by the right cause: {right} ({right / max(1, len(harmful)):.1%})")
    print(f"sound drafts: {sound}, false alarms: {len(alarms)}")
    for text in alarms:
        print(f"  {text}")
    for c in harmful:
        if c.verdict != "right":
            loud = [f[:150] for f in c.findings if not f.startswith("note")]
            print(f"missed: {c.kind} × {c.base} ({c.harm}): {c.verdict}; {'; '.join(loud)}")


if __name__ == "__main__":
    main()
