"""Wirings of ordinary layers: under the sum of embedding and state, under the embedding alone; and of none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..contracts.draft import DraftModel, KeyValueCache, Layout
from .attention.geometry import Beside, Lookup, normed, region, take_rows
from .layer import recomputed
from .wiring import Rows, Stack, readable


@dataclass(frozen=True)
class Summed(Stack):
    """The layers read W [embedding ; state], a state being the target's own or, once that ends, the draft's (EAGLE-1, figure 6)."""

    first_norm: bool = False
    """Whether the first layer norms what it reads, as the others do. Engines' form has it read the sum as it is."""
    final_norm: bool = False
    """Whether a norm follows the layers: the state after it goes to the head, and back."""
    input_norms: bool = False
    """Whether embedding and state have a norm each, before fc."""
    state_first: bool = False
    """Whether fc reads [state ; embedding]."""
    skips_start: bool = False
    """Whether the embedding counts for nothing at position 0, as some engines have it."""

    def modules(self, draft: DraftModel) -> dict[str, nn.Module]:
        """See `Wiring`."""
        made, width = super().modules(draft), draft.config.hidden_size
        made["fc"] = nn.Linear(width + draft.config.target_hidden_size, width, bias=False)
        if self.input_norms:
            made |= {"embedding_norm": draft.make_norm(width), "state_norm": draft.make_norm(draft.config.target_hidden_size)}
        if not self.final_norm:
            del made["norm"]
        return made

    def _layers(self, draft: DraftModel) -> list[nn.Module]:
        layers = super()._layers(draft)
        for layer in layers[: 0 if self.first_norm else 1]:
            layer.input_layernorm = nn.Identity()
        return layers

    def project(self, draft: DraftModel, aux_BSA: Tensor) -> Tensor:
        """As it is: fc reads it beside an embedding."""
        return readable(aux_BSA, draft.fc.weight.dtype)

    def backbone(self, draft: DraftModel, embeds_BQD: Any, context_BSD: Tensor, layout: Layout, cache: KeyValueCache | None) -> Tensor:
        """Output at `layout.rows`, [B, Q', D]; embedding and context are those of the same inputs, the former may be a `Lookup`."""
        hidden_BQD = stacked(draft, draft.fc(self._inputs(draft, embeds_BQD, context_BSD, layout.positions)), layout, cache)
        return draft.norm(hidden_BQD) if self.final_norm else hidden_BQD

    def _inputs(self, draft: DraftModel, embeds_BQD: Any, context_BSD: Tensor, positions_BQ: Tensor) -> Any:
        """What fc reads."""
        plain = not (self.input_norms or self.state_first or self.skips_start)
        if plain and isinstance(embeds_BQD, Lookup):
            return Beside(embeds_BQD, context_BSD)
        embeds_BQD = embeds_BQD.dense() if isinstance(embeds_BQD, Lookup) else embeds_BQD
        if self.skips_start:
            embeds_BQD = embeds_BQD * (positions_BQ > 0)[..., None]
        if self.input_norms:
            embeds_BQD, context_BSD = normed(draft.embedding_norm, embeds_BQD), normed(draft.state_norm, context_BSD)
        return torch.cat([context_BSD, embeds_BQD] if self.state_first else [embeds_BQD, context_BSD], dim=-1)

    def start(self, draft: DraftModel, layers: Sequence[Mapping[str, Tensor]], norm: Mapping[str, Tensor]) -> list[str]:
        """See `Wiring`. Without a final norm no layers are taken: the target's write at the scale before its own, tens of times a state."""
        layers = layers if self.final_norm else []
        if self.state_first:  # what every wiring starts as its last columns stands first here
            width, fc = draft.config.hidden_size, draft.fc.weight
            fc.copy_(fc.roll(width, dims=1))
            taken = super().start(draft, layers, norm)
            fc.copy_(fc.roll(-width, dims=1))
            return taken
        return super().start(draft, layers, norm)

    def head_input(self, draft: DraftModel, hidden_BQD: Tensor) -> Tensor:
        """The state itself, which is what the target's head reads of the target."""
        return hidden_BQD

    def head_modules(self, draft: DraftModel) -> list[nn.Module]:
        """None."""
        return []


@dataclass(frozen=True)
class Alone(Stack):
    """The target's states are not read: an ordinary language model between an embedding and a head of its own."""

    def modules(self, draft: DraftModel) -> dict[str, nn.Module]:
        """See `Wiring`."""
        return {"layers": nn.ModuleList(self._layers(draft)), "norm": draft.make_norm(draft.config.hidden_size)}

    def project(self, draft: DraftModel, aux_BSA: Tensor) -> Tensor:
        """As it is: nothing reads it."""
        return aux_BSA

    def backbone(self, draft: DraftModel, embeds_BQD: Any, context_BSD: Tensor, layout: Layout, cache: KeyValueCache | None) -> Tensor:
        """Output at `layout.rows`, [B, Q', D], of the embeddings alone."""
        return stacked(draft, embeds_BQD, layout, cache)


@dataclass(frozen=True)
class Bare:
    """Nothing: what the algorithm adds reads the target's state as it is, and the head what comes of that."""

    def modules(self, draft: DraftModel) -> dict[str, nn.Module]:
        """See `Wiring`."""
        return {"layers": nn.ModuleList()}

    def project(self, draft: DraftModel, aux_BSA: Tensor) -> Tensor:
        """As it is."""
        return readable(aux_BSA, draft.lm_head.weight.dtype)

    def backbone(self, draft: DraftModel, embeds_BQD: Any, context_BSD: Tensor, layout: Layout, cache: KeyValueCache | None) -> Tensor:
        """The context at `layout.rows`."""
        return take_rows(context_BSD, layout.rows)

    def head_input(self, draft: DraftModel, hidden_BQD: Tensor) -> Tensor:
        """The state itself."""
        return hidden_BQD

    def head_modules(self, draft: DraftModel) -> list[nn.Module]:
        """None."""
        return []

    def start(self, draft: DraftModel, layers: Sequence[Mapping[str, Tensor]], norm: Mapping[str, Tensor]) -> list[str]:
        """Nothing is left to start."""
        return []

    def saved(self, draft: DraftModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Wiring`."""
        return state


def stacked(draft: DraftModel, hidden_BQD: Tensor, layout: Layout, cache: KeyValueCache | None) -> Tensor:
    """The output at `layout.rows` of a draft's ordinary layers, one on the other."""
    rotary = draft.rotary(hidden_BQD, layout.positions)

    def run(layer: Any, rows: Rows, hidden_BQD: Tensor, cache: KeyValueCache | None) -> Tensor:
        x_BQD = region(layer, normed, layer.input_layernorm, hidden_BQD)
        return layer.attend(take_rows(hidden_BQD, rows), x_BQD, rotary, layout.pattern, cache, rows)

    for i, layer in enumerate(draft.layers):
        rows = layout.rows if i == len(draft.layers) - 1 else None
        hidden_BQD = recomputed(layer, partial(run, layer, rows), hidden_BQD, cache=cache)
    return hidden_BQD
