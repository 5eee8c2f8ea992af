"""What doctor says of a draft."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a draft, or worth knowing about it."""

    id: str
    """Which check it comes from, stable across versions: `aux-range`, say."""
    severity: Severity
    """error: it will not work as trained; warning: it may not, or not everywhere; note: worth knowing."""
    found: str
    """What is there, with its values."""
    breaks: str
    """What goes wrong because of it, and where."""
    mend: str
    """What to do about it."""


def error(id: str, found: str, breaks: str, mend: str) -> Finding:
    """A finding with which the draft will not work as trained."""
    return Finding(id, "error", found, breaks, mend)


def warning(id: str, found: str, breaks: str, mend: str) -> Finding:
    """A finding with which it may not work, or not everywhere."""
    return Finding(id, "warning", found, breaks, mend)


def note(id: str, found: str, breaks: str, mend: str) -> Finding:
    """A finding worth knowing."""
    return Finding(id, "note", found, breaks, mend)
