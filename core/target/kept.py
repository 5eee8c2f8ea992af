"""What is kept of a target's states: document by document, those that a training reads."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

Array = np.ndarray[Any, Any]

NAMES = {"aux": "aux", "final": "hidden"}
"""The tensors of states by what is needed: `aux` [n, A] and `hidden` [m, T] of a document, or [B, S, width] of a batch."""


@dataclass(frozen=True)
class Part:
    """What is kept of one document of a packed row.

    Of its aux states those up to the last supervised token, of the final ones those from which a supervised token follows: a target that
    looks back only says the same whatever comes behind.
    """

    row: int
    """In its batch."""
    start: int
    """Where the document begins in the row."""
    ids: Array
    """[n] the tokens whose aux states are kept."""
    taught: Array
    """[m] the places in the document whose final states are kept."""
    key: bytes
    """The same for documents that keep the same."""

    @property
    def lengths(self) -> dict[str, int]:
        """How many states by tensor."""
        return {"aux": len(self.ids), "hidden": len(self.taught)}

    def cut(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its own of a batch's [B, S, width]."""
        found = {}
        for name, states_BSX in states.items():
            places = torch.from_numpy(self.taught) if name == "hidden" else torch.arange(len(self.ids))
            found[name] = states_BSX[self.row, (places + self.start).to(states_BSX.device)].cpu()
        return found

    def put(self, own: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> None:
        """Its own into a batch's."""
        for name, states_nX in own.items():
            if name == "hidden":
                states[name][self.row, torch.from_numpy(self.taught) + self.start] = states_nX
            else:
                states[name][self.row, self.start : self.start + len(self.ids)] = states_nX


def parts_of(documents: Any, spans: Any, input_ids: Any, row: int = 0, pixels: bytes | None = None) -> list[Part]:
    """The parts of one packed row, given as lists or arrays [S]; documents that supervise nothing have none."""
    documents, spans, ids = (np.asarray(values) for values in (documents, spans, input_ids))
    borders = [0, *(np.flatnonzero(documents[1:] != documents[:-1]) + 1).tolist(), len(documents)]
    found = []
    for start, end in pairwise(borders):
        taught = np.flatnonzero(spans[start + 1 : end] >= 0)
        if documents[start] < 0 or not len(taught):
            continue
        own = np.ascontiguousarray(ids[start : start + taught[-1] + 1], dtype=np.int64)
        key = hashlib.blake2b(own.tobytes() + taught.astype(np.int64).tobytes() + (pixels or b""), digest_size=16).digest()
        found.append(Part(row, start, own, taught, key))
    return found


def parts_of_batch(batch: Mapping[str, Any]) -> list[Part]:
    """The parts of every row of a batch."""
    columns = (batch[name].cpu().numpy() for name in ("documents", "spans", "input_ids"))
    pixels = batch.get("pixels") or [None] * len(batch["input_ids"])
    seen = [save({name: t.cpu() for name, t in found.items()}) if found else None for found in pixels]  # as packing wrote it
    return [part for row, (d, s, ids) in enumerate(zip(*columns, strict=True)) for part in parts_of(d, s, ids, row, seen[row])]
