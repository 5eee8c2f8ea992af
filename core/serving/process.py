"""A server that is started for a piece of work, and ended with it."""

import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from urllib.error import URLError
from urllib.request import urlopen

from ..errors import ForedraftError

PATIENCE = 1800.0
"""Seconds that a server may take to load."""
GRACE = 20.0
"""Seconds that it may take to end."""


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
    """The base URL of a server that `command` starts on `port`, once it is healthy; it is ended with the block, whatever it has started.

    Raises `ForedraftError`, with the last lines it said, where it does not start, ends, or takes longer than `patience` seconds.
    """
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            process = subprocess.Popen(list(command), stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise ForedraftError(f"`{command[0]}` cannot be started: {error.strerror}; is the engine on the PATH?") from error
        try:
            start = time.monotonic()
            while not _healthy(url):
                if process.poll() is not None or time.monotonic() - start > patience:
                    said.seek(0)
                    last = "".join(said.readlines()[-15:])
                    why = f"ended with status {process.returncode}" if process.poll() is not None else f"is not up after {patience:.0f} s"
                    raise ForedraftError(f"the server {why}: {' '.join(command)}\n{last}")
                time.sleep(0.2)
            yield url
        finally:
            _end(process)


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
