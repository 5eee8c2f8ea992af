"""States on disk: safetensors files, each with an index of its own, so that the files that are there are all there is to know."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ForedraftError
from .kept import Array

SUFFIX, PART, DAMAGED = ".safetensors", ".part", ".damaged"
"""Of a shard, of one that is being written, of one that was set aside."""
FLOAT8 = torch.float8_e4m3fn
BIGGEST = torch.finfo(FLOAT8).max


@dataclass(frozen=True)
class Form:
    """How states are kept."""

    widths: Mapping[str, int]
    """Of each tensor."""
    hidden_size: int
    """Width of one state: a row of aux states has several."""
    dtype: torch.dtype
    """What the target says them in, and they are handed out in."""
    kept: torch.dtype
    """What they are kept in; of float8 each state has a scale of its own, float32."""

    def size(self, lengths: Mapping[str, int]) -> int:
        """Bytes of so many rows by tensor."""
        scaled = 4 / self.hidden_size if self.kept == FLOAT8 else 0
        return round(sum(rows * self.widths[name] * (self.kept.itemsize + scaled) for name, rows in lengths.items() if name in self.widths))

    def packed(self, name: str, states_nX: Tensor) -> dict[str, Tensor]:
        """As it is written."""
        if self.kept != FLOAT8:
            return {name: states_nX.to(self.kept)}
        each = states_nX.float().unflatten(-1, (-1, self.hidden_size))
        scale = each.abs().amax(-1, keepdim=True).clamp(min=1e-30) / BIGGEST
        return {name: (each / scale).to(FLOAT8).flatten(-2), f"{name}_scale": scale[..., 0]}

    def unpacked(self, name: str, read: Mapping[str, Tensor]) -> Tensor:
        """As the target said it, or nearly."""
        if self.kept != FLOAT8:
            return read[name].to(self.dtype)
        each = read[name].float().unflatten(-1, (-1, self.hidden_size))
        return (each * read[f"{name}_scale"][..., None]).flatten(-2).to(self.dtype)


class Writer:
    """Gathers states and writes a shard whenever they reach `most` bytes; whoever is done calls `flush`.

    A shard appears under its name when all of it is on the disk. Raises `ForedraftError` where the disk takes no more: what was written
    before stays.
    """

    def __init__(self, directory: Path, form: Form, of: str, most: int):
        self.directory, self.form, self.of, self.most = directory, form, of, most
        self._token, self._written = uuid4().hex[:8], 0
        self._clear()

    def _clear(self) -> None:
        self._keys: list[bytes] = []
        self._lengths: dict[str, list[int]] = {name: [] for name in self.form.widths}
        self._parts: dict[str, list[Tensor]] = {}
        self._size = 0

    def add(self, key: bytes, states: Mapping[str, Tensor]) -> None:
        """The states of one document."""
        self._keys.append(key)
        for name, states_nX in states.items():
            self._lengths[name].append(len(states_nX))
            for packed, tensor in self.form.packed(name, states_nX).items():
                self._parts.setdefault(packed, []).append(tensor)
                self._size += tensor.nbytes
        if self._size >= self.most:
            self.flush()

    def flush(self, called: str | None = None) -> None:
        """Write what was gathered, as a shard of the name it is `called` by if that is given."""
        if not self._keys:
            return
        tensors = {name: torch.cat(parts) for name, parts in self._parts.items()}
        tensors["keys"] = torch.from_numpy(np.frombuffer(b"".join(self._keys), np.uint8).reshape(-1, 16).copy())
        for name, lengths in self._lengths.items():
            tensors[f"{name}_at"] = torch.tensor([0, *lengths]).cumsum(0)
        file = self.directory / f"{called or f'{self._token}-{self._written:05d}'}{SUFFIX}"
        temporary = file.with_suffix(PART)
        try:
            save_file(tensors, temporary, {"of": self.of})
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(temporary, file)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise ForedraftError(
                f"could not keep hidden states in '{self.directory}' (disk full?): {error}\n"
                "  What was kept before stays: make room and run again, or train without hidden_states_cache"
            ) from error
        self._written += 1
        self._clear()


@dataclass
class Shards:
    """The shards in a directory, looked up by document. Files are mapped into memory and opened in the process that reads them."""

    directory: Path
    form: Form
    of: str
    """What every shard must say that it is of."""
    known: dict[str, tuple[Array, dict[str, Array]]] = field(default_factory=dict)
    """By file: its keys, and where each one's rows begin by tensor."""
    _opened: dict[tuple[int, str], Any] = field(default_factory=dict, repr=False)
    _sorted: tuple[Array, Array] | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """For workers: without files that are open."""
        return {**self.__dict__, "_opened": {}}

    def refresh(self, mend: bool = False) -> list[str]:
        """Look what is there. Returns what is wrong with shards, a line each, which with `mend` are set aside, and else not known."""
        there = sorted(file.name for file in self.directory.glob(f"*{SUFFIX}"))
        self.known = {name: index for name, index in self.known.items() if name in there}
        self._opened = {key: file for key, file in self._opened.items() if key[1] in there}  # what is open takes room, even if removed
        wrong = []
        for name in there:
            if name in self.known:
                continue
            try:
                self.known[name] = self._index(name)
            except FileNotFoundError:  # read to its end, and removed
                continue
            except (OSError, SafetensorError, KeyError, ValueError) as error:
                wrong.append(f"shard '{self.directory / name}' is damaged: {error}")
                if mend:
                    os.replace(self.directory / name, (self.directory / name).with_suffix(DAMAGED))
        self._sorted = None
        return wrong

    def __len__(self) -> int:
        """How many documents."""
        return len(self._table[0])

    def find(self, keys: list[bytes]) -> Array:
        """[n, 2] shard and place in it of each key, -1 where it is not there."""
        found = np.full((len(keys), 2), -1)
        known, places = self._table
        if len(known) and keys:
            asked = np.frombuffer(b"".join(keys), "S16")
            at = np.searchsorted(known, asked).clip(max=len(known) - 1)
            found = np.where((known[at] == asked)[:, None], places[at], -1)
        return found

    def read(self, shard: int, place: int) -> dict[str, Tensor]:
        """The states of a document by tensor. Raises `ForedraftError` where the shard cannot be read any more."""
        name = list(self.known)[shard]
        starts, scales = self.known[name][1], ("", "_scale") if self.form.kept == FLOAT8 else ("",)
        try:
            file = self._open(name)
            own = {}
            for tensor in self.form.widths:
                first, last = (int(starts[tensor][place + i]) for i in (0, 1))
                read = {tensor + scale: file.get_slice(tensor + scale)[first:last] for scale in scales}
                own[tensor] = self.form.unpacked(tensor, read)
        except (OSError, SafetensorError) as error:
            raise ForedraftError(f"shard '{self.directory / name}' cannot be read: {error}; `foredraft capture` mends it") from error
        return own

    @property
    def _table(self) -> tuple[Array, Array]:
        """Keys in order, and [n, 2] where each is; of a document in two shards the first counts."""
        if self._sorted is None:
            keys = [index[0] for index in self.known.values()]
            whole = np.concatenate(keys) if keys else np.empty(0, "S16")
            places = [np.stack([np.full(len(k), i), np.arange(len(k))], 1) for i, k in enumerate(keys)]
            _, first = np.unique(whole, return_index=True)
            self._sorted = whole[first], np.concatenate(places)[first] if places else np.empty((0, 2), np.int64)
        return self._sorted

    def _index(self, name: str) -> tuple[Array, dict[str, Array]]:
        file = self._open(name)
        if (of := (file.metadata() or {}).get("of")) != self.of:
            raise ValueError(f"its states are of {of}, those here of {self.of}")
        keys = np.ascontiguousarray(file.get_tensor("keys").numpy()).view("S16")[:, 0]
        starts = {tensor: file.get_tensor(f"{tensor}_at").numpy() for tensor in self.form.widths}
        for tensor, width in self.form.widths.items():
            shape, last = file.get_slice(tensor).get_shape(), int(starts[tensor][-1])
            if shape != [last, width] or len(starts[tensor]) != len(keys) + 1:
                raise ValueError(f"{tensor} is {shape}, its index says {[last, width]} of {len(keys)} documents")
        return keys, starts

    def _open(self, name: str) -> Any:
        key = os.getpid(), name
        if key not in self._opened:
            self._opened[key] = safe_open(self.directory / name, "pt")
        return self._opened[key]
