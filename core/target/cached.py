"""A target whose states of some rows are stored: captured once, and read from then on, wherever batches are made."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ..contracts.draft import Batch
from ..contracts.signal import Signal
from ..data import Reader, tokenizer_of
from ..data.collate import ends_of, pixels_of, positions_within
from ..errors import ForedraftError
from .capture import is_settled, is_sharded
from .fingerprint import Fingerprint, fingerprint_of, weights_of
from .kept import NAMES, Part
from .places import places_in
from .shards import FLOAT8, Form
from .store import Row, Store
from .target import Target

KEPT = {"auto": None, "bfloat16": torch.bfloat16, "float8": FLOAT8}
"""What states are kept in: `auto` is what the target says them in."""


class CachedTarget(Target):
    """A `Target` that reads its states from `directory`, where `fill` has stored them.

    They are told by target (config and weights), aux layers, dtype, and, where a tokenizer is given, by it and its chat template: those of
    another one are refused, unless `of` says that they were compared. `kept` is auto, bfloat16, or float8 with a scale for every state.
    Where it `streams`, another process captures them while they are read (`streaming.py`), and `fill` does nothing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        aux_layers: tuple[int, ...],
        directory: str | Path,
        needs: Sequence[str] = ("aux", "final"),
        *,
        kept: str = "auto",
        tokenizer: Reader | None = None,
        of: Fingerprint | None = None,
        streams: bool = False,
    ):
        self._tried = False
        super().__init__(model, aux_layers, needs)
        if is_sharded(model):
            raise ForedraftError("hidden_states_cache: ranks that share a target run it together, and none could store alone: leave it out")
        spelt = tokenizer and tokenizer_of(tokenizer)
        of = of or fingerprint_of(model.config, weights_of(model), self.aux_layers, needs, model.dtype, spelt)
        self.store = store_of(directory, model.config, of, model.dtype, kept, streams)

    def fill(self, *rows: Any, batch_size: int = 8, show_progress: bool = True) -> None:
        """Store what a training on these data sets of packed rows reads, as far as it is not there.

        Raises what `Store.fill` raises, and `ForedraftError` where several ranks train and something is missing.
        """
        if self.store.streams:
            return
        if any(not hasattr(dataset, "__len__") for dataset in rows):
            raise ForedraftError("hidden_states_cache: the states of a stream of rows cannot be stored before it is read: leave it out")
        if dist.is_initialized() and dist.get_world_size() > 1:
            if missing := self.store.wanted(rows).missing:
                raise ForedraftError(
                    f"hidden_states_cache: {missing} documents are not stored: several ranks read alone, `foredraft capture` first"
                )
            return
        self.store.fill(rows, self.run, batch_size, show_progress)

    def capture(self, batch: Batch) -> Signal:
        """What is stored; where a collator has read it already (`DraftCollator.read_states`), as it stands in the batch."""
        device = batch["input_ids"].device
        states = batch.get("states") or {name: t.to(device) for name, t in self.store.states(batch).items()}
        none = torch.empty(*batch["input_ids"].shape, 0, device=device)
        aux_BSA = states.get("aux", none)
        hidden_BST = states.get("hidden", aux_BSA if "final" in self.needs else none)
        places_CBS = places_in(self.model, batch) if "pixels" in batch else None
        return Signal(aux_BSA, hidden_BST, self.head, places_CBS)

    def run(self, rows: Sequence[Row], parts: Sequence[Part]) -> Iterator[tuple[Part, Mapping[str, Tensor]]]:
        """The states of some parts of packed rows, by the model."""
        if not self._tried:
            super()._try_out()
            self._tried = True
        ids, documents = (torch.tensor([list(row[name]) for row in rows]) for name in ("input_ids", "documents"))
        positions = positions_within(documents)
        batch = {"input_ids": ids, "documents": documents, "positions": positions, "ends": ends_of(positions)}
        signal = super().capture({**batch, **pixels_of(rows)})
        states = {"aux": signal.aux_BSA, "hidden": signal.hidden_BST}
        for part in parts:
            yield part, part.cut({name: states[name] for name in self.store.form.widths})

    def _try_out(self) -> None:
        """Only if it must run: where all is stored, its layers may be far away."""

    def release(self) -> None:
        """Give back the memory of the decoder's layers, when all that will be asked is stored. Nobody can run the model afterwards."""
        if not is_settled(self.model):
            self.layers.to("meta")


def store_of(directory: str | Path, config: Any, of: Fingerprint, dtype: torch.dtype, kept: str, streams: bool = False) -> Store:
    """The store in `directory` of states of a target. Raises `ForedraftError` if another target's are there."""
    width = config.get_text_config().hidden_size
    widths = {NAMES[need]: width * (len(of["aux_layers"]) if need == "aux" else 1) for need in of["needs"]}
    return Store(Path(directory), Form(widths, width, dtype, KEPT[kept] or dtype), of, streams)
