"""All static checks of a draft, and those of engines."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..contracts.finding import Finding, note
from ..files.hub import TARGET, download, find_draft
from ..files.raw import Checkpoint, TensorInfo
from ..registry import Registry
from ..target.gguf import TABLES, is_gguf, read_gguf
from ..target.loading import load_config
from ..target.sample import base_of
from . import config, origin, pair, plugins, record, rope, tensors, vocabulary
from .plugins import stumbling
from .subject import Subject

CHECKS = (*config.CHECKS, *record.CHECKS, *tensors.CHECKS, *vocabulary.CHECKS, *rope.CHECKS, *pair.CHECKS, *origin.CHECKS, *plugins.CHECKS)
"""Each takes a `Subject` and yields findings; none raises, whatever the files hold."""
ORDER = {"error": 0, "warning": 1, "note": 2}


def examine(draft: str | Path, target: str | Path | None = None, registry: Registry | None = None) -> list[Finding]:
    """What is wrong with the draft in a directory, worst first; of its target, the config is enough. Raises as `open_subject`."""
    return examine_subject(open_subject(draft, target, registry=registry))


def open_subject(
    draft: str | Path, target: str | Path | None = None, revision: str | None = None, registry: Registry | None = None
) -> Subject:
    """A draft and its target, each a directory or an id on the hub, opened. Raises `ForedraftError` if one is not there."""
    return Subject(Checkpoint.open(find_draft(draft), registry), _target(target, revision) if target else None, registry)


def _target(target: str | Path, revision: str | None) -> Checkpoint:
    """A target's config and tensors; of one that is a file, embedding and head; of an adapter those of its base."""
    if is_gguf(target):
        config, held = load_config(str(target)).to_dict(), read_gguf(target)
        tables = {ours: theirs for theirs, ours in TABLES.items() if theirs in held.tensors}
        infos = {ours: TensorInfo(*held.tensors[theirs], Path(target)) for ours, theirs in tables.items()}
        return Checkpoint(Path(target), config, infos, _load=lambda name: held.load(tables[name]))
    directory = target if Path(target).is_dir() else download(str(target), TARGET, "target", revision)
    base = base_of(Path(directory))
    return replace(Checkpoint.open(base), path=Path(directory)) if base else Checkpoint.open(directory)


def examine_subject(subject: Subject) -> list[Finding]:
    """The same, of files that are open."""
    return worst_first([*subject.draft.findings, *(finding for check in CHECKS for finding in check(subject))])


def ask_engines(checkpoint: Checkpoint, engines: Iterable[Any], asked: bool) -> list[Finding]:
    """What engines' own checks find; of engines that were not asked for by name, notes, and one for all that do not serve the draft."""
    found: list[Finding] = []
    refused: dict[str, str] = {}
    for engine in engines:
        theirs = stumbling(engine, lambda asked: asked().findings(checkpoint))
        if not asked:
            if theirs and theirs[0].id == f"{engine.name}-refuses":
                refused[engine.name] = theirs.pop(0).found
            theirs = [replace(f, severity="note") for f in theirs]
        found += theirs
    if refused:
        says = "; ".join(f"{name}: {why}" for name, why in refused.items())
        breaks = f"{', '.join(refused)} {'does' if len(refused) == 1 else 'do'} not serve this draft"
        found.append(
            note("engines-refuse", says, breaks, "nothing to do, if another engine is to serve it: `foredraft info DRAFT` says which")
        )
    return worst_first(found)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, then warnings, then notes, each once, in the order in which they were found."""
    return sorted(dict.fromkeys(findings), key=lambda f: ORDER[f.severity])
