"""Records that cannot be used: counted by kind and shown once each, so that one bad record does not stop the others."""

from collections import Counter

from transformers.utils import logging

from ..errors import ForedraftError

logger = logging.get_logger("foredraft")


class Unusable(ForedraftError):
    """Why a record is not used: `kind` is the same for all records of one cause, `detail` is this one's."""

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.detail = kind, detail


class Skipped:
    """What was skipped, by kind: how many, where the first is and what it looks like."""

    def __init__(self, strict: bool = False):
        self.strict = strict
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, where: str, reason: Unusable) -> None:
        """Count a record. Raises `ForedraftError` in its place if `strict`."""
        if self.strict:
            raise ForedraftError(f"{where}: {reason}") from reason
        self._counts[reason.kind] += 1
        self._first.setdefault(reason.kind, f"{where}: {reason}")

    def __len__(self) -> int:
        """How many."""
        return self._counts.total()

    def __str__(self) -> str:
        """A line per kind."""
        return "\n  ".join(f"{count} skipped, the first is {self._first[kind]}" for kind, count in self._counts.items())

    def warn(self) -> None:
        """One warning for all, if there are any."""
        if self:
            logger.warning(str(self))
