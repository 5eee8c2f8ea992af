"""Which tokens a peer's draft vocabulary holds."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import ForedraftError


def read_ids(maps: Mapping[str, Tensor], size: int, vocab: int) -> tuple[Tensor, str | None]:
    """[W] the target id of each of `size` draft ids, and a note if that was read in a sense of its own.

    `maps` may hold `d2t` [W], offsets or ids, whichever fits the other, and `t2d` [V], bool; t2d alone will do. Raises `ForedraftError`
    where they contradict each other, or are not there for a reduced vocabulary.
    """
    named_W = maps["t2d"].nonzero()[:, 0] if "t2d" in maps else None
    if "d2t" not in maps:
        if size == vocab:
            return torch.arange(vocab), None
        if named_W is None or len(named_W) != size:
            raise ForedraftError(f"a draft vocabulary of {size} among {vocab} tokens, but neither d2t nor a t2d says which they are")
        return named_W, "the file has no d2t: taken from t2d"
    offsets_W = torch.arange(size) + maps["d2t"]
    for ids_W, note in ((offsets_W, None), (maps["d2t"], "d2t held target ids, not offsets: turned into offsets")):
        rising = bool((ids_W[1:] > ids_W[:-1]).all()) and int(ids_W[0]) >= 0 and int(ids_W[-1]) < vocab
        if rising and (named_W is None or torch.equal(ids_W, named_W)):
            return ids_W, note
    rest = "" if named_W is None else f", nor with the {len(named_W)} tokens of t2d"
    raise ForedraftError(f"d2t fits neither as offsets nor as ids with {size} ascending ids below {vocab}{rest}")
