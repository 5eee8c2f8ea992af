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
