"""How far a long command is: a bar on a terminal, a line now and then in a log."""

import sys
import time
from typing import Any

INTERVAL = 30.0
"""Seconds between two lines."""


class Progress:
    """`with Progress("answering", total=917) as advance: ... advance(32)`: a bar, or lines on stderr.

    A line: `answering: 320 of 917, 0.8 a second, 12 min left`.
    """

    def __init__(self, what: str, total: int, done: int = 0, show: bool = True):
        self.what, self.total, self.done, self.show = what, total, done, show
        self._bar: Any = None

    def __enter__(self) -> Any:
        self._before, self._start = self.done, time.monotonic()
        self._told = self._start
        if self.show and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            columns = TextColumn(self.what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(self.what, total=self.total, completed=self.done)
            self._bar.start()
        return self.advance

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        self.done += count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.advance(self._task, count)
        elif self.show and (now - self._told >= INTERVAL or self.done >= self.total):
            self._told = now
            each = (now - self._start) / (self.done - self._before)
            left = f", {1 / each:.3g} a second, {duration(each * (self.total - self.done))} left" if each and self.done < self.total else ""
            print(f"{self.what}: {self.done} of {self.total}{left}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 5 min`."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
