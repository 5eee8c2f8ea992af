"""Conversations from files, hub ids or memory, in one shape: a list of `{"role", "content"}` messages."""

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ForedraftError
from .forms import Conversation, Message, conversation_of
from .images import images_in, told_apart
from .records import Named, folder_of, read_records, rows_of
from .skipped import Skipped, Unusable, logger


class Conversations(list[Conversation]):
    """Conversations in memory, with the name of their source for error messages."""

    def __init__(self, conversations: Iterable[Sequence[Message]], source: str = "conversations"):
        super().__init__(c if isinstance(c, Conversation) else conversation_of(list(c)) for c in conversations)
        self.source = source

    @classmethod
    def load(cls, source: str | Path, split: str = "train", *, strict: bool = False, limit: int | None = None) -> "Conversations":
        """Read a local `.jsonl` / `.json` / `.jsonl.gz` / `.parquet` file, a glob, a folder of them, or a `datasets` hub id.

        Records that hold no conversation are skipped, with a warning that counts them and shows the first of each kind; `strict`
        makes the first one an error. `limit` ends the reading after so many conversations. Raises `ForedraftError` naming what
        cannot be read, or if nothing is left.
        """
        return cls._gathered(read_records(source, split), str(source), strict, limit, folder_of(source))

    @classmethod
    def of(cls, data: Any, source: str = "conversations", *, strict: bool = False) -> "Conversations":
        """Conversations from memory: a list of message lists or of records, or a `datasets.Dataset`. Errors are those of `load`."""
        if isinstance(data, cls):
            return data
        if isinstance(data, str | bytes):
            raise ForedraftError("expected conversations, found a text; files are read by Conversations.load(path)")
        if isinstance(data, Mapping):
            raise ForedraftError(f"expected conversations, found a mapping of {', '.join(map(str, data))}: choose one of its data sets")
        rows = rows_of(source, data) if hasattr(data, "features") else ((f"{source}, record {i}", r) for i, r in enumerate(data))
        return cls._gathered(rows, source, strict)

    @classmethod
    def _gathered(
        cls, records: Iterable[Named], source: str, strict: bool, limit: int | None = None, folder: Path | None = None
    ) -> "Conversations":
        found, skipped = cls([], source), Skipped(strict)
        for where, record in records:
            try:
                found.append(conversation_of(record, folder))
            except Unusable as reason:
                skipped.add(where, reason)
            if len(found) == limit:
                break
        if not found:
            raise ForedraftError(f"data '{source}' holds no conversation:\n  {skipped}" if skipped else f"data '{source}' is empty")
        skipped.warn()
        return found

    @property
    def have_images(self) -> bool:
        """Whether any of them does, so that the target's processor is needed."""
        return any(map(images_in, self))

    def holding_out(self, count: int, seed: int = 0) -> tuple["Conversations", "Conversations"]:
        """(train, held out): `count` different conversations drawn with `seed`, removed from the rest by content; order kept."""
        first = {_content(c): i for i, c in reversed(list(enumerate(self)))}
        if not 0 <= count < len(first):
            different = "" if len(first) == len(self) else f", of which {len(first)} differ"
            raise ForedraftError(f"cannot hold out {count} of the {len(self)} conversations of '{self.source}'{different}")
        order = sorted(first.values())
        random.Random(seed).shuffle(order)
        drawn = set(order[:count])
        held = Conversations((c for i, c in enumerate(self) if i in drawn), f"{self.source} (held out)")
        return Conversations((c for i, c in enumerate(self) if i not in drawn), self.source).without(held), held

    def without(self, others: "Conversations") -> "Conversations":
        """Those whose content is not among the others'; a warning counts what is left out. Order kept."""
        known = {_content(c) for c in others}
        kept = Conversations((c for c in self if _content(c) not in known), self.source)
        if len(kept) < len(self):
            logger.warning(f"{len(self) - len(kept)} conversations of '{self.source}' are also in '{others.source}': left out")
        return kept


def _content(conversation: Sequence[Message]) -> bytes:
    """The same for conversations that differ in white space alone."""
    said = [[str(m["role"]), told_apart(m["content"]), m.get("tool_calls")] for m in conversation]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).digest()
