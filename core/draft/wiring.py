"""How a draft takes in the target's context: side by side with the embedding, summed with it, or as extra keys and values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..contracts.draft import DraftModel, KeyValueCache, Layout, Pattern
from ..errors import ForedraftError
from ..target.capture import autocast_dtype
from ..target.weights import norm_scale
from .attention.geometry import Beside, Lookup, Rotary, autocasted, normed, region, take_rows
from .layer import as_it_is, recomputed, take_over

Rows = Tensor | int | None


class Stack:
    """What wirings share: fc over the concatenated aux states, a stack of layers, a final norm."""

    def modules(self, draft: DraftModel) -> dict[str, nn.Module]:
        """See `Wiring`."""
        config = draft.config
        fc = nn.Linear(config.num_aux_hidden_states * config.target_hidden_size, config.hidden_size, bias=False)
        return {"fc": fc, "layers": nn.ModuleList(self._layers(draft)), "norm": draft.make_norm(config.hidden_size)}

    def _layers(self, draft: DraftModel) -> list[nn.Module]:
        return [draft.make_layer(i, draft.config.hidden_size) for i in range(draft.config.num_hidden_layers)]

    def project(self, draft: DraftModel, aux_BSA: Tensor) -> Tensor:
        """See `Wiring`."""
        return draft.fc(readable(aux_BSA, draft.fc.weight.dtype))

    def head_input(self, draft: DraftModel, hidden_BQD: Tensor) -> Tensor:
        """See `Wiring`."""
        return draft.norm(hidden_BQD)

    def head_modules(self, draft: DraftModel) -> list[nn.Module]:
        """See `Wiring`."""
        return [draft.norm]

    def start(self, draft: DraftModel, layers: Sequence[Mapping[str, Tensor]], norm: Mapping[str, Tensor]) -> list[str]:
        """See `Wiring`: the last layers and the final norm; fc passes the last aux state, and of the others a little."""
        taken, width = [], draft.config.hidden_size
        if hasattr(draft, "norm") and take_over(draft.norm, norm):
            if draft.family is not None:  # what it multiplies by was taken: some families keep that less one
                draft.norm.weight.add_(draft.norm.weight - norm_scale(draft.norm))
            taken.append("final norm")
        last_DD = draft.fc.weight[:, -width:]
        if float(last_DD.diagonal().mean()) < 0.5:  # else it passes the last aux state already
            draft.fc.weight.mul_(0.1)
            last_DD += torch.eye(width, dtype=last_DD.dtype, device=last_DD.device)
        if layers and (own := list(draft.layers)):
            pairs = zip(reversed(own), reversed(layers), strict=False)
            copied = sum(take_over(layer, theirs, self._renamed(layer)) for layer, theirs in pairs)
            taken.append(f"{copied} of {sum(len(layer.state_dict()) for layer in own)} layer tensors")
        return taken

    def _renamed(self, layer: nn.Module) -> Mapping[str, str]:
        return {}

    def saved(self, draft: DraftModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Wiring`."""
        return state


def readable(aux_BSA: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`, unless autocast is about to choose another."""
    return aux_BSA if autocast_dtype(aux_BSA) else aux_BSA.to(dtype)


@dataclass(frozen=True)
class Fused(Stack):
    """The first layer reads embedding and context side by side, each under its own norm (EAGLE-3, figure 5)."""

    fc_norm: bool = False
    """One norm per aux chunk before fc (EAGLE-3.1)."""
    norm_output: bool = False
    """The post-norm state is fed back, and the head applies no second norm (EAGLE-3.1)."""
    norm_before_residual: bool = False
    """The first layer adds to the normed context, not to the context itself."""

    def modules(self, draft: DraftModel) -> dict[str, nn.Module]:
        """See `Wiring`."""
        config, made = draft.config, super().modules(draft)
        if self.fc_norm:
            made["fc_norm"] = nn.ModuleList(draft.make_norm(config.target_hidden_size) for _ in range(config.num_aux_hidden_states))
        return made

    def _layers(self, draft: DraftModel) -> list[nn.Module]:
        width, count = draft.config.hidden_size, draft.config.num_hidden_layers
        layers = [draft.make_layer(i, width if i else 2 * width) for i in range(count)]
        for layer in layers[:1]:
            layer.hidden_norm = draft.make_norm(width)
        return layers

    def project(self, draft: DraftModel, aux_BSA: Tensor) -> Tensor:
        """See `Wiring`."""
        if self.fc_norm:
            chunks = readable(aux_BSA, draft.fc.weight.dtype).chunk(len(draft.fc_norm), dim=-1)
            aux_BSA = torch.cat([norm(chunk) for norm, chunk in zip(draft.fc_norm, chunks, strict=True)], dim=-1)
        return super().project(draft, aux_BSA)

    def backbone(self, draft: DraftModel, embeds_BQD: Any, context_BSD: Any, layout: Layout, cache: KeyValueCache | None) -> Tensor:
        """Output at `layout.rows`, [B, Q', D]; embedding and context are those of the same inputs, either may be a `Lookup`."""
        like = embeds_BQD.table_BUX if isinstance(embeds_BQD, Lookup) else embeds_BQD
        rotary, hidden_BQD = draft.rotary(like, layout.positions), context_BSD
        for i, layer in enumerate(draft.layers):
            # The layers below the last work on every input: the next one needs its keys and values.
            rows = layout.rows if i == len(draft.layers) - 1 else None
            inputs: list[Any] = [hidden_BQD]
            if i == 0:
                inputs.append(self._looked_up(layer, embeds_BQD) if isinstance(embeds_BQD, Lookup) else embeds_BQD)
            hidden_BQD = recomputed(layer, partial(self._layer, layer, rotary, layout.pattern, rows), *inputs, cache=cache)
        hidden_BQD = hidden_BQD if len(draft.layers) else take_rows(hidden_BQD, layout.rows)
        return draft.norm(hidden_BQD) if self.norm_output else hidden_BQD

    def _looked_up(self, layer: Any, embeds_BQD: Lookup) -> Lookup:
        """The embeddings under their norm, with their half of what attention projects."""
        width = 2 * embeds_BQD.shape[-1]
        return embeds_BQD.prepared(
            layer.input_layernorm, [m.weight for m in layer.self_attn.modules() if isinstance(m, nn.Linear) and m.in_features == width]
        )

    def _layer(self, layer: Any, rotary: Rotary, pattern: Pattern, rows: Rows, hidden_BQD: Any, *rest: Any) -> Tensor:
        """A layer's output; `rest` are the embeddings, which the first layer reads too, and the cache."""
        *embeds, cache = rest
        x: Any
        normed_BQD: Any
        if not embeds:
            x = region(layer, normed, layer.input_layernorm, hidden_BQD)
        else:
            each = hidden_BQD.each if isinstance(hidden_BQD, Lookup) else lambda run: run(hidden_BQD)
            normed_BQD = each(lambda states: region(layer, normed, layer.hidden_norm, states))
            looked_up = isinstance(embeds[0], Lookup)
            x = Beside(embeds[0], normed_BQD) if looked_up else torch.cat([layer.input_layernorm(embeds[0]), normed_BQD], dim=-1)
            hidden_BQD = normed_BQD if self.norm_before_residual else hidden_BQD
        return layer.attend(take_rows(hidden_BQD, rows), x, rotary, pattern, cache, rows)

    def head_input(self, draft: DraftModel, hidden_BQD: Tensor) -> Tensor:
        """See `Wiring`."""
        return hidden_BQD if self.norm_output else super().head_input(draft, hidden_BQD)

    def head_modules(self, draft: DraftModel) -> list[nn.Module]:
        """See `Wiring`."""
        return [] if self.norm_output else super().head_modules(draft)

    def _renamed(self, layer: nn.Module) -> Mapping[str, str]:
        """A target's layer reads what is the context here; the norm of the embedding has no counterpart."""
        return {"hidden_norm.": "input_layernorm.", "input_layernorm.": "-"} if hasattr(layer, "hidden_norm") else {}

    def saved(self, draft: DraftModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Layers above the first carry their norm under both names that engines read (`input_layernorm`, `hidden_norm`)."""
        upper = [f"layers.{i}" for i in range(1, len(draft.layers))]
        return {**state, **{f"{layer}.hidden_norm.weight": state[f"{layer}.input_layernorm.weight"].clone() for layer in upper}}

    @property
    def fields(self) -> dict[str, bool]:
        """The flags as engines read them in `config.json`."""
        return {"fc_norm": self.fc_norm, "norm_output": self.norm_output, "norm_before_residual": self.norm_before_residual}


@dataclass(frozen=True)
class Prefix(Stack):
    """In every layer the context gives keys and values beside the embeddings' own; it is itself never a query (DFlash).

    A norm follows fc.
    """

    around: Callable[[DraftModel], Mapping[str, tuple[str, nn.Module]]] | None = None
    """What stands around `attention` and `mlp` of a layer: the name under which it is saved there, and a fresh module.

    It gets the embeddings' normed states y [B, Q, D], and gives what the sublayer reads instead, and a function of its output. Where it
    looks at other rows, `Layout.rows` must hold all that it looks at.
    """

    def modules(self, draft: DraftModel) -> dict[str, nn.Module]:
        """See `Wiring`."""
        return {**super().modules(draft), "hidden_norm": draft.make_norm(draft.config.hidden_size)}

    def _layers(self, draft: DraftModel) -> list[nn.Module]:
        layers: list[Any] = super()._layers(draft)
        for layer in layers:
            if self.around and "leave" not in signature(layer.attend).parameters:
                raise ForedraftError(
                    f"{type(layer).__name__}.attend takes no `leave`, so nothing can stand around its sublayers, which "
                    f"'{draft.algorithm.name}' needs: let it apply `leave` to attention's output, and ask `enter` what feed-forwards read"
                )
            for sublayer, (name, module) in (self.around(draft) if self.around else {}).items():
                setattr(layer, name, module)
                layer.around[sublayer] = name
        return layers

    def project(self, draft: DraftModel, aux_BSA: Tensor) -> Tensor:
        """See `Wiring`."""
        return draft.hidden_norm(super().project(draft, aux_BSA))

    def backbone(self, draft: DraftModel, embeds_BQD: Tensor, context_BSD: Tensor, layout: Layout, cache: KeyValueCache | None) -> Tensor:
        """Output at `layout.rows`, [B, Q', D]. The inputs are the context's S, then the embeddings' Q."""
        rotary, hidden_BQD = draft.rotary(embeds_BQD, layout.positions), embeds_BQD
        for i, layer in enumerate(draft.layers):
            # The layers below the last work on every embedding: the next one needs its keys and values.
            rows = layout.rows if layout.rows is not None and i == len(draft.layers) - 1 else embeds_BQD.shape[1]
            hidden_BQD = recomputed(layer, partial(self._layer, layer, rotary, layout.pattern, rows), hidden_BQD, context_BSD, cache=cache)
        return hidden_BQD

    def _layer(
        self, layer: Any, rotary: Rotary, pattern: Pattern, rows: Rows, hidden_BQD: Tensor, context_BSD: Tensor, cache: KeyValueCache | None
    ) -> Tensor:
        y_BQD, leave = layer.enter("attention", layer.input_layernorm(hidden_BQD))
        x_BSD = autocasted(torch.cat([context_BSD, y_BQD], dim=1))
        own = rows if isinstance(rows, int) or rows is None else rows - context_BSD.shape[1]
        given = (take_rows(hidden_BQD, own), x_BSD, rotary, pattern, cache, rows)
        # A family's own `attend` need not know of what no algorithm asks of it.
        return layer.attend(*given) if leave is as_it_is else layer.attend(*given, leave)
