"""States that are captured beside a training, which reads them in a known order and removes what it has read: few are ever on disk."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler

from ..data.collate import seed_of
from ..files.writing import write_text
from .shards import SUFFIX, Writer
from .store import FULL, PAUSE, Row, Source, Store, check_finite, parts_of_row

READING = "reading.json"
"""Up to where training has come: `place`, and `finished`."""


class Shuffled(Sampler[int]):
    """Rows in an order that follows from seed and epoch alone, so that whoever captures knows it, too."""

    def __init__(self, count: int, seed: int):
        self.count, self.seed, self.epoch = count, seed, 0

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        """Of which epoch the next order is."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(order(self.count, self.seed, self.epoch))


@lru_cache(maxsize=2)
def order(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The rows of an epoch in the order in which they are read."""
    return tuple(torch.randperm(count, generator=torch.Generator().manual_seed(seed_of(seed, epoch))).tolist())


def place_of(step: int, count: int, per_step: int) -> int:
    """How many rows have been read after so many steps, all epochs counted; the last step of an epoch may have fewer."""
    epochs, rest = divmod(step, -(-count // per_step))
    return epochs * count + rest * per_step


def read_up_to(directory: Path, place: int, finished: bool = False) -> None:
    """Say that training has read so many rows, and remove the shards that hold only those."""
    write_text(directory / READING, json.dumps({"place": place, "finished": finished}))
    for _, last, file in _shards(directory):
        if last < place or finished:
            file.unlink(missing_ok=True)


def stream(store: Store, rows: Any, seed: int, room: int, source: Source, batch_size: int = 8) -> int:
    """Capture rows in the order of a training with this `seed`, never more than `room` bytes, until it says that it is finished.

    Either side may be killed and begin again: what training needs next is captured first, be it behind what is there, whose farthest
    shards give way. Returns how many rows were captured. Raises what `Store.fill` raises.
    """
    count, captured = len(rows), 0
    with store.alone():
        store.note("streamed", count)
        while True:
            place, finished = _reading(store.directory)
            there = _shards(store.directory)
            if finished:
                for _, _, file in there:
                    file.unlink(missing_ok=True)
                return captured
            begin = place
            for first, last, _ in there:
                begin = last + 1 if first <= begin <= last else begin
            limit = next((first for first, _, _ in there if first > begin), None)
            used = sum(file.stat().st_size for _, _, file in there)
            if used + room // 4 > room:
                if begin == place:
                    there[-1][2].unlink(missing_ok=True)
                else:
                    (store.directory / FULL).touch()
                    time.sleep(PAUSE)
                continue
            (store.directory / FULL).unlink(missing_ok=True)
            captured += _capture(store, rows, seed, begin, limit, room // 4, source, batch_size) - begin


def _capture(store: Store, rows: Any, seed: int, begin: int, limit: int | None, most: int, source: Source, batch_size: int) -> int:
    """One shard, from row `begin` on; returns the row that it ends before."""
    writer = Writer(store.directory, store.form, store.shards.of, 2 * most)
    count, place, size, written = len(rows), begin, 0, set[bytes]()
    while size < most and (limit is None or place < limit):
        some = list[Row]()
        while len(some) < batch_size and (limit is None or place < limit) and size < most:
            row = rows[order(count, seed, place // count)[place % count]]
            size += sum(store.form.size(part.lengths) for part in parts_of_row(row))
            some.append(row)
            place += 1
        new = {part.key: part for i, row in enumerate(some) for part in parts_of_row(row, i) if part.key not in written}
        for part, states in source(some, list(new.values())) if new else ():
            check_finite(states, some[part.row], part)
            writer.add(part.key, states)
            written.add(part.key)
    writer.flush(f"{begin:012d}-{place - 1:012d}")
    return place


def _reading(directory: Path) -> tuple[int, bool]:
    with suppress(OSError, ValueError, KeyError):
        noted = json.loads((directory / READING).read_text())
        return int(noted["place"]), bool(noted["finished"])
    return 0, False


def _shards(directory: Path) -> list[tuple[int, int, Path]]:
    """First and last row of each shard, in order."""
    found = (file for file in directory.glob(f"*{SUFFIX}") if file.stem.replace("-", "").isdigit())
    return sorted((*map(int, file.stem.split("-")), file) for file in found)  # type: ignore[misc]
