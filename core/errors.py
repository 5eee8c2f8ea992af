"""One error type for everything a user can mend, and the wording of near misses."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class ForedraftError(Exception):
    """Says what was asked, what was found and what to do; the command line prints it without a traceback."""

    status = 1
    """The exit status of the command line."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing where no known name is close: one that begins so, else one spelt alike, case and hyphens apart."""
    asked, plain = _plain(name), {_plain(k): k for k in known}
    close = sorted(k for k in plain if len(asked) > 3 and k.startswith(asked)) or get_close_matches(asked, plain, n=1, cutoff=0.6)
    return f"; did you mean '{plain[close[0]]}'?" if close else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def printable(text: str) -> str:
    """`text` with all that a terminal would obey, or that cannot be encoded, spelt out; names in files may hold anything."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def describe_validation(error: "ValidationError", known: Mapping[str, Any], within: str = "") -> str:
    """All that pydantic found, a line each, keys led by `within`; an unknown key with the nearest known one."""
    lines = []
    for e in error.errors():
        key = within + ".".join(str(part) for part in e["loc"])
        if e["type"] == "missing":
            lines.append(f"{key}: {e['msg']}")
        elif e["type"] == "extra_forbidden":
            lines.append(f"unknown option '{key}'{nearest(key, known)} (known: {', '.join(sorted(known))})")
        else:
            lines.append(f"{key}={e['input']!r:.200}: {e['msg']}")
    return "\n  ".join(lines)


def few(items: Sequence[str], most: int = 5) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


@contextmanager
def gathering(problems: list[str]) -> Iterator[None]:
    """What a `ForedraftError` in the block says joins `problems`, to be raised with others."""
    try:
        yield
    except ForedraftError as error:
        problems.append(str(error))
