"""A target that remembers: each row's hidden states are computed once and read from disk afterwards."""

import hashlib
import os
from pathlib import Path
from typing import Any

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

NAMES = ("aux", "hidden", "top", "logsumexp")
"""The tensors of a file: aux states [S, A], hidden states [S, T], and the teacher's top token and normaliser [S]."""


class CachedTarget(Target):
    """A `Target` whose `capture` keeps one safetensors file per row under `directory`: S × (A + T) values in the target's dtype.

    Files are named by target (its config and a sample of its weights), aux layers, dtype and the row's documents, so that a changed row or
    target never meets a stale file; what is supervised may change, since the teacher is kept at every position.
    """

    def __init__(self, model: PreTrainedModel, aux_layers: tuple[int, ...], directory: str | Path):
        super().__init__(model, aux_layers)
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._salt = f"{describe_target(model.config)}{self.aux_layers}{model.dtype}".encode() + _sample(model)

    @torch.no_grad()
    def capture(self, batch: Batch) -> Signal:
        """As `Target.capture`."""
        files = [self._file(batch, b) for b in range(len(batch["input_ids"]))]
        rows = [self._read(file, batch["input_ids"].shape[1]) for file in files]
        if missing := [b for b, row in enumerate(rows) if row is None]:
            for b, row in zip(missing, self._compute(batch, missing), strict=True):
                rows[b] = row
                _write(files[b], row)
        device = batch["input_ids"].device
        stacked = {name: torch.stack([row[name] for row in rows if row]).to(device) for name in NAMES}
        at_R = batch["teacher_rows"]
        return Signal(stacked["aux"], stacked["hidden"], stacked["top"].flatten()[at_R], stacked["logsumexp"].flatten()[at_R], self.head)

    def _compute(self, batch: Batch, rows: list[int]) -> list[dict[str, Tensor]]:
        """Run the target over some rows, with the teacher at every position: any may be asked for, by another plan or in another epoch."""
        part: dict[str, Any] = {name: batch[name][rows] for name in ("input_ids", "positions")}
        part["teacher_rows"] = torch.arange(part["input_ids"].numel(), device=part["input_ids"].device)
        signal = super().capture(part)
        top_BS, logsumexp_BS = (t.view_as(part["input_ids"]) for t in (signal.top_R, signal.logsumexp_R))
        return [
            {name: t.contiguous().cpu() for name, t in zip(NAMES, row, strict=True)}
            for row in zip(signal.aux_BSA, signal.hidden_BST, top_BS, logsumexp_BS, strict=True)
        ]

    def _file(self, batch: Batch, row: int) -> Path:
        digest = hashlib.sha1(self._salt)
        for name in ("input_ids", "documents"):
            digest.update(batch[name][row].cpu().numpy().tobytes())
        return self.directory / f"{digest.hexdigest()}.safetensors"

    def _read(self, file: Path, length: int) -> dict[str, Tensor] | None:
        """The row, or None if it is not there, damaged, or not what a row of so many tokens holds."""
        try:
            row = load_file(file)
        except (OSError, SafetensorError):
            return None
        width = self.model.config.get_text_config().hidden_size
        shapes = ((length, len(self.aux_layers) * width), (length, width), (length,), (length,))
        return row if {name: tuple(t.shape) for name, t in row.items()} == dict(zip(NAMES, shapes, strict=True)) else None


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
    return b"".join(p.detach().flatten()[:: max(1, p.numel() // 64)].float().cpu().numpy().tobytes() for p in model.parameters())
