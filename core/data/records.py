"""The records of a source, one by one: local JSON line by line, so that no schema is guessed over them, and the rest by `datasets`."""

import glob
import gzip
import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ..errors import ForedraftError
from .skipped import Unusable

Named = tuple[str, Any]
"""Where a record stands, and the record: what was read, or an `Unusable` that says why nothing was."""

_JSON = (".jsonl", ".json", ".gz")


def read_records(source: str | Path, split: str = "train", few: bool = False) -> Iterator[Named]:
    """The records of a file, a glob, a folder, or a `datasets` hub id, from which they are streamed where only a `few` are wanted.

    `split` may be sliced and added up, as in `train[:100]+test`. A file, or a glob, is one split, by whatever name it is asked for;
    the files of a folder belong to splits as `datasets` tells them. Raises `ForedraftError` if the source cannot be read.
    """
    try:
        yield from _read(str(source), split, few and "[" not in split)
    except ForedraftError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        raise ForedraftError(f"data '{source}' could not be read: {type(cause).__name__}: {str(cause)[:500]}") from error


def folder_of(source: str | Path) -> Path | None:
    """Where images that a source names by relative paths may lie: in its folder; None of a source that is not local."""
    path = Path(source).expanduser()
    return path if path.is_dir() else path.parent if path.exists() or glob.has_magic(str(source)) else None


def is_turns(value: Any) -> bool:
    """Whether a list is a conversation, not a list of records."""
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value)


def _read(source: str, split: str, few: bool) -> Iterator[Named]:
    import datasets

    datasets.disable_progress_bars()
    files = _local(source)
    if files is None:
        yield from rows_of(source, datasets.load_dataset(source, split=split, **({"streaming": True} if few else {})))
        return
    names = [part.partition("[")[0].strip() for part in split.split("+")]
    splits = dict.fromkeys(names, files) if isinstance(files, list) else files
    if not splits.keys() >= {*names}:
        raise ForedraftError(f"data '{source}' has no split '{split}'; it has: {', '.join(sorted(splits))}")
    if split in splits:
        yield from chain.from_iterable(map(_read_file, splits[split]))
        return
    counts = {name: sum(1 for _ in chain.from_iterable(map(_read_file, splits[name]))) for name in names}
    for part in datasets.ReadInstruction.from_spec(split).to_absolute(counts):
        yield from islice(chain.from_iterable(map(_read_file, splits[part.splitname])), part.from_, part.to)


def _local(source: str) -> list[Path] | dict[str, list[Path]] | None:
    """The file(s) of a local source, by split where they form a folder; None if it is none."""
    path = Path(source).expanduser()
    if path.is_dir():
        import datasets

        found = datasets.load_dataset_builder(str(path)).config.data_files
        return {str(split): [Path(file) for file in files] for split, files in found.items()}
    if path.exists():
        return [path]
    if glob.has_magic(source):
        if files := [file for file in map(Path, sorted(glob.glob(str(path), recursive=True))) if file.is_file()]:
            return files
        raise ForedraftError(f"data '{source}': no file matches")
    if path.suffix in (*_JSON, ".parquet") or source.startswith(("/", "./", "../", "~")):
        raise ForedraftError(f"data '{source}': no such file")
    return None


def _read_file(path: Path) -> Iterator[Named]:
    if not path.is_file():
        raise ForedraftError(f"data '{path}' is no regular file")
    if path.suffix in _JSON:
        yield from _read_json(path)
    elif path.suffix == ".parquet":
        import datasets

        yield from rows_of(str(path), datasets.load_dataset("parquet", data_files=str(path), split="train"))
    else:
        raise ForedraftError(
            f"data '{path}': unknown file type '{path.suffix}'; known: {', '.join((*_JSON, '.parquet'))}\n"
            "  Plain text and tables hold no turns: write a line of JSON per conversation, such as\n"
            '  {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
        )


def _read_json(path: Path) -> Iterator[Named]:
    """A line is a record; a file that is one JSON document holds a list of them, or one."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        lines = ((f"{path}, line {number}", line) for number, line in enumerate(file, 1) if line.strip())
        first = next(lines, None)
        if first is None:
            return
        parsed = _parse(first[1])
        if isinstance(parsed, Unusable) or (isinstance(parsed, list) and not is_turns(parsed)):
            file.seek(0)
            document = _parse(file.read())
            if not isinstance(document, Unusable):
                records = document if isinstance(document, list) and not is_turns(document) else [document]
                yield from ((f"{path}, record {i}", record) for i, record in enumerate(records))
                return
            if path.name.removesuffix(".gz").endswith(".json") and first[1].lstrip(b"\xef\xbb\xbf \t")[:1] == b"[":
                raise ForedraftError(f"data '{path}' is one JSON document, and broken: {document}")
            file.seek(0)
            lines = ((f"{path}, line {number}", line) for number, line in enumerate(file, 1) if line.strip())
        else:
            yield first[0], parsed
        yield from ((where, _parse(line)) for where, line in lines)


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Unusable("no UTF-8 text", str(error))
    except RecursionError:
        return Unusable("no JSON", "nested too deeply")
    except ValueError as error:
        return Unusable("no JSON", str(error))


def rows_of(source: str, rows: Iterable[Any]) -> Iterator[Named]:
    """The rows of a `datasets.Dataset`. Arrow gives every object the keys of all the others: those without a value go.

    Images stay as they are kept, to be decoded where they are used.
    """
    rows = _undecoded(rows)
    yield from ((f"{source}, record {i}", _without_nulls(row)) for i, row in enumerate(rows))


def _undecoded(rows: Any) -> Any:
    """A `datasets.Dataset` whose columns of images give `{"bytes", "path"}`."""
    import datasets

    for name, kind in dict(getattr(rows, "features", None) or {}).items():
        if isinstance(kind, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
        elif isinstance(inner := getattr(kind, "feature", None), datasets.Image):
            rows = rows.cast_column(name, type(kind)(type(inner)(decode=False)))
    return rows


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
