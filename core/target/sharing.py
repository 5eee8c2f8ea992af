"""A target whose layers are shared among ranks (tensor parallelism): all must run it over the same batch."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map


def in_turn(model: nn.Module, batch: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Each batch that is to be run through the target, and whether it is this rank's own.

    That is `batch` alone, unless ranks share the target: then those of all, in their order, on the CPU. They must ask equally often.
    """
    sharded = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    if sharded is None:
        yield dict(batch), True
        return
    group = sharded.device_mesh.get_group()
    own, parts = dist.get_rank(group), [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, dict(batch)), group)
    for rank, part in enumerate(parts):
        assert part is not None
        yield part, rank == own
