"""A server that is started for a piece of work, and ended with it."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO
from urllib.error import URLError
from urllib.request import urlopen

from ..errors import ForedraftError

PATIENCE = 1800.0
"""Seconds that a server may take to load."""
GRACE = 20.0
"""Seconds that it may take to end."""
LAST = 15
FAILURE = re.compile(r"fail|error|exception|unsupported", re.IGNORECASE)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def running_engine(command: Sequence[str], arguments: str | None = None) -> AbstractContextManager[str]:
    """`running` of an engine's command with a user's further arguments, on a free port of this machine alone.

    All engines known so far spell that alike.
    """
    port = free_port()
    return running([*command, *shlex.split(arguments or ""), "--host", "127.0.0.1", "--port", str(port)], port)


@contextmanager
def running(command: Sequence[str], port: int, patience: float = PATIENCE) -> Iterator[str]:
    """The base URL of a server that `command` starts on `port`, once it is healthy; it is ended with the block, whatever it has started,
    and so it is where SIGTERM ends this program.

    Raises `ForedraftError`, with what it said of errors and last, where it does not start, ends, or takes longer than `patience` seconds;
    errors of the block are told with the same.
    """
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as said, _ended_by_signals():
        try:
            process = subprocess.Popen(list(command), stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise ForedraftError(f"`{command[0]}` cannot be started: {error.strerror}; is the engine on the PATH?") from error
        try:
            start = time.monotonic()
            while not _healthy(url):
                if process.poll() is not None or time.monotonic() - start > patience:
                    why = f"ended with status {process.returncode}" if process.poll() is not None else f"is not up after {patience:.0f} s"
                    raise ForedraftError(f"the server {why}: {' '.join(command)}")
                time.sleep(0.2)
            yield url
        except ForedraftError as error:
            raise type(error)(f"{error}\nthe server said:\n{_told(said)}") from error
        finally:
            _end(process)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM leaves the block as an exception does, unless somebody handles it already, or this is not the main thread."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _told(said: IO[str]) -> str:
    """Of a server's log what is about failures, and its end."""
    said.seek(0)
    lines = said.readlines()
    wrong = [line for line in lines[:-LAST] if FAILURE.search(line)]
    return "".join([*wrong[:LAST], *lines[-LAST:]]).rstrip()


def run_command(words: Sequence[str]) -> None:
    """What has to be run before a server; our own programs are found without a PATH. Raises `ForedraftError` with its words if it fails."""
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(list(words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PATH": here})
    if done.returncode:
        raise ForedraftError(f"`{shlex.join(words)}` ended with status {done.returncode}:\n{done.stdout[-2000:]}")


def _healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all of its group: servers have workers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
