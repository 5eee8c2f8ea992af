"""What lies between a layer's products (norms, rotation, merges), each compiled by itself where its draft is."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

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
