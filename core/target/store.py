"""A directory of stored states: of which target, which data, and whether they are all there."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from transformers.utils import logging

from ..errors import ForedraftError, few
from ..files.writing import write_text
from ..progress import Progress
from .fingerprint import Fingerprint, differences
from .kept import Part, parts_of, parts_of_batch
from .shards import PART, Form, Shards, Writer

logger = logging.get_logger("foredraft")

INDEX, LOCK, FULL = "states.json", ".writing.lock", ".full"
SHARD = 2**28
"""Bytes of a shard, about."""

PAUSE, PATIENCE = 0.2, 60.0
"""Seconds between two looks at what the other side of a stream has done, and until it is missed."""

Row = Mapping[str, Any]
Source = Callable[[Sequence[Row], Sequence[Part]], Iterator[tuple[Part, Mapping[str, Tensor]]]]
"""Says the states of some parts of a few packed rows (`Part.row` counts within these)."""


@dataclass(frozen=True)
class Wanted:
    """What a training on some rows reads, and what of it is not stored yet."""

    data: str
    """A digest of all documents."""
    documents: int
    tokens: int
    size: int
    """Bytes of all of them."""
    rows: list[tuple[int, int]]
    """The rows that lack something: which data set, which row of it."""
    missing: int
    """Documents that are not stored."""
    to_write: int
    """Their bytes."""

    def __str__(self) -> str:
        """As it is told before a capture."""
        each = self.size / max(1, self.tokens) / 1024
        return f"{self.documents} documents, {self.tokens} tokens, {each:.1f} KiB a token, {_amount(self.size)} in all"


@dataclass
class Store:
    """States of one target in a directory. Raises `ForedraftError` where another target's are there, with both values."""

    directory: Path
    form: Form
    of: Fingerprint
    streams: bool = False
    """Whether they are captured while they are read, and removed behind."""
    shards: Shards = field(init=False)

    def __post_init__(self) -> None:
        noted = self.noted()
        if noted and (told := differences(noted["of"], {**self.of, "kept": str(self.form.kept).removeprefix("torch.")})):
            raise ForedraftError(
                f"the hidden states in '{self.directory}' are another target's, or were kept otherwise:\n  " + "\n  ".join(told) + "\n"
                "  Choose another directory, or remove this one"
            )
        digest = hashlib.sha256(json.dumps({**(noted.get("of") or self._own), "weights": None}, sort_keys=True).encode()).hexdigest()[:16]
        self.shards = Shards(self.directory, self.form, digest)

    @property
    def _own(self) -> Fingerprint:
        return {**self.of, "kept": str(self.form.kept).removeprefix("torch.")}

    def noted(self) -> dict[str, Any]:
        """What the directory's index says; nothing where there is none."""
        file = self.directory / INDEX
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            return {"of": dict(found["of"]), "data": str(found["data"]), "documents": int(found["documents"])}
        except FileNotFoundError:
            if self.directory.is_dir() and (left := sorted(f.name for f in self.directory.glob("*.safetensors"))):
                raise ForedraftError(
                    f"'{self.directory}' holds {few(left, 3)}, and no {INDEX} that says what they are of: choose another directory"
                ) from None
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ForedraftError(
                f"the index '{file}' of stored hidden states is damaged: {error!r}\n"
                "  It says what the states beside it are of: without it they cannot be used; remove the directory, or choose another one"
            ) from error

    def note(self, data: str, documents: int) -> None:
        """Write the index that says what the states here are of."""
        noted = {"of": self.noted().get("of") or self._own, "data": data, "documents": documents}
        write_text(self.directory / INDEX, json.dumps(noted))

    def states(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The states of a batch by tensor, [B, S, width]: aux states that no supervised token follows are 0, final ones NaN.

        Where they are streamed, waits for those that are not there yet. Raises `ForedraftError` unless all are there, or somebody captures.
        """
        parts, shape = parts_of_batch(batch), batch["input_ids"].shape
        fill = {"aux": 0.0, "hidden": float("nan")}
        states = {name: torch.full((*shape, width), fill[name], dtype=self.form.dtype) for name, width in self.form.widths.items()}
        keys = [part.key for part in parts]
        found = self.shards.find(keys)
        if self.streams or (found < 0).any():  # of a stream shards come and go
            self.shards.refresh()
            found = self.shards.find(keys)
        waited = 0.0
        while self.streams and (found < 0).any():
            filled, full = self.is_filled(), (self.directory / FULL).exists()
            if waited > PATIENCE:
                raise ForedraftError(
                    f"'{self.directory}' is full before all that training reads at once is there: raise hidden_states_room"
                    if filled
                    else f"nobody captures into '{self.directory}', where training waits for states: start `foredraft capture`"
                )
            time.sleep(PAUSE)
            waited = waited + PAUSE if full or not filled else 0.0
            self.shards.refresh()
            found = self.shards.find(keys)
        for part, (shard, place) in zip(parts, found.tolist(), strict=True):
            if shard < 0:
                raise ForedraftError(f"'{self.directory}' lacks a document of rows {batch['row'].tolist()}: `foredraft capture`")
            part.put(self.shards.read(shard, place), states)
        return states

    def wanted(self, datasets: Sequence[Any]) -> Wanted:
        """What the rows of some data sets read."""
        self.shards.refresh()
        seen: dict[bytes, bool] = {}
        rows, tokens, size, missing, to_write = [], 0, 0, 0, 0
        for which, dataset in enumerate(datasets):
            for number, row in enumerate(_plain(dataset)):
                parts = [p for p in parts_of_row(row) if p.key not in seen]
                there = self.shards.find([p.key for p in parts])[:, 0] >= 0
                for part, stored in zip(parts, there.tolist(), strict=True):
                    seen[part.key] = True
                    bytes_of_part = self.form.size(part.lengths)
                    tokens, size = tokens + len(part.ids), size + bytes_of_part
                    missing, to_write = missing + (not stored), to_write + (0 if stored else bytes_of_part)
                if not there.all():
                    rows.append((which, number))
        digest = hashlib.sha256(b"".join(sorted(seen))).hexdigest()[:16]
        return Wanted(digest, len(seen), tokens, size, rows, missing, to_write)

    def fill(self, datasets: Sequence[Any], source: Source, batch_size: int = 8, show_progress: bool = True) -> Wanted:
        """Have the states of all rows of some data sets stored, those that are missing by `source`.

        Says how much it will be, and goes on where another call was ended. Raises `ForedraftError` for other data than the directory's, too
        little room, states that are not finite, and while somebody else captures into the directory.
        """
        with self.filling(datasets) as wanted:
            before = wanted.documents - wanted.missing
            with Progress("capturing documents", wanted.documents, before, show_progress and wanted.missing > 0) as advance:
                self.take(datasets, wanted.rows, source, batch_size, advance)
        return wanted

    @contextmanager
    def filling(self, datasets: Sequence[Any]) -> Iterator[Wanted]:
        """What is missing of the rows of some data sets, to be stored in the block. Raises what `fill` raises, but for states."""
        with self.alone():
            for text in self.shards.refresh(mend=True):
                logger.warning(f"{text}; its states are computed anew")
            wanted = self.wanted(datasets)
            if wanted.missing:
                self._check(wanted)
                self.note(wanted.data, wanted.documents)
                free = shutil.disk_usage(self.directory).free
                print(f"hidden states: {wanted}; {_amount(wanted.to_write)} to write, {_amount(free)} free", flush=True)
                if wanted.to_write > free:
                    raise ForedraftError(
                        f"'{self.directory}' has room for {_amount(free)}, and the hidden states take {_amount(wanted.to_write)} more: "
                        "make room, keep them in float8 (hidden_states_dtype), or take less data"
                    )
            yield wanted
            self.shards.refresh()

    def take(self, datasets: Sequence[Any], asked: Sequence[tuple[int, int]], source: Source, batch_size: int, advance: Any) -> None:
        """Store what some rows (which data set, which row of it) lack, in shards of their own; `advance` is told of every document."""
        writer = Writer(self.directory, self.form, self.shards.of, SHARD)
        written: set[bytes] = set()
        for start in range(0, len(asked), batch_size):
            rows = [datasets[which][number] for which, number in asked[start : start + batch_size]]
            parts = [p for i, row in enumerate(rows) for p in parts_of_row(row, i)]
            stored = self.shards.find([part.key for part in parts])[:, 0] >= 0
            new = {part.key: part for part, there in zip(parts, stored.tolist(), strict=True) if not there and part.key not in written}
            for part, states in source(rows, list(new.values())):
                check_finite(states, rows[part.row], part)
                writer.add(part.key, states)
                written.add(part.key)
                advance(1)
        writer.flush()

    def _check(self, wanted: Wanted) -> None:
        noted = self.noted()
        if noted and noted["of"]["needs"] != self.of["needs"]:
            kept, read = (" and ".join(needs) for needs in (noted["of"]["needs"], self.of["needs"]))
            raise ForedraftError(
                f"'{self.directory}' keeps {kept} states, this run reads {read} alone, and {wanted.missing} documents are not stored: "
                "`foredraft capture` by a run that reads all of them first, or choose another directory"
            )
        if noted and noted["data"] != wanted.data:
            raise ForedraftError(
                f"the hidden states in '{self.directory}' are of other data: of {noted['documents']} documents ({noted['data']}) there, of "
                f"{wanted.documents} ({wanted.data}) here, of which {wanted.missing} are not stored\n"
                "  Choose another directory, or remove this one"
            )

    def is_filled(self) -> bool:
        """Whether somebody captures into the directory now."""
        try:
            with FileLock(self.directory / LOCK, timeout=0):
                return False
        except (Timeout, OSError):
            return self.directory.is_dir()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While this one captures into the directory. Raises `ForedraftError` if another does."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.directory / LOCK, timeout=0, is_singleton=True)
            with lock:
                for left in self.directory.glob(f"*{PART}"):  # of a killed writer
                    left.unlink()
                yield
        except Timeout:
            raise ForedraftError(f"another process captures into '{self.directory}': wait for it, or choose another directory") from None
        except OSError as error:
            raise ForedraftError(f"hidden_states_cache: '{self.directory}' cannot be written: {error}") from error


def check_finite(states: Mapping[str, Tensor], row: Row, part: Part) -> None:
    """Raises `ForedraftError` that names the place of a state that is not finite."""
    for name, states_nX in states.items():
        if not bool(states_nX.isfinite().all()):
            place = int((~states_nX.isfinite()).any(-1).nonzero()[0])
            raise ForedraftError(
                f"the target's {name} states are not finite at token {place} of the document at {part.start} of row {row.get('row', '?')}: "
                "nothing of it is stored, what was captured before stays\n"
                "  Try target_dtype: bfloat16 or float32, or leave that document out"
            )


def parts_of_row(row: Row, number: int = 0) -> list[Part]:
    """The parts of a packed row, `number` in its batch."""
    return parts_of(row["documents"], row["spans"], row["input_ids"], number, row.get("pixels"))


def _plain(dataset: Any) -> Any:
    """Its rows with columns as arrays, if it can give them."""
    columns = [name for name in ("input_ids", "documents", "spans", "pixels") if name in getattr(dataset, "column_names", ())]
    return dataset.with_format("numpy", columns=columns) if hasattr(dataset, "with_format") else dataset


def _amount(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
