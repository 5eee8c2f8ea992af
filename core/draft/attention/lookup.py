"""Inputs put together of rows that repeat: what is linear in them is worked out once per row, not once per use.

And what lies between a layer's products (norms, rotation, merges), each compiled by itself where its draft is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from ...loss.chunks import autocast_dtype


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


def autocasted(x: Tensor) -> Tensor:
    """As products under autocast read it, which remembers its casts of parameters alone: what several of them read is cast once."""
    return x.to(autocast_dtype(x) or x.dtype)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """What products read of x."""
    return autocasted(norm(x))


T = TypeVar("T")
Regions = Callable[[Callable[..., Any]], Callable[..., Any]] | None
"""What compiles a function; None: nothing is compiled."""


def region(owner: nn.Module | Regions, run: Callable[..., T], *args: Any) -> T:
    """`run(*args)`, compiled by its `owner`, or, of a module that is being trained, by its `regions`.

    `run` is a plain function, so that all layers share what was made of it.
    """
    compiler: Any = (owner.regions if owner.training else None) if isinstance(owner, nn.Module) else owner
    out: T = (compiler(run) if compiler else run)(*args)
    return out
