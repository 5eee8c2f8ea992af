"""One training at a time in a directory."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import ForedraftError
from ..files.writing import write_text

LOCK, NOTE = ".training.lock", ".training.json"
"""The lock's file, and who holds it."""


@contextmanager
def alone_in(directory: str | Path) -> Iterator[None]:
    """Nobody else trains into `directory` within the block, which may be entered again inside; of several ranks the first stands for all.

    Raises `ForedraftError` that names the other, or if the directory cannot be written.
    """
    directory = Path(directory)
    if int(os.environ.get("RANK", "0")):
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory.resolve() / LOCK, timeout=0, is_singleton=True)
        outermost = not lock.is_locked
        lock.acquire()
    except Timeout:
        raise ForedraftError(
            f"output_dir: in '{directory}' trains {_who(directory / NOTE)}\n  wait for it, end it, or choose another output_dir"
        ) from None
    except OSError as error:
        raise ForedraftError(f"output_dir: '{directory}' cannot be written: {error.strerror}; choose another directory") from error
    try:
        if outermost:
            now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            write_text(directory / NOTE, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}))
        yield
    finally:
        if outermost:
            with suppress(OSError):
                (directory / NOTE).unlink()
        lock.release()


def _who(note: Path) -> str:
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
        return f"process {found['pid']} on {found['host']}, since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
