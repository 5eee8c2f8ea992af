"""One error type for everything a user can mend, and the wording of near misses."""

from collections.abc import Iterable
from difflib import get_close_matches


class ForedraftError(Exception):
    """Says what was asked, what was found and what to do; the command line prints it without a traceback."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing where no known name is close."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
