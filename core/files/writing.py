"""Files and directories written all or nothing, also where the process is killed on the way."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from ..errors import ForedraftError, few

DRAFT_FILES = re.compile(
    r"(generation_)?config\.json|README\.md|custom_generate|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|\.(config\.json|README\.md)\.\d+|\.foredraft-\w+"
)
"""What a draft's directory holds, the leavings of killed writers included: what may be replaced by another draft."""

NEW, WHOLE, REST = ".foredraft-new", ".foredraft-whole", ".foredraft-rest"
"""Folders in a directory whose files are being replaced: those still being written; all, the old ones going; all that are left to move."""


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary directory whose files take the place of the draft in `path` if the block succeeds, and vanish if it fails.

    A kill leaves the old draft, the new one, or no `config.json` and what `finish` completes. Raises `ForedraftError` if
    `path` cannot be written, is no directory, or holds more than a draft's files.
    """
    path = Path(path)
    there = os.path.lexists(path)
    try:
        check_place(path)
        path.mkdir(parents=True, exist_ok=True)
        with _locked(path, wait=False):
            finish(path, locked=True)
            new = path / NEW
            shutil.rmtree(new, ignore_errors=True)
            try:
                new.mkdir()
                yield new
                check_place(path)
                os.replace(new, path / WHOLE)
            finally:
                shutil.rmtree(new, ignore_errors=True)
            finish(path, locked=True)
    except (OSError, SafetensorError) as error:
        raise ForedraftError(f"could not write '{path}': {error}\n  what was there before is untouched") from error
    finally:
        if not there:
            with suppress(OSError):
                path.rmdir()  # empty unless it was written


def finish(path: str | Path, locked: bool = False) -> None:
    """Complete what a killed `replacing` left half done in `path`; whoever reads a draft calls it first.

    Raises `ForedraftError` if that cannot be written.
    """
    path = Path(path)
    whole, rest = path / WHOLE, path / REST
    try:
        if not (whole.is_dir() or rest.is_dir()):
            return
        if not locked:
            with _locked(path, wait=True):
                finish(path, locked=True)
            return
        if whole.is_dir():
            # Without its config.json nobody takes what is left for a draft.
            for file in sorted(path.iterdir(), key=lambda file: file.name != "config.json"):
                if file.name != WHOLE and DRAFT_FILES.fullmatch(file.name):
                    _remove(file)
            os.replace(whole, rest)
        for file in sorted(rest.iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, path / file.name)
        rest.rmdir()
    except OSError as error:
        raise ForedraftError(
            f"'{path}' holds a draft that was written whole, but not put in its place: {error}\n"
            "  it is completed by the next command that reads it and may write there"
        ) from error


def check_place(path: str | Path) -> None:
    """Raises `ForedraftError` unless a draft can be written to `path` without a loss: nothing is there, or a draft alone."""
    path = Path(path)
    if path.is_dir():
        if strangers := sorted(file.name for file in path.iterdir() if not DRAFT_FILES.fullmatch(file.name)):
            raise ForedraftError(
                f"'{path}' holds more than a draft: {few(strangers)}\n"
                "  choose another directory, or move them away: what is there would be replaced"
            )
    elif os.path.lexists(path):
        raise ForedraftError(f"'{path}' is no directory: name one, new or with a draft in it")


def check_new(path: str | Path) -> None:
    """Raises `ForedraftError` if anything is at `path` already, but for an empty directory or what a killed writer left."""
    path = Path(path)
    finish(path)
    if os.path.lexists(path) and (not path.is_dir() or any(file.name != NEW for file in path.iterdir())):
        raise ForedraftError(f"'{path}' is there already: choose another place")


def write_text(file: str | Path, text: str) -> None:
    """Write a text file, all or nothing. Raises `ForedraftError` if it cannot be written."""
    with replacing_file(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing_file(file: str | Path) -> Iterator[Path]:
    """A temporary file that takes the place of `file` if the block succeeds, and vanishes if it fails.

    Raises `ForedraftError` if it cannot be written.
    """
    file = Path(file)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, file)
    except OSError as error:
        raise ForedraftError(f"could not write '{file}': {error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path, wait: bool) -> Iterator[None]:
    """Alone among writers of a directory, on file systems that know locks."""
    import fcntl

    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise ForedraftError(f"another process is writing to '{path}': wait for it, or choose another directory") from None
        yield
    finally:
        os.close(handle)


def _remove(file: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink()
