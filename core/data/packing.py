"""Documents packed into rows of fixed length; each keeps its number, so that nothing is attended or supervised across them."""

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset, Features, List, Value
from filelock import FileLock
from safetensors.torch import save

from ..errors import ForedraftError
from ..progress import Progress
from .conversations import Conversations, decoded
from .render import Renderer
from .skipped import Skipped, Unusable
from .tables import cached, place, table_of
from .template import Reader

FORM = 2
"""Of the rows in the cache: another number, other rows."""
OPEN = 32
"""Rows that still have room and are tried."""
MANY = 4000
"""Conversations from which on each further process is worth its start."""
_NUMBERS = List(Value("int32"))
_RENDERED = Features(ids=_NUMBERS, turns=_NUMBERS, pixels=Value("binary"), kind=Value("string"), detail=Value("string"))
"""Of a conversation; `turns` are first token, end and number of each run of an assistant turn; or why it cannot be rendered."""
_ROW = Features(input_ids=_NUMBERS, documents=_NUMBERS, spans=_NUMBERS, row=Value("int64"))


def pack(
    conversations: Conversations | Sequence[Any] | Dataset,
    tokenizer: Reader,
    length: int,
    *,
    strict: bool = False,
    processes: int | None = None,
    show_progress: bool = False,
) -> Dataset:
    """Conversations as packed rows: a `datasets.Dataset` with `input_ids`, `documents`, `spans` (each [length]) and `row`.

    `documents` numbers the documents of a row, -1 is padding. `spans` numbers the assistant turns of a row, -1 elsewhere. A
    conversation longer than `length` is cut at its end. Conversations without assistant tokens are dropped; the
    dataset's `info.description` counts them. A list of message lists or of records, or a `datasets.Dataset`, is read as
    `Conversations.of` does. What the chat template refuses is skipped with a warning, or an error if `strict`.

    A conversation with images, for which `tokenizer` must be the target's processor, is a row of its own, and has `pixels`: what the
    target reads beside the ids, as safetensors.

    Large ones are rendered by several `processes` (by default one for each core, where there is work for it), and stay in files of the
    cache, by data, tokenizer, template and length: what was rendered once is read.

    Raises `ForedraftError` if nothing is left to train on.
    """
    conversations = Conversations.of(conversations, strict=strict)
    found = _Found(conversations, length)
    if not len(conversations):
        found.check()
    rendered = _rendered(conversations, tokenizer, length, strict, processes, show_progress)
    fingerprint = f"rows-{rendered._fingerprint}"
    dataset = cached(fingerprint)
    if dataset is None:
        with Progress("packing conversations", len(rendered), show=show_progress) as advance:
            features = Features(pixels=Value("binary"), **_ROW) if conversations.have_images else _ROW
            tables = _tables(found.fill(rendered, advance), length)
            dataset = _in_order(table_of((table.select([*features]) for table in tables), features, fingerprint))
    else:
        found.count(rendered)
    found.check()
    dataset.info.description = found.described(len(dataset))
    return dataset


def _rendered(conversations: Conversations, reader: Reader, length: int, strict: bool, processes: int | None, show: bool) -> Dataset:
    """What `_RENDERED` says of every conversation."""
    import datasets

    renderer = Renderer(reader)
    told = [conversations.rows._fingerprint, renderer.fingerprint, length, FORM]
    fingerprint = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
    many = min(processes or os.cpu_count() or 1, max(1, len(conversations) // MANY))
    file = place(f"rendered-{fingerprint}.arrow") if conversations.rows.cache_files else None
    (datasets.enable_progress_bars if show else datasets.disable_progress_bars)()
    try:
        with FileLock(f"{file}.lock") if file else nullcontext():  # of several ranks one renders, the others read
            return conversations.rows.map(
                partial(_render, renderer, conversations.source if strict else None, length),
                with_indices=True,
                batched=True,
                batch_size=64,
                features=_RENDERED,
                remove_columns=conversations.rows.column_names,
                num_proc=many if many > 1 else None,
                cache_file_name=file,
                new_fingerprint=fingerprint,
                desc="rendering conversations",
            )
    finally:
        datasets.disable_progress_bars()


def _render(renderer: Renderer, strictly: str | None, length: int, batch: Mapping[str, Any], numbers: list[int]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {name: [] for name in _RENDERED}
    for number, said in zip(numbers, batch["said"], strict=True):
        row: dict[str, Any] = {"ids": [], "turns": [], "pixels": None, "kind": None, "detail": None}
        try:
            shown = renderer.render(decoded(said), length + 1)
        except Unusable as reason:
            if strictly is not None:
                raise ForedraftError(f"{strictly}, conversation {number}: {reason}") from reason
            row |= {"kind": reason.kind, "detail": reason.detail}
        else:
            row |= {"ids": shown.ids, "turns": _runs(np.array(shown.spans))}
            if shown.pixels:
                row["pixels"] = save({name: value.contiguous() for name, value in shown.pixels.items()})
        for name, value in row.items():
            found[name].append(value)
    return found


def _runs(spans: Any) -> list[int]:
    borders = np.flatnonzero(np.diff(spans, prepend=-1, append=-1))
    runs = np.stack([borders[:-1], borders[1:], spans[borders[:-1]]], 1) if len(borders) else np.empty((0, 3), np.int64)
    runs_taught: list[int] = runs[runs[:, 2] >= 0].ravel().tolist()
    return runs_taught


class _Row:
    """A row that is being filled."""

    def __init__(self, number: int, length: int, pixels: bytes | None):
        self.number, self.pixels, self.used, self.documents, self.spans = number, pixels, 0, 0, 0
        self.values = np.zeros((3, length), np.int32)
        self.values[1:] = -1

    def add(self, ids: Any, turns: Any) -> None:
        start, end = self.used, self.used + len(ids)
        self.values[0, start:end], self.values[1, start:end] = ids, self.documents
        for first, last, turn in turns:
            self.values[2, start + first : start + last] = self.spans + turn
        self.used, self.documents, self.spans = end, self.documents + 1, self.spans + int(turns[-1][2]) + 1


class _Found:
    """What is in rendered conversations, counted while rows are filled."""

    def __init__(self, conversations: Conversations, length: int):
        self.conversations, self.length = conversations, length
        self.skipped, self.used, self.cut = Skipped(), 0, 0

    def _usable(self, rendered: Dataset) -> Iterator[tuple[Any, Any, bytes | None] | None]:
        """Ids, turns [n, 3] and pixels of those with something to train in a row, None for the others."""
        for number, batch in enumerate(rendered.with_format("arrow").iter(256)):
            columns = {name: batch.column(name).combine_chunks() for name in batch.column_names}
            ids, turns = (_lists(columns[name]) for name in ("ids", "turns"))
            pixels, kinds, details = (columns[name].to_pylist() for name in ("pixels", "kind", "detail"))
            for i, kind in enumerate(kinds):
                runs = next(turns).reshape(-1, 3)
                own = next(ids)
                if kind is not None:
                    self.skipped.add(f"{self.conversations.source}, conversation {256 * number + i}", Unusable(kind, details[i]))
                    yield None
                    continue
                runs = runs[runs[:, 0] < self.length]
                self.used += bool(len(runs))
                self.cut += bool(len(runs)) and len(own) > self.length
                yield (own[: self.length], runs.clip(max=[self.length, self.length, 2**30]), pixels[i]) if len(runs) else None

    def count(self, rendered: Dataset) -> None:
        """Without rows."""
        deque(self._usable(rendered), maxlen=0)

    def fill(self, rendered: Dataset, advance: Any) -> Iterator[_Row]:
        """First fit in order, over the rows that still have room: keeps the order nearly, wastes little."""
        open_rows, number = list[_Row](), 0
        for found in self._usable(rendered):
            advance(1)
            if found is None:
                continue
            ids, turns, pixels = found
            row = None if pixels else next((o for o in open_rows if o.used + len(ids) <= self.length), None)
            if row is None:
                row, number = _Row(number, self.length, pixels), number + 1
                if not pixels:
                    yield from open_rows[: 1 - OPEN]
                    open_rows = [*open_rows[1 - OPEN :], row]
            row.add(ids, turns)
            if pixels:
                yield row
        yield from open_rows

    def check(self) -> None:
        """Warn of what was skipped. Raises `ForedraftError` if nothing is left."""
        source = self.conversations.source
        if self.skipped and len(self.skipped) == len(self.conversations):
            raise ForedraftError(f"no conversation of '{source}' can be rendered:\n  {self.skipped}")
        self.skipped.warn()
        if not self.used:
            raise ForedraftError(
                f"nothing to train on: none of the {len(self.conversations)} conversations of '{source}' has an assistant turn "
                f"within its first {self.length} tokens.\n"
                "  See what is supervised with `foredraft preview`; `foredraft regenerate` answers prompts"
            )

    def described(self, rows: int) -> str:
        dropped = len(self.conversations) - self.used
        return (
            f"{self.used} conversations in {rows} rows of {self.length} tokens; "
            f"{dropped} without assistant tokens dropped, {self.cut} cut at {self.length}"
        )


def _lists(column: Any) -> Iterator[Any]:
    """The values of each list, as arrays that look into the column."""
    values, starts = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    return (values[first:last] for first, last in pairwise(starts.tolist()))


def _tables(rows: Iterator[_Row], length: int) -> Iterator[pyarrow.Table]:
    """Rows as they are finished, some at a time."""
    some = list[_Row]()
    for row in rows:
        some.append(row)
        if len(some) * length >= 2**18:
            yield _table(some, length)
            some = []
    if some:
        yield _table(some, length)


def _table(rows: list[_Row], length: int) -> pyarrow.Table:
    starts = np.arange(len(rows) + 1, dtype=np.int32) * length
    columns: dict[str, Any] = {"pixels": pyarrow.array([row.pixels for row in rows], pyarrow.binary())}
    for i, name in enumerate(("input_ids", "documents", "spans")):
        columns[name] = pyarrow.ListArray.from_arrays(starts, np.concatenate([row.values[i] for row in rows]))
    return pyarrow.table({**columns, "row": [row.number for row in rows]})


def _in_order(rows: Dataset) -> Dataset:
    """By number: rows with images are finished before those that still have room."""
    numbers = rows.with_format("numpy")["row"][:]
    return rows if (numbers == np.arange(len(rows))).all() else rows.sort("row").flatten_indices()
