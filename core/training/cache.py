"""A target that remembers: each row's hidden states are computed once and read from disk afterwards."""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..config import describe_target
from ..protocols import Batch
from ..target import Signal, Target


class CachedTarget(Target):
    """A `Target` whose `capture` keeps one safetensors file per row under `directory`: S × (A + T) values in the target's dtype.

    Files are named by target (its config and a sample of its weights), aux layers, dtype and row content, so that a changed row or target
    never meets a stale file.
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
        if missing := [b for b, file in enumerate(files) if not file.exists()]:
            self._compute(batch, missing, [files[b] for b in missing])
        device = batch["input_ids"].device
        rows = [load_file(file) for file in files]
        stacked = {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}
        at_R = batch["teacher_rows"]
        return Signal(stacked["aux"], stacked["hidden"], stacked["top"].flatten()[at_R], stacked["logsumexp"].flatten()[at_R], self)

    def _compute(self, batch: Batch, rows: list[int], files: list[Path]) -> None:
        """Run the target over some rows; the teacher's top token and normaliser are taken wherever a span is supervised."""
        part: dict[str, Any] = {name: batch[name][rows] for name in ("input_ids", "positions", "spans")}
        part["teacher_rows"] = (part["spans"] >= 0).flatten().nonzero()[:, 0]
        signal = super().capture(part)
        top = self._spread(part, signal.top_R)
        logsumexp = self._spread(part, signal.logsumexp_R)
        for i, file in enumerate(files):
            tensors = {"aux": signal.aux_BSA[i], "hidden": signal.hidden_BST[i], "top": top[i], "logsumexp": logsumexp[i]}
            temporary = file.with_suffix(f".{os.getpid()}")
            save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, temporary)
            os.replace(temporary, file)

    @staticmethod
    def _spread(part: dict[str, Any], values_R: Tensor) -> Tensor:
        flat = values_R.new_zeros(part["input_ids"].numel())
        flat[part["teacher_rows"]] = values_R
        return flat.view_as(part["input_ids"])

    def _file(self, batch: Batch, row: int) -> Path:
        digest = hashlib.sha1(self._salt)
        for name in ("input_ids", "documents", "spans"):
            digest.update(batch[name][row].cpu().numpy().tobytes())
        return self.directory / f"{digest.hexdigest()}.safetensors"


def _sample(model: PreTrainedModel) -> bytes:
    """Some 64 values of every parameter: a target trained further is another target, whatever its name."""
    return b"".join(p.detach().flatten()[:: max(1, p.numel() // 64)].float().cpu().numpy().tobytes() for p in model.parameters())
