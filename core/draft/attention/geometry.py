"""Attention geometries: how queries, keys, values and the output are projected, and where keys and values are kept.

They know nothing of algorithms.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ...contracts.draft import KeyValueCache, Pattern
from .lookup import Regions, region, take_rows

Rotary = tuple[Tensor, Tensor]
"""cos and sin, each [B, Q, d]."""


def among_keys(rows: Tensor | int | None, keys: Sequence[Tensor], x_BSX: Tensor) -> Tensor | None:
    """Where the inputs `rows` stand among the keys of the newest entry, which earlier calls may have begun; None: they are the last."""
    before = keys[-1].shape[2] - x_BSX.shape[1]
    return (rows + before if before else rows) if isinstance(rows, Tensor) else None


def rotated(x_BHSd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x turned by its positions; where cos is narrower than a head, its first dimensions alone (partial rotary)."""
    turned, rest = x_BHSd[..., : cos.shape[-1]], x_BHSd[..., cos.shape[-1] :]
    turned = apply_rotary_pos_emb(turned, turned, cos, sin)[0]
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention with a free input width, optional bias and optional RMSNorm on queries and keys.

    Parameter names are those of transformers' Llama attention; `make_norm`, of so many features, adds `q_norm` and `k_norm` as in Qwen3.
    """

    def __init__(self, config: PretrainedConfig, layer: int, input_size: int, make_norm: Callable[[int], nn.Module] | None = None):
        super().__init__()
        self.regions: Regions = None
        self.layer, self.head_dim, self.scale = layer, config.head_dim, config.head_dim**-0.5
        wide, narrow = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, wide, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, narrow, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, narrow, bias=config.attention_bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=config.attention_bias)
        self.q_norm, self.k_norm = (make_norm(config.head_dim) if make_norm else nn.Identity() for _ in range(2))

    def forward(self, x_BSX: Tensor, rotary: Rotary, pattern: Pattern, cache: KeyValueCache | None, rows: Tensor | int | None) -> Tensor:
        """Attention output [B, Q, D] of the inputs `rows`; all inputs give keys and values."""
        cos, sin = rotary
        x_BQX, cos_q, sin_q = (take_rows(t, rows) for t in (x_BSX, cos, sin))
        (q_BQX, gate_BQX), k_BSX, v_BSX = self.queries(x_BQX), self.k_proj(x_BSX), self.v_proj(x_BSX)
        # Under autocast norms and rotation may hand back float32 while v is in half precision; kernels want one dtype.
        turn = partial(region, self, GroupedQueryAttention._turned)
        q_BHQd, k_BHSd = turn(self, self.q_norm, q_BQX, cos_q, sin_q, v_BSX.dtype), turn(self, self.k_norm, k_BSX, cos, sin, v_BSX.dtype)
        v_BHSd = self._heads(v_BSX)
        keys, values = cache.extend(self.layer, k_BHSd, v_BHSd) if cache is not None else ([k_BHSd], [v_BHSd])
        out_BHQd = pattern.attend(q_BHQd, keys, values, self.scale, among_keys(rows, keys, x_BSX))
        out_BQX = out_BHQd.transpose(1, 2).flatten(2)
        return self.o_proj(out_BQX if gate_BQX is None else out_BQX * gate_BQX.sigmoid())

    def queries(self, x_BQX: Tensor) -> tuple[Tensor, Tensor | None]:
        """All heads' queries [B, Q, H·d], and what opens the output by its sigmoid, if anything does."""
        return self.q_proj(x_BQX), None

    def _turned(self, norm: nn.Module, x_BSX: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        return rotated(norm(self._heads(x_BSX)), cos, sin).to(dtype)

    def _heads(self, x_BSX: Tensor) -> Tensor:
        return x_BSX.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


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
