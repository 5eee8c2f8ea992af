"""What a training is given, packed rows of tokens that the target knows, and whether it can teach a draft anything by them."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import pyarrow.compute
import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers.utils import logging

from ..contracts.algorithm import AlgorithmBase
from ..data import DraftCollator
from ..draft.model import BaseDraft
from ..draft.start import note_coverage
from ..draft.vocabulary import check_ids, choose_vocabulary, count_tokens, coverage
from ..errors import ForedraftError
from ..target.target import Target

logger = logging.get_logger("foredraft")

ALIKE = 0.2
"""Mean cosine of two embeddings' rows: near 0 where they are strangers, near 1 where one was trained from the other."""
ENOUGH, GOOD = 0.5, 0.9
"""What a vocabulary covers of what one of its size can: it is refused below the one share, warned about below the other."""


def check_ready(draft: BaseDraft, target: Target, rows: Any) -> None:
    """Look whether a training on packed `rows` can teach the draft anything; note which share of their tokens its vocabulary covers.

    A stream of rows (no length) is not looked at. Raises `ForedraftError` that lists all reasons why not; warns where the vocabulary
    misses much.
    """
    problems = _unlike(draft, target)
    if isinstance(rows, Sized):
        problems += [*_untrained(draft, rows), *_unnamed(draft, rows)]
    if problems:
        raise ForedraftError("this training would teach the draft nothing:\n  " + "\n  ".join(problems))


def _unlike(draft: BaseDraft, target: Target) -> list[str]:
    """A frozen embedding must be the target's, or trained from it, unless the draft begins as another model."""
    ours_VD, theirs_VT = draft.embed_tokens.weight, target.embedding_weight
    if type(draft.algorithm).start is not AlgorithmBase.start:
        return []
    if ours_VD.requires_grad or not len(draft.layers) or ours_VD.shape != theirs_VT.shape:
        return []
    some = torch.arange(0, len(ours_VD), max(1, len(ours_VD) // 512))
    ours, theirs = (w.detach()[some.to(w.device)].float().cpu() for w in (ours_VD, theirs_VT))
    alike = float(F.cosine_similarity(ours, theirs, dim=-1).mean())
    if alike >= ALIKE:
        return []
    return [
        f"its token embedding is frozen, and not this target's (mean cosine of their rows {alike:.2f}): a fresh draft starts by "
        "draft.start_from(target, rows), another one trains with the target that it was made for"
    ]


def _untrained(draft: BaseDraft, rows: Any) -> list[str]:
    """Some row must have a slot that the algorithm trains."""
    algorithm: Any = draft.algorithm
    collate = DraftCollator(algorithm)
    if any(int(collate([row])["counts"].sum()) for row in rows):
        return []
    return [
        f"none of the {len(rows)} rows has a token that algorithm '{algorithm.name}' trains: `foredraft preview` shows what is supervised"
    ]


def _unnamed(draft: BaseDraft, rows: Any) -> list[str]:
    """A reduced vocabulary must name about as much of the supervised text as one of its size can."""
    if not draft.config.has_reduced_vocabulary:
        return []
    counts_V = count_tokens(rows, draft.config.vocab_size)
    noted = note_coverage(draft, counts_V)
    share = draft.config.foredraft["vocabulary_coverage"]
    best = coverage(counts_V, choose_vocabulary(counts_V, draft.config.draft_vocab_size))
    advice = f"{noted}, the most frequent ones would cover {best:.1%}: draft.start_from(target, rows) chooses them"
    if share < ENOUGH * best:
        return [advice]
    if share < GOOD * best:
        logger.warning(advice)
    return []


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
