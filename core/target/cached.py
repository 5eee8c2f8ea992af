"""A target that remembers: each row's hidden states are computed once and read from disk afterwards."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..contracts.draft import Batch
from ..contracts.signal import Signal
from ..errors import ForedraftError
from .pairing import describe_target
from .target import Target
from .weights import is_sharded, own_tensors, parts_of

NAMES = {"aux": "aux", "final": "hidden"}
"""The tensors of a file by what is needed: aux states [S, A], hidden states [S, T]."""


class CachedTarget(Target):
    """A `Target` whose `capture` keeps one safetensors file per row under `directory`: S × (A + T) values in its dtype, or what is needed.

    Files are named by target (its config and a sample of its weights), aux layers, dtype and the row's documents, so that a changed row or
    target never meets a stale file; what is supervised may change.
    """

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...], directory: str | Path, needs: Sequence[str] = ("aux", "final")):
        super().__init__(model, aux_layers, needs)
        if is_sharded(model):
            raise ForedraftError(
                "hidden_states_cache: ranks that share a target run it together, and would find different rows missing: leave it out"
            )
        self._names = [name for need, name in NAMES.items() if need in needs]
        width = model.config.get_text_config().hidden_size
        widths = {"aux": len(self.aux_layers) * width, "hidden": width}
        salt = f"{describe_target(model.config)}{self.aux_layers}{self._names}{model.dtype}".encode() + _sample(model)
        self.shelf = Shelf(Path(directory), salt, {name: widths[name] for name in self._names})
        self.shelf.directory.mkdir(parents=True, exist_ok=True)

    @torch.no_grad()
    def capture(self, batch: Batch) -> Signal:
        """As `Target.capture`; where a collator has read the states already (`DraftCollator.read_states`), they are taken as they are."""
        states = batch.get("states") or self._read_or_computed(batch)
        none = torch.empty(*batch["input_ids"].shape, 0, device=batch["input_ids"].device)
        return Signal(states.get("aux", none), states.get("hidden", none), self.head)

    def _read_or_computed(self, batch: Batch) -> dict[str, Tensor]:
        rows, files = self.shelf.rows(batch), self.shelf.files(batch)
        if missing := [b for b, row in enumerate(rows) if row is None]:
            for b, row in zip(missing, self._compute(batch, missing), strict=True):
                rows[b] = row
                _write(files[b], row)
        device = batch["input_ids"].device
        return {name: torch.stack([row[name] for row in rows if row]).to(device) for name in self._names}

    def _compute(self, batch: Batch, rows: list[int]) -> list[dict[str, Tensor]]:
        """Run the target over some rows."""
        signal = super().capture({name: batch[name][rows] for name in ("input_ids", "positions")})
        found = {"aux": signal.aux_BSA, "hidden": signal.hidden_BST}
        return [{name: found[name][b].contiguous().cpu() for name in self._names} for b in range(len(rows))]


@dataclass(frozen=True)
class Shelf:
    """The files of a `CachedTarget`, without the target: what workers that make batches can read."""

    directory: Path
    salt: bytes
    """Goes into every file's name, with the row."""
    widths: Mapping[str, int]
    """Of each tensor in a file."""

    def whole(self, batch: Batch) -> dict[str, Tensor] | None:
        """The states of a batch by name, [B, S, width]; None unless all its rows are there."""
        rows = self.rows(batch)
        if any(row is None for row in rows):
            return None
        return {name: torch.stack([row[name] for row in rows if row]) for name in self.widths}

    def files(self, batch: Batch) -> list[Path]:
        """Where each row of a batch is kept."""
        kept = [batch[name].cpu().numpy() for name in ("input_ids", "documents")]
        digests = [hashlib.sha1(b"".join([self.salt, *(x.tobytes() for x in row)])).hexdigest() for row in zip(*kept, strict=True)]
        return [self.directory / f"{digest}.safetensors" for digest in digests]

    def rows(self, batch: Batch) -> list[dict[str, Tensor] | None]:
        """Each row, or None if it is not there, damaged, or not what a row of so many tokens holds."""
        return [self._row(file, batch["input_ids"].shape[1]) for file in self.files(batch)]

    def _row(self, file: Path, length: int) -> dict[str, Tensor] | None:
        try:
            row = load_file(file)
        except (OSError, SafetensorError):
            return None
        shapes = {name: (length, width) for name, width in self.widths.items()}
        return row if {name: tuple(t.shape) for name, t in row.items()} == shapes else None


def _write(file: Path, row: dict[str, Tensor]) -> None:
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        save_file(row, temporary)
        os.replace(temporary, file)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise ForedraftError(
            f"could not keep hidden states in '{file.parent}' (disk full?): {error}\n  Make room, or train without hidden_states_cache"
        ) from error


def _sample(model: PreTrainedModel) -> bytes:
    """Some 64 values of every parameter: a target trained further is another target, whatever its name."""
    tensors = (tensor for module in model.modules() for name, tensor in own_tensors(module).items() if name in module._parameters)
    return b"".join(part.flatten()[:: max(1, part.numel() // 64)].float().cpu().numpy().tobytes() for t in tensors for part in parts_of(t))
