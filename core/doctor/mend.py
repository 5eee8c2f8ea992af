"""Mends a copy of a draft where what it should be is certain: from another field, from the tensors, or from the target."""

import copy
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ..contracts.finding import Finding
from ..errors import ForedraftError
from ..files.ours import write_files
from ..files.raw import SIDE_FILE, Checkpoint
from ..files.writing import check_new, replacing
from .mends import MENDS, Copy
from .static import ORDER, examine_subject
from .subject import Subject

NOISE = 0.002
"""Of the share of accepted tokens."""
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def mend(
    subject: Subject, findings: Iterable[Finding], out: str | Path, accepted: Callable[[Subject], float | None] | None = None
) -> list[str]:
    """Write a copy of the draft to the new directory `out`, mended where `findings` say; what was mended, a line each.

    Each mend is judged alone: it is kept if the copy then examines better, with nothing new, and no fewer of its tokens are
    `accepted`, where that measures a draft (None where it cannot be run). All tensors go into one
    `model.safetensors` under the names they had; small files beside them are copied. Raises `ForedraftError` if nothing can be
    mended with certainty, if the draft cannot be read, or if `out` is there already.
    """
    out = Path(out)
    check_new(out)
    if subject.draft.path.is_file():
        raise ForedraftError(f"'{subject.draft.path}' is one file: `foredraft import` it, mend what comes out, and export that")
    if unread := [f.found for f in subject.draft.findings]:
        raise ForedraftError(f"'{subject.draft.path}' cannot be mended, as it could not be read: {unread[0]}")
    asked, tried = {f.id for f in findings} & set(MENDS), set[str]()
    found, done, dropped = examine_subject(subject), list[str](), list[str]()
    before = accepted(subject) if accepted else None
    while id := next((f.id for f in found if f.id in asked - tried), None):
        tried.add(id)
        made = Copy(subject, copy.deepcopy(dict(subject.draft.config)))
        if not (how := MENDS[id](subject, made)):
            continue
        changed = replace(subject, draft=subject.draft.changed(made.config, made.tensors))
        if not _better(then := examine_subject(changed), found):
            dropped.append(f"{id}: {how}; other findings came with it")
            continue
        if accepted:
            now = _measured(changed, accepted)
            if before is not None and (now is None or now < before - NOISE):
                dropped.append(f"{id}: {how}; fewer drafted tokens are accepted")
                continue
            before = now
        subject, found, tried = changed, then, set()  # what did not help before may help now
        done.append(f"{id}: {how}")
    if not done:
        tries = "".join(f"\n  tried and dropped: {line}" for line in dict.fromkeys(dropped))
        raise ForedraftError(f"nothing of '{subject.draft.path}' can be mended with certainty; nothing was written{tries}")
    with replacing(out) as temporary:
        _write(subject.draft, temporary)
    return done


def _better(now: list[Finding], before: list[Finding]) -> bool:
    """Whether there are fewer findings or lesser ones, and none is new but notes."""
    new = Counter(f.id for f in now if f.severity != "note") - Counter(f.id for f in before)
    counts = [[sum(f.severity == kind for f in found) for kind in ORDER] for found in (now, before)]
    return not new and counts[0] < counts[1]


def _measured(changed: Subject, accepted: Callable[[Subject], float | None]) -> float | None:
    with TemporaryDirectory() as folder:
        _write(changed.draft, Path(folder))
        return accepted(replace(changed, draft=Checkpoint.open(folder)))


def _write(draft: Checkpoint, folder: Path) -> None:
    for file in draft.path.iterdir():
        if file.is_file() and (file.name == SIDE_FILE or not file.name.endswith(NOT_COPIED)) and file.stat().st_size < 2**28:
            shutil.copyfile(file, folder / file.name)
    write_files(folder, draft.config, {name: draft.tensor(name).clone() for name in draft.tensors})
