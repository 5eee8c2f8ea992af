"""One error type for everything a user can mend, and the wording of near misses."""

from collections.abc import Iterable, Iterator, Mapping
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
    """`; did you mean 'x'?`, or nothing where no known name is close."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


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


@contextmanager
def gathering(problems: list[str]) -> Iterator[None]:
    """What a `ForedraftError` in the block says joins `problems`, to be raised with others."""
    try:
        yield
    except ForedraftError as error:
        problems.append(str(error))
