"""Attention geometries: how queries, keys, values and the output are projected of a layer's inputs, and turned by their positions.

They know nothing of algorithms. Inputs may be put together of rows that repeat (`Lookup`): what is linear in them is worked out once per
row, not once per use. What lies between a layer's products (norms, rotation, merges) may be compiled, each by itself (`region`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import unwrap
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...contracts.draft import KeyValueCache, Pattern
from ...target.capture import autocast_dtype

Rotary = tuple[Tensor, Tensor]
"""cos and sin, each [B, Q, d]."""
T = TypeVar("T")
Regions = Callable[[Callable[..., Any]], Callable[..., Any]] | None
"""What compiles a function; None: nothing is compiled."""


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
        v_BHSd = self._heads(v_BSX).transpose(1, 2)
        keys, values = cache.extend(self.layer, k_BHSd, v_BHSd) if cache is not None else ([k_BHSd], [v_BHSd])
        out_BHQd = pattern.attend(q_BHQd, keys, values, self.scale, among_keys(rows, keys, x_BSX))
        out_BQX = out_BHQd.transpose(1, 2).flatten(2)
        return self.o_proj(out_BQX if gate_BQX is None else out_BQX * gate_BQX.sigmoid())

    def queries(self, x_BQX: Tensor) -> tuple[Tensor, Tensor | None]:
        """All heads' queries [B, Q, H·d], and what opens the output by its sigmoid, if anything does."""
        return self.q_proj(x_BQX), None

    def _turned(self, norm: nn.Module, x_BSX: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        return rotated(norm(self._heads(x_BSX)), cos, sin).to(dtype).transpose(1, 2)

    def _heads(self, x_BSX: Tensor) -> Tensor:
        return x_BSX.unflatten(-1, (-1, self.head_dim))


def among_keys(rows: Tensor | int | None, keys: Sequence[Tensor], x_BSX: Tensor) -> Tensor | None:
    """Where the inputs `rows` stand among the keys of the newest entry, which earlier calls may have begun; None: they are the last."""
    before = keys[-1].shape[2] - x_BSX.shape[1]
    return (rows + before if before else rows) if isinstance(rows, Tensor) else None


def rotated(x_BSHd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, H, d] turned by its positions' cos and sin [B, S, r], pairs r/2 apart; where r < d, of the first r (partial rotary)."""
    # transformers' functions turn queries and keys together, which are not of the same rows here, and copy what they turn.
    first, second, rest = x_BSHd.tensor_split([cos.shape[-1] // 2, cos.shape[-1]], dim=-1)
    (cos_1, cos_2), (sin_1, sin_2) = (t[:, :, None].chunk(2, dim=-1) for t in (cos, sin))
    parts = [first * cos_1 - second * sin_1, second * cos_2 + first * sin_2]
    return torch.cat([*parts, rest] if rest.shape[-1] else parts, dim=-1)


_unchosen = torch.no_grad()(unwrap(LlamaRotaryEmbedding.forward))


class DraftRotaryEmbedding(LlamaRotaryEmbedding):
    """Llama's; where the config has an `mrope_section` and tokens are placed in several components, each frequency turns by its own.

    transformers computes the frequencies of a loaded model anew in modules whose class is named so.
    """

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, Q, d] at positions [B, Q], or [C, B, Q] in components."""
        if position_ids.ndim == 2:
            # The short and the long texts' frequencies are one (`rope_of`): to choose, transformers would wait for the positions.
            return _unchosen(self, x, position_ids) if self.rope_type == "longrope" else super().forward(x, position_ids)
        each = [super(DraftRotaryEmbedding, self).forward(x, positions_BQ) for positions_BQ in position_ids]
        cos, sin = (torch.stack(parts) for parts in zip(*each, strict=True))
        component_d = self._components(cos.shape[-1] // 2).repeat(2)[: cos.shape[-1]]
        at = component_d.to(cos.device).expand(1, *cos.shape[1:])
        return cos.gather(0, at)[0], sin.gather(0, at)[0]

    def _components(self, count: int) -> Tensor:
        """Of each of `count` frequencies: those of a section side by side (Qwen2-VL), or in turn as far as they go (Qwen3-VL)."""
        rope: Any = self.config.rope_parameters
        section = torch.tensor(rope["mrope_section"])
        if not rope.get("mrope_interleaved"):
            return torch.arange(len(section)).repeat_interleave(section)
        channel, turn = torch.arange(count), torch.arange(count) % 3
        return torch.where(channel < 3 * section[turn], turn, 0)


def region(owner: nn.Module | Regions, run: Callable[..., T], *args: Any) -> T:
    """`run(*args)`, compiled by its `owner`, or, of a module that is being trained, by its `regions`.

    `run` is a plain function, so that all layers share what was made of it.
    """
    compiler: Any = (owner.regions if owner.training else None) if isinstance(owner, nn.Module) else owner
    out: T = (compiler(run) if compiler else run)(*args)
    return out


def autocasted(x: Tensor) -> Tensor:
    """As products under autocast read it, which remembers its casts of parameters alone: what several of them read is cast once."""
    return x.to(autocast_dtype(x) or x.dtype)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """What products read of x."""
    return autocasted(norm(x))


def take_rows(x_BSX: Any, rows: Tensor | int | None) -> Any:
    """The inputs `rows` [B, Q] of x, or so many of the last, [B, Q, X]; all of them if rows is None."""
    if rows is None:
        return x_BSX
    if isinstance(x_BSX, Lookup | Beside):
        return x_BSX.take(rows)
    if isinstance(rows, int):
        return x_BSX[:, x_BSX.shape[1] - rows :]
    batch, length = x_BSX.shape[:2]
    flat = rows + length * torch.arange(batch, device=rows.device)[:, None]
    # A gather over all features would be scattered back one number at a time, this one row by row.
    return x_BSX.flatten(0, 1).index_select(0, flat.flatten()).unflatten(0, rows.shape)


class _Put(ABC):
    """Stands for a tensor [B, Q, X], `dense`: linear layers use what it is made of, all else reads the tensor."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The tensor itself."""

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear` of the tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and isinstance(args[0], _Put):
            return args[0].linear(*args[1:], **kwargs)
        args, kwargs = tree_map_only(_Put, lambda x: x.dense(), (args, kwargs))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]


@dataclass(eq=False)
class Lookup(_Put):
    """Rows [B, Q] of a table [B, U, X]: tokens that several drafting steps read, or a state that many slots share."""

    table_BUX: Tensor
    rows_BQ: Tensor | None = None
    """None: all, one after the other."""
    known: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What has been worked out of the table, for all who look it up."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, Q, X]."""
        inputs = self.table_BUX if self.rows_BQ is None else self.rows_BQ
        return (*inputs.shape[:2], self.table_BUX.shape[-1])

    def at(self, rows_BQ: Tensor) -> "Lookup":
        """Other rows of the same table."""
        return Lookup(self.table_BUX, rows_BQ, self.known)

    def take(self, rows: Tensor | int) -> "Lookup":
        """See `take_rows`."""
        if isinstance(rows, int):
            last = self.shape[1] - rows
            rows = torch.arange(last, last + rows, device=self.table_BUX.device).expand(len(self.table_BUX), -1)
        return self.at(rows if self.rows_BQ is None else self.rows_BQ.gather(1, rows))

    def each(self, run: Callable[[Tensor], Tensor]) -> "Lookup":
        """After `run`, which treats every row alike."""
        return Lookup(run(self.table_BUX), self.rows_BQ)

    def prepared(self, norm: nn.Module, weights: Iterable[Tensor]) -> "Lookup":
        """After `norm`, with the products by `weights` [Y, X + Z] as far as it is their first X columns, for `Beside`.

        Worked out at the first call, for all who look up this table.
        """
        if norm not in self.known:
            table_BUX: Tensor = checkpoint(partial(normed, norm), self.table_BUX, use_reentrant=False, preserve_rng_state=False)
            self.known[norm] = table_BUX, {weight: _halves(table_BUX, weight) for weight in weights}
        table_BUX, products = self.known[norm]
        return Lookup(table_BUX, self.rows_BQ, products)

    def dense(self) -> Tensor:
        """See `_Put`."""
        out: Tensor = take_rows(self.table_BUX, self.rows_BQ)
        return out

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `_Put`."""
        out: Tensor = take_rows(F.linear(self.table_BUX, weight, bias), self.rows_BQ)
        return out


@dataclass(eq=False)
class Beside(_Put):
    """Two inputs side by side, the first looked up: [B, Q, X + Z]."""

    first: Lookup
    second: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, Q, X + Z]."""
        return (*self.first.shape[:2], self.first.shape[-1] + self.second.shape[-1])

    def take(self, rows: Tensor | int) -> "Beside":
        """See `take_rows`."""
        return Beside(self.first.take(rows), take_rows(self.second, rows))

    def dense(self) -> Tensor:
        """See `_Put`."""
        return torch.cat([self.first.dense(), self.second.dense() if isinstance(self.second, _Put) else self.second], dim=-1)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `_Put`: the sum of both halves' products."""
        table_BUY, second_YZ = self.first.known.get(weight) or _halves(self.first.table_BUX, weight)
        out: Tensor = take_rows(table_BUY, self.first.rows_BQ) + F.linear(self.second, second_YZ, bias)
        return out


def _halves(table_BUX: Tensor, weight_YX: Tensor) -> tuple[Tensor, Tensor]:
    """The product of the table and the first columns, and the columns that are left."""
    first, second = weight_YX.tensor_split([table_BUX.shape[-1]], dim=1)
    return F.linear(table_BUX, first), autocasted(second)
