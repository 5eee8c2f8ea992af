"""What a layer keeps for its backward pass: products and attention, or attention alone; the rest is computed again."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from ..contracts.draft import KeyValueCache
from .attention.unrolled import varlen

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
    out: Tensor = checkpoint(
        run, *inputs, told, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (keep, _GiveBack(keep, told))
    )
    return out


def by_rows(layer: nn.Module, run: Callable[[Tensor], Tensor], x_BQD: Tensor) -> Tensor:
    """`run(x)`, [B, Q, D], which treats every row alike; under `gradient_checkpointing` computed again a quarter of the rows at a time.

    Called within `recomputed`, whose second pass wants nothing of it but its inputs.
    """
    if not (torch.is_grad_enabled() and layer.training and getattr(layer, "gradient_checkpointing", False)):
        return run(x_BQD)

    def unless_again(x_1ND: Tensor) -> Tensor:
        return x_1ND if any(isinstance(mode, _GiveBack) for mode in _get_current_dispatch_mode_stack()) else run(x_1ND)

    quarters = x_BQD.flatten(0, 1)[None].chunk(QUARTERS, dim=1)  # of the whole batch: a family's module may want to `view` them
    parts = [checkpoint(unless_again, x_1ND, use_reentrant=False, preserve_rng_state=False) for x_1ND in quarters]
    return torch.cat(parts, dim=1).view_as(x_BQD)


class _Told:
    """A cache whose answers can be given a second time, as they were."""

    def __init__(self, cache: KeyValueCache):
        self.cache = cache
        self.answers: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        self.again: Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]] | None = None

    def extend(self, layer: int, k_BHQd: Tensor, v_BHQd: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """See `KeyValueCache`."""
        if self.again is not None:
            return next(self.again)
        self.answers.append(self.cache.extend(layer, k_BHQd, v_BHQd))
        return self.answers[-1]


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


class _Keep(TorchDispatchMode):
    """Keeps what the operators `ops` put out. (torch's own selective checkpoints also count the casts that autocast caches.)"""

    def __init__(self, ops: set[Any]):
        super().__init__()
        self.ops = ops
        self.outputs: list[Any] = []
        self.last: Any = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Regions between products are compiled, which holds nothing that is kept."""
        return True

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


class _GiveBack(TorchDispatchMode):
    """Gives back what was kept, in the same order, in place of running the operators again."""

    def __init__(self, keep: _Keep, told: _Told | None):
        super().__init__()
        self.keep, self.told = keep, told
        self.left: Iterator[Any] = iter(())

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See `_Keep`."""
        return True

    def __enter__(self) -> Any:
        self.left = iter(self.keep.outputs)
        if self.told is not None:
            self.told.again = iter(self.told.answers)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = next(self.left, None) if func in self.keep.ops else None
        return func(*args, **(kwargs or {})) if kept is None else tree_map_only(_Output, _Output.unchanged, kept)
