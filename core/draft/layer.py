"""A decoder layer of the draft's family, and what it takes over from a layer of the target."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..contracts.draft import DraftModel, KeyValueCache, Pattern
from .attention.geometry import Rotary
from .attention.lookup import normed
from .attention.regions import Regions, region
from .recompute import by_rows


def as_it_is(x: Tensor) -> Tensor:
    """What is done to a sublayer's output that nothing stands around."""
    return x


class DraftLayer(nn.Module):
    """Norm, attention, norm, feed-forward, one after the other. A family that arranges them otherwise overrides `attend`.

    An adapter names its own as `layer_class`.
    """

    def __init__(self, draft: DraftModel, layer: int, input_size: int):
        super().__init__()
        width = draft.config.hidden_size
        self.input_layernorm: Any = draft.make_norm(width)
        self.self_attn = draft.make_attention(layer, input_size)
        self.post_attention_layernorm = draft.make_norm(width)
        self.mlp = draft.make_mlp(layer)
        self.gradient_checkpointing = False
        """transformers' switch, see `recomputed`."""
        self.regions: Regions = None
        """See `BaseDraft.compile`."""
        self.around: dict[str, str] = {}
        """What stands around `attention` and `mlp`, by the name of its module here; see `Prefix.around`."""

    def enter(self, sublayer: str, y_BQD: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What a sublayer reads where its normed input is y, and what is done to its output: by what stands around it, if anything does."""
        name = self.around.get(sublayer)
        return getattr(self, name)(y_BQD) if name else (y_BQD, as_it_is)

    def attend(
        self,
        hidden_BQD: Tensor,
        x_BSX: Tensor,
        rotary: Rotary,
        pattern: Pattern,
        cache: KeyValueCache | None,
        rows: Tensor | int | None,
        leave: Callable[[Tensor], Tensor] = as_it_is,
    ) -> Tensor:
        """The layer's output [B, Q, D] for residual `hidden_BQD`: the inputs x give keys and values, those at `rows` are the queries.

        x is normed already, by whoever puts it together of several parts; `leave` is what `enter` says of attention's output. The
        feed-forward treats every row alike.
        """
        attended_BQD = leave(self.self_attn(x_BSX, rotary, pattern, cache, rows))
        hidden_BQD, normed_BQD = region(self, _added, self.post_attention_layernorm, hidden_BQD, attended_BQD)
        y_BQD, leave = self.enter("mlp", normed_BQD)
        return hidden_BQD + leave(by_rows(self, self.mlp, y_BQD))


def _added(norm: nn.Module, hidden_BQD: Tensor, attended_BQD: Tensor) -> tuple[Tensor, Tensor]:
    """The residual, and what the feed-forward reads."""
    hidden_BQD = hidden_BQD + attended_BQD
    return hidden_BQD, normed(norm, hidden_BQD)


def take_over(layer: nn.Module, theirs: Mapping[str, Tensor], renamed: Mapping[str, str] = {}) -> int:
    """Copy weights of a target's layer whose names and shapes agree; how many they were.

    `renamed` maps beginnings of our names to theirs. A matrix twice as wide as theirs gets it in its second half, which reads the context.
    """
    taken = 0
    for name, mine in layer.state_dict().items():
        start = next((start for start in renamed if name.startswith(start)), "")
        other = theirs.get(renamed.get(start, "") + name.removeprefix(start))
        if other is not None and mine.ndim == 2 and mine.shape == (other.shape[0], 2 * other.shape[-1]):
            mine = mine[:, other.shape[-1] :]
        if other is not None and other.shape == mine.shape:
            mine.copy_(other)
            taken += 1
    return taken
