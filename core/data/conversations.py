"""Conversations from files, hub ids or memory, in one shape: a list of `{"role", "content"}` messages."""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import eq
from pathlib import Path
from typing import Any, overload

import pyarrow
from datasets import Dataset, Features, Value, concatenate_datasets

from ..errors import ForedraftError
from .forms import Conversation, Message, conversation_of
from .images import image_of, images_in, told_apart, written
from .records import Named, folder_of, read_records, rows_of
from .skipped import Skipped, Unusable, logger
from .tables import table_of

FEATURES = Features(said=Value("string"), images=Value("bool"))
BATCH = 1000
"""Conversations that are decoded, or written, at once."""


class Conversations(Sequence[Conversation]):
    """Conversations in an Arrow table, decoded where they are looked at, with the name of their source for error messages.

    `rows` is the table. Where it is large it lies in a file of the cache (`HF_DATASETS_CACHE`), not in memory.
    """

    def __init__(self, conversations: Iterable[Sequence[Message]] | Dataset, source: str = "conversations"):
        if not isinstance(conversations, Dataset):
            found = (c if isinstance(c, Conversation) else conversation_of(list(c)) for c in conversations)
            conversations = table_of(_batches(found), FEATURES)
        self.rows, self.source = conversations, source

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Conversation]:
        for batch in self.rows.iter(BATCH):
            yield from map(decoded, batch["said"])

    @overload
    def __getitem__(self, at: int) -> Conversation: ...
    @overload
    def __getitem__(self, at: slice) -> list[Conversation]: ...
    def __getitem__(self, at: Any) -> Any:
        said = self.rows[at]["said"]
        return decoded(said) if isinstance(said, str) else [decoded(one) for one in said]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def load(cls, source: str | Path, split: str = "train", *, strict: bool = False, limit: int | None = None) -> "Conversations":
        """Read a local `.jsonl` / `.json` / `.jsonl.gz` / `.parquet` file, a glob, a folder of them, or a `datasets` hub id.

        Records that hold no conversation are skipped, with a warning that counts them and shows the first of each kind; `strict`
        makes the first one an error. `limit` ends the reading after so many conversations. Raises `ForedraftError` naming what
        cannot be read, or if nothing is left.
        """
        return cls._gathered(read_records(source, split, few=limit is not None), str(source), strict, limit, folder_of(source))

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
        skipped = Skipped(strict)

        def usable() -> Iterator[Conversation]:
            for where, record in records:
                try:
                    yield conversation_of(record, folder)
                except Unusable as reason:
                    skipped.add(where, reason)

        found = cls(islice(usable(), limit), source)
        if not found:
            raise ForedraftError(f"data '{source}' holds no conversation:\n  {skipped}" if skipped else f"data '{source}' is empty")
        skipped.warn()
        return found

    @property
    def have_images(self) -> bool:
        """Whether any of them does, so that the target's processor is needed."""
        return any(any(batch["images"]) for batch in self.rows.select_columns("images").iter(BATCH))

    def holding_out(self, count: int, seed: int = 0) -> tuple["Conversations", "Conversations"]:
        """(train, held out): `count` different conversations drawn with `seed`, removed from the rest by content; order kept."""
        if not count:
            return self, Conversations([], f"{self.source} (held out)")
        first = dict[bytes, int]()
        for i, conversation in enumerate(self):
            first.setdefault(_content(conversation), i)
        if not 0 <= count < len(first):
            different = "" if len(first) == len(self) else f", of which {len(first)} differ"
            raise ForedraftError(f"cannot hold out {count} of the {len(self)} conversations of '{self.source}'{different}")
        order = sorted(first.values())
        random.Random(seed).shuffle(order)
        held = Conversations(self.rows.select(sorted(order[:count])), f"{self.source} (held out)")
        drawn = set(order[:count])
        return Conversations(self.rows.select([i for i in range(len(self)) if i not in drawn]), self.source).without(held), held

    def without(self, others: "Conversations") -> "Conversations":
        """Those whose content is not among the others'; a warning counts what is left out. Order kept."""
        if not len(others):
            return self
        known = {_content(c) for c in others}
        kept = Conversations(self.rows.select([i for i, c in enumerate(self) if _content(c) not in known]), self.source)
        if len(kept) < len(self):
            logger.warning(f"{len(self) - len(kept)} conversations of '{self.source}' are also in '{others.source}': left out")
        return kept

    def weighted(self, weight: float, seed: int = 0) -> "Conversations":
        """Each of them `weight` times: whole times, and once more those that are drawn with `seed` for the rest. Order kept."""
        if weight == 1:
            return self
        whole, rest = divmod(weight, 1)
        once_more = set(random.Random(seed).sample(range(len(self)), round(rest * len(self))))
        taken = [i for i in range(len(self)) for _ in range(int(whole) + (i in once_more))]
        return Conversations(self.rows.select(taken), self.source)

    @classmethod
    def joined(cls, parts: Sequence["Conversations"]) -> "Conversations":
        """All of several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(concatenate_datasets([part.rows for part in parts]), ", ".join(part.source for part in parts))


def _batches(conversations: Iterable[Conversation]) -> Iterator[pyarrow.Table]:
    rest = iter(conversations)
    while some := [*islice(rest, BATCH)]:
        yield pyarrow.table({"said": [*map(encoded, some)], "images": [bool(images_in(c)) for c in some]}, FEATURES.arrow_schema)


def encoded(conversation: Conversation) -> str:
    """A conversation as JSON; images that have no path as data URLs."""
    messages = [{**m, "content": written(m["content"])} for m in conversation]
    return json.dumps({"messages": messages, "tools": conversation.tools, "cut": sorted(conversation.cut)}, default=str)


def decoded(said: str) -> Conversation:
    """What `encoded` wrote."""
    fields = json.loads(said)
    for message in fields["messages"]:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "image" and part["image"].startswith("data:"):
                part["image"] = image_of(part["image"], None, "")
    return Conversation(fields["messages"], fields["tools"], fields["cut"])


def _content(conversation: Sequence[Message]) -> bytes:
    """The same for conversations that differ in white space alone."""
    said = [[str(m["role"]), told_apart(m["content"]), m.get("tool_calls")] for m in conversation]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).digest()
