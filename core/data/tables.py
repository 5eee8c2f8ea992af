"""Arrow tables of any length: small ones in memory, larger ones in files of the cache, which are mapped and read from there."""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from uuid import uuid4

import pyarrow
from datasets import Dataset, Features, config
from datasets.arrow_writer import ArrowWriter
from datasets.table import InMemoryTable, MemoryMappedTable

from ..errors import ForedraftError

IN_MEMORY = 2**26
"""Bytes up to which a table is kept in memory."""
ABANDONED = 3600
"""Seconds after which a file that nobody writes to is removed."""


def table_of(batches: Iterable[pyarrow.Table], features: Features, fingerprint: str | None = None) -> Dataset:
    """A data set of these batches, all of `features`, told by `fingerprint`, else by its content.

    Raises `ForedraftError` where the cache (`HF_DATASETS_CACHE`) takes no more.
    """
    digest, kept, size = hashlib.sha256(repr(features).encode()), list[pyarrow.Table](), 0
    rest = iter(batches)
    for batch in rest:
        kept.append(batch)
        size += batch.nbytes
        _note(digest, batch)
        if size > IN_MEMORY:
            return _on_disk(chain(kept, _noted(rest, digest)), features, fingerprint, digest)
    whole = pyarrow.concat_tables(kept) if kept else features.arrow_schema.empty_table()
    return Dataset(InMemoryTable(whole.cast(features.arrow_schema)), fingerprint=fingerprint or digest.hexdigest()[:16])


def cached(fingerprint: str) -> Dataset | None:
    """The data set that `table_of` wrote under this fingerprint to the cache, if it did."""
    file = _file(fingerprint)
    return _mapped(file) if file.exists() else None


def place(name: str) -> str:
    """A file of the cache."""
    directory = Path(config.HF_DATASETS_CACHE) / "foredraft"
    directory.mkdir(parents=True, exist_ok=True)
    return str(directory / name)


def _on_disk(batches: Iterator[pyarrow.Table], features: Features, fingerprint: str | None, digest: "hashlib._Hash") -> Dataset:
    temporary = Path(place(f"{uuid4().hex}.part"))
    for left in temporary.parent.glob("*.part"):  # of killed writers
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED:
                left.unlink()
    try:
        with ArrowWriter(path=str(temporary), features=features) as writer:
            for batch in batches:
                writer.write_table(batch)
            writer.finalize()
        file = _file(fingerprint or digest.hexdigest()[:16])
        os.replace(temporary, file)
    except OSError as error:
        raise ForedraftError(
            f"could not write '{temporary.parent}' (disk full?): {error}\n  make room, or name another place by HF_DATASETS_CACHE"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return _mapped(file)


def _mapped(file: Path) -> Dataset:
    return Dataset(MemoryMappedTable.from_file(str(file)), fingerprint=file.stem)


def _file(fingerprint: str) -> Path:
    return Path(place(f"{fingerprint}.arrow"))


def _noted(batches: Iterator[pyarrow.Table], digest: "hashlib._Hash") -> Iterator[pyarrow.Table]:
    for batch in batches:
        _note(digest, batch)
        yield batch


def _note(digest: "hashlib._Hash", batch: pyarrow.Table) -> None:
    for column in batch.columns:
        for chunk in column.chunks:
            for buffer in chunk.buffers():
                digest.update(buffer or b"")
