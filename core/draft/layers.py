"""How a draft's decoder layers take in the target's context: side by side with the embedding, or as extra keys and values."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..contracts.draft import DraftModel, KeyValueCache, Layout, Pattern
from .attention.geometry import Rotary, take_rows


class DraftLayer(nn.Module):
    """A decoder layer of the draft's family: norm, attention, norm, feed-forward."""

    def __init__(self, draft: DraftModel, layer: int, input_size: int):
        super().__init__()
        width = draft.config.hidden_size
        self.input_layernorm: Any = draft.make_norm(width)
        self.self_attn = draft.make_attention(layer, input_size)
        self.post_attention_layernorm = draft.make_norm(width)
        self.mlp = draft.make_mlp(layer)
        self._gradient_checkpointing_func: Any = None
        self.gradient_checkpointing = False
        """transformers' switch. The feed-forward half is recomputed; attention's keys and values are kept for later steps anyway."""

    def attend(
        self, hidden_BQD: Tensor, x_BSX: Tensor, rotary: Rotary, pattern: Pattern, cache: KeyValueCache | None, rows: Tensor | None
    ) -> Tensor:
        """The layer's output [B, Q, D] for residual `hidden_BQD`: the inputs x give keys and values, those at `rows` are the queries."""
        hidden_BQD = hidden_BQD + self.self_attn(x_BSX, rotary, pattern, cache, rows)
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(self._feed_forward, hidden_BQD)
        return self._feed_forward(hidden_BQD)

    def _feed_forward(self, hidden_BQD: Tensor) -> Tensor:
        return hidden_BQD + self.mlp(self.post_attention_layernorm(hidden_BQD))

    def start_from(self, theirs: Mapping[str, Tensor]) -> int:
        """Copy those weights of a target's layer (`BaseDraft.weights_of`) whose names and shapes agree; how many they were."""
        return sum(self._take(name, mine, theirs) for name, mine in self.state_dict().items())

    def _take(self, name: str, mine: Tensor, theirs: Mapping[str, Tensor]) -> bool:
        other = theirs.get(name)
        if other is None or other.shape != mine.shape:
            return False
        mine.copy_(other)
        return True


class FirstFusedLayer(DraftLayer):
    """Reads embedding and context side by side, each under its own norm (EAGLE-3, figure 5)."""

    def __init__(self, draft: DraftModel):
        super().__init__(draft, 0, 2 * draft.config.hidden_size)
        self.hidden_norm: Any = draft.make_norm(draft.config.hidden_size)

    def _take(self, name: str, mine: Tensor, theirs: Mapping[str, Tensor]) -> bool:
        """A target's layer reads what is the context half here; the embedding's half stays random."""
        if name.startswith("input_layernorm."):
            return False
        name = name.replace("hidden_norm.", "input_layernorm.")
        other = theirs.get(name)
        if other is not None and mine.ndim == 2 and mine.shape == (other.shape[0], 2 * other.shape[-1]):
            mine = mine[:, other.shape[-1] :]
        return super()._take(name, mine, theirs)


class FusedLayers(nn.ModuleList):
    """`fuse`: the first layer reads embedding and context side by side, those above are the family's own."""

    def __init__(self, draft: DraftModel):
        width, count = draft.config.hidden_size, draft.config.num_hidden_layers
        super().__init__(FirstFusedLayer(draft) if i == 0 else DraftLayer(draft, i, width) for i in range(count))
        self.norm_before_residual = draft.config.norm_before_residual

    def forward(
        self, embeds_BQD: Tensor, context_BQD: Tensor, rotary: Rotary, layout: Layout, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Un-normed output at `layout.rows`, [B, Q', D]; embedding and context are those of the same inputs."""
        hidden_BQD = context_BQD
        layer: Any
        for i, layer in enumerate(self):
            last = i == len(self) - 1  # the layers below it work on every input: the next one needs its keys and values
            pattern, rows = (layout.pattern, layout.rows) if last else (layout.below or layout.pattern, None)
            x = layer.input_layernorm(embeds_BQD if i == 0 else hidden_BQD)
            if i == 0:
                normed_BQD = layer.hidden_norm(hidden_BQD)
                x = torch.cat([x, normed_BQD], dim=-1)
                hidden_BQD = normed_BQD if self.norm_before_residual else hidden_BQD
            hidden_BQD = layer.attend(take_rows(hidden_BQD, rows), x, rotary, pattern, cache, rows)
        return hidden_BQD if len(self) else take_rows(hidden_BQD, layout.rows)


class PrefixLayers(nn.ModuleList):
    """`prefix`: in every layer the context gives keys and values beside the embeddings' own; it is itself never a query (DFlash)."""

    def __init__(self, draft: DraftModel):
        super().__init__(DraftLayer(draft, i, draft.config.hidden_size) for i in range(draft.config.num_hidden_layers))

    def forward(
        self, embeds_BQD: Tensor, context_BSD: Tensor, rotary: Rotary, layout: Layout, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Un-normed output at `layout.rows`, [B, Q', D]. The inputs are the context's S, then the embeddings' Q."""
        context, hidden_BQD = context_BSD.shape[1], embeds_BQD
        embeds_BQ = torch.arange(context, context + embeds_BQD.shape[1], device=embeds_BQD.device).expand(len(embeds_BQD), -1)
        layer: Any
        for i, layer in enumerate(self):
            last = i == len(self) - 1  # the layers below it work on every embedding: the next one needs its keys and values
            pattern, rows = (layout.pattern, layout.rows) if last else (layout.below or layout.pattern, None)
            x_BSD = torch.cat([context_BSD, layer.input_layernorm(hidden_BQD)], dim=1)
            rows = embeds_BQ if rows is None else rows
            hidden_BQD = layer.attend(take_rows(hidden_BQD, rows - context), x_BSD, rotary, pattern, cache, rows)
        return hidden_BQD


WIRINGS: dict[str, Any] = {"fuse": FusedLayers, "prefix": PrefixLayers}
