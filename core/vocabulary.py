"""The draft vocabulary: the tokens a draft may propose, chosen by how often the supervised text uses them."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .errors import ForedraftError


def count_tokens(rows: Iterable[dict[str, Any]], vocab_size: int) -> Tensor:
    """How often each token id is supervised in packed rows (`input_ids`, `spans`); int64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for ids, spans in _columns(rows, "input_ids", "spans"):
        counts += torch.bincount(ids[spans >= 0], minlength=vocab_size)
    return counts


def coverage(counts_V: Tensor, ids_W: Tensor) -> float:
    """Which share of the counted tokens the ids are; 1 if none was counted."""
    return float(counts_V[ids_W.cpu()].sum() / counts_V.sum()) if int(counts_V.sum()) else 1.0


def choose_vocabulary(counts_V: Tensor, size: int) -> Tensor:
    """The `size` most frequent ids, ties and the unused ones by lower id; ascending, [W].

    Raises `ForedraftError` if `size` exceeds the target's vocabulary.
    """
    if not 1 <= size <= len(counts_V):
        raise ForedraftError(
            f"draft_vocab_size={size} does not fit the target's vocabulary of {len(counts_V)}: choose 1 to {len(counts_V)}"
        )
    return torch.sort(torch.argsort(counts_V, descending=True, stable=True)[:size]).values


def choose_mask_token(rows: Iterable[dict[str, Any]], embedding_VT: Tensor, asked: int | None = None) -> int:
    """A token that the rows never use: `asked`, or the highest such id with an embedding to speak of (padded ones may be zero).

    Raises `ForedraftError` if they use `asked`, or every token there is.
    """
    vocab_size = len(embedding_VT)
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for ids, documents in _columns(rows, "input_ids", "documents"):  # where documents are padded, id 0 stands for nothing
        counts += torch.bincount(ids[documents >= 0], minlength=vocab_size)
    unused = (counts == 0).nonzero()[:, 0]
    if asked is not None and int(counts[asked]):
        raise ForedraftError(
            f"mask_token_id={asked} occurs {int(counts[asked])} times in the training data: leave it out to have one chosen"
        )
    if not len(unused):
        raise ForedraftError(
            f"the training data uses all {vocab_size} tokens of the target: none is left to stand for the unknown (mask_token_id)"
        )
    size = embedding_VT[unused].float().norm(dim=-1).cpu()
    spoken = unused[size > 0.1 * size.max()]
    return asked if asked is not None else int((spoken if len(spoken) else unused)[-1])


def _columns(rows: Iterable[dict[str, Any]], *names: str) -> Iterator[tuple[Tensor, ...]]:
    """Columns of packed rows; of a data set, those of many rows at a time, which takes a tenth of the time."""
    parts: Any = rows.with_format("numpy").iter(64) if hasattr(rows, "with_format") else rows
    for part in parts:
        yield tuple(torch.as_tensor(part[name]) for name in names)
