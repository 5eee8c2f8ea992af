"""A decoder layer of the draft's family: what it computes, takes over from a layer of the target, and keeps for its backward pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from ..contracts.draft import DraftModel, KeyValueCache, Pattern
from .attention.flex import Pass
from .attention.geometry import Regions, Rotary, normed, region
from .attention.unrolled import varlen


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


aten: Any = torch.ops.aten

ATTENTION = {
    varlen._opoverload,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._flash_attention_forward.default,
}
QUARTERS = 4
PRODUCTS = ATTENTION | {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._grouped_mm.default}


def recomputed(layer: nn.Module, run: Callable[..., Tensor], *inputs: Tensor, cache: KeyValueCache | None) -> Tensor:
    """`run(*inputs, cache)`, the work of one layer of a draft: the same numbers, with less memory held until the backward pass.

    What lies between products (norms, rotation, activations, casts) is computed again, which costs next to nothing; under
    transformers' switch `gradient_checkpointing` everything but attention. Keys and values stay in the cache either way, as later
    drafting steps read them.
    """
    if not (torch.is_grad_enabled() and layer.training):
        return run(*inputs, cache)
    told = _Told(cache) if cache is not None else None
    keep = _Keep(ATTENTION if getattr(layer, "gradient_checkpointing", False) else PRODUCTS)
    try:
        out: Tensor = checkpoint(
            run, *inputs, told, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (keep, _GiveBack(keep, told))
        )
    finally:
        if told is not None:
            told.cache = None
    return out


def by_rows(layer: nn.Module, run: Callable[[Tensor], Tensor], x_BQD: Tensor) -> Tensor:
    """`run(x)`, [B, Q, D], which treats every row alike; under `gradient_checkpointing` computed again a quarter of the rows at a time.

    Called within `recomputed`, whose second pass wants nothing of it but its inputs, unless what stands around it reads its output.
    """
    if not (torch.is_grad_enabled() and layer.training and getattr(layer, "gradient_checkpointing", False)):
        return run(x_BQD)

    around = "mlp" in getattr(layer, "around", ())

    def unless_again(x_1ND: Tensor) -> Tensor:
        return x_1ND if not around and any(isinstance(mode, _GiveBack) for mode in _get_current_dispatch_mode_stack()) else run(x_1ND)

    quarters = x_BQD.flatten(0, 1)[None].chunk(QUARTERS, dim=1)  # of the whole batch: a family's module may want to `view` them
    parts = [checkpoint(unless_again, x_1ND, use_reentrant=False, preserve_rng_state=False) for x_1ND in quarters]
    return torch.cat(parts, dim=1).view_as(x_BQD)


class _Told:
    """A cache whose answers can be given a second time, as they were.

    The graph holds this until its backward pass, which may never come: so what is held here must not hold the graph.
    """

    def __init__(self, cache: KeyValueCache):
        self.cache: KeyValueCache | None = cache
        self.answers: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        self.again: Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]] | None = None

    def extend(self, layer: int, k_BHQd: Tensor, v_BHQd: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """See `KeyValueCache`."""
        if self.again is not None:
            return next(self.again)
        assert self.cache is not None
        answer = self.cache.extend(layer, k_BHQd, v_BHQd)
        self.answers.append(tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), answer))
        return answer


class _Output:
    """A tensor that was put out, and how often it had been changed by then."""

    def __init__(self, tensor: Tensor):
        # Below autograd a view does not count its base's changes unless this key is let through.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self.tensor, self.version = tensor.detach(), tensor._version

    def unchanged(self) -> Tensor:
        """The tensor; raises `RuntimeError` if it has been changed in place since: what is computed from it would differ."""
        if self.tensor._version != self.version:
            raise RuntimeError("a layer changed a product's output in place, so that it cannot be computed again from it: add without `_`")
        return self.tensor


class _Keep(TorchDispatchMode, Pass):
    """Keeps what the operators `ops` put out. (torch's own selective checkpoints also count the casts that autocast caches.)"""

    def __init__(self, ops: set[Any]):
        super().__init__()
        self.ops = ops
        self.outputs: list[Any] = []
        self.made: list[Any] = []
        self.last: Any = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Regions between products are compiled, which holds nothing that is kept."""
        return True

    def once(self, make: Callable[[], Any]) -> Any:
        """See `Pass`."""
        self.made.append(make())
        return self.made[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.ops:
            self.outputs.append(tree_map_only(Tensor, _Output, out))
            self.last = func
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # The last product is as a rule the layer's own output, which nothing in the layer reads: made again should that be wrong.
        if self.outputs and self.last not in ATTENTION:
            self.outputs.pop()


class _GiveBack(TorchDispatchMode, Pass):
    """Gives back what was kept, in the same order, in place of running the operators again."""

    def __init__(self, keep: _Keep, told: _Told | None):
        super().__init__()
        self.keep, self.told = keep, told
        self.left: Iterator[Any] = iter(())
        self.made: Iterator[Any] = iter(())

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See `_Keep`."""
        return True

    def __enter__(self) -> Any:
        self.left, self.made = iter(self.keep.outputs), iter(self.keep.made)
        if self.told is not None:
            self.told.again = iter(self.told.answers)
        return super().__enter__()

    def once(self, make: Callable[[], Any]) -> Any:
        """See `Pass`."""
        return next(self.made)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = next(self.left, None) if func in self.keep.ops else None
        return func(*args, **(kwargs or {})) if kept is None else tree_map_only(_Output, _Output.unchanged, kept)
