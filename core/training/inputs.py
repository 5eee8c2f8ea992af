"""What a training is given: packed rows of tokens that the target knows."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.compute
import torch
from datasets import Dataset

from ..draft.vocabulary import check_ids
from ..errors import ForedraftError

COLUMNS = ("input_ids", "documents", "spans", "row")


def check_rows(rows: Any, vocab_size: int, what: str) -> None:
    """Raises `ForedraftError` unless `rows`, if they can be looked at, are packed rows with ids below `vocab_size`."""
    if isinstance(rows, Mapping):  # several sets to evaluate on, by name
        for name, part in rows.items():
            check_rows(part, vocab_size, f"{what} '{name}'")
        return
    if not isinstance(rows, Sequence | Dataset):
        return
    if not len(rows):
        raise ForedraftError(f"{what} is empty")
    first = rows[0]
    if not isinstance(first, Mapping) or not set(COLUMNS) <= set(first):
        found = f"the fields {', '.join(map(str, first))}" if isinstance(first, Mapping) else f"{type(first).__name__}: {first!r:.60}"
        raise ForedraftError(
            f"{what}: expected packed rows ({', '.join(COLUMNS)}), found {found}\n"
            "  pack(conversations, tokenizer, length) makes rows of conversations"
        )
    check_ids(_highest_id(rows), vocab_size, what)


def as_arrays(rows: Any) -> Any:
    """The same rows; of data sets their columns of numbers are read as arrays, out of the file that they lie in."""
    if isinstance(rows, Mapping):
        return {name: as_arrays(part) for name, part in rows.items()}
    return rows.with_format("numpy", columns=[*COLUMNS], output_all_columns=True) if isinstance(rows, Dataset) else rows


def _highest_id(rows: Any) -> int:
    if isinstance(rows, Dataset):
        return int(pyarrow.compute.max(pyarrow.compute.list_flatten(rows.data.column("input_ids"))).as_py())
    return max(int(torch.as_tensor(row["input_ids"]).max()) for row in rows)
