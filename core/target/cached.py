"""A target that remembers: each row's hidden states are computed once and read from disk afterwards."""

import hashlib
import os
from collections.abc import Sequence
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
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._salt = f"{describe_target(model.config)}{self.aux_layers}{self._names}{model.dtype}".encode() + _sample(model)

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
        none = torch.empty(*batch["input_ids"].shape, 0, device=device)
        stacked = {name: torch.stack([row[name] for row in rows if row]).to(device) for name in self._names}
        return Signal(stacked.get("aux", none), stacked.get("hidden", none), self.head)

    def _compute(self, batch: Batch, rows: list[int]) -> list[dict[str, Tensor]]:
        """Run the target over some rows."""
        signal = super().capture({name: batch[name][rows] for name in ("input_ids", "positions")})
        found = {"aux": signal.aux_BSA, "hidden": signal.hidden_BST}
        return [{name: found[name][b].contiguous().cpu() for name in self._names} for b in range(len(rows))]

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
        widths = {"aux": len(self.aux_layers) * width, "hidden": width}
        shapes = {name: (length, widths[name]) for name in self._names}
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
