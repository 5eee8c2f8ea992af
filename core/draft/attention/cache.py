"""Caches of keys and values behind one method, `extend`."""

from collections.abc import Sequence

from torch import Tensor
from transformers import DynamicCache


class UnrolledCache:
    """Keys and values of training-time test: step 0 of all slots, then one entry per step for the active slots.

    `extend` returns the list `[K_0 [B, H, S, d], K_1 [B, H, Q, d], ..., K_k]`, which the pattern `Unrolled` reads.
    """

    def __init__(self) -> None:
        self._steps: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def extend(self, layer: int, k_BHQd: Tensor, v_BHQd: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Add one step."""
        keys, values = self._steps.setdefault(layer, ([], []))
        keys.append(k_BHQd)
        values.append(v_BHQd)
        return list(keys), list(values)


class DecodingCache:
    """The draft's cache while it decodes: transformers' `DynamicCache`, cut back to the slots whose context the target has confirmed."""

    def __init__(self) -> None:
        self._cache = DynamicCache()

    def __len__(self) -> int:
        return max((layer.get_seq_length() for layer in self._cache.layers), default=0)

    def extend(self, layer: int, k_BHQd: Tensor, v_BHQd: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Append, and return everything so far as one entry."""
        keys, values = self._cache.update(k_BHQd, v_BHQd, layer)
        return [keys], [values]

    def crop(self, length: int) -> None:
        """Forget all beyond the first `length` slots, in every layer that has more."""
        for layer in self._cache.layers:
            if layer.get_seq_length() > length:
                layer.crop(length - layer.get_seq_length())
