"""What a piece of work costs, seen op by op: products, bytes alive, launches; of real tensors, or of fake ones, which hold no values."""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten: Any = torch.ops.aten
LINEAR = ("aten.mm", "aten.addmm", "aten._scaled_mm")
"""Products of linear layers; attention's are batched, or inside kernels, and are counted by who sees whom."""
GROUPED = ("aten._grouped_mm", "transformers.grouped_mm_fallback")
"""Products of experts: every row with the matrix of its own."""


class Meter(TorchDispatchMode):
    """While open, counts what is dispatched. Storages that were there before count for nothing; those of `known` tensors are never new.

    `flops` are 2·m·k·n of every product of a linear layer, by the phase it ran in; `ops` are calls that are no views; `peak` is the most
    bytes that were alive at once, to the byte (an allocator rounds up), and `live` those alive now. `rows[w]` is how many rows the largest
    tensor of width w had, for each of the `widths`.
    """

    def __init__(self, known: Iterable[Tensor] = (), widths: Iterable[int] = ()):
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.phase, self.ops, self.live, self.peak = "", 0, 0, 0
        self.rows = dict.fromkeys(widths, 0)
        self._known = {t.untyped_storage()._cdata for t in known}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and note it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (name := str(func._overloadpacket)) in LINEAR:
            self.flops[self.phase] += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        elif name in GROUPED:
            self.flops[self.phase] += 2 * out.numel() * args[0].shape[-1]
        self.ops += not func.is_view
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor)
                if tensor.ndim and tensor.shape[-1] in self.rows and not func.is_view:
                    width = tensor.shape[-1]
                    self.rows[width] = max(self.rows[width], tensor.numel() // width)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._sizes:
            return
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)
