"""A target whose layers are shared among ranks (tensor parallelism): all must run it over the same batch."""

from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Part = dict[str, Tensor]


def in_turn(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[tuple[Part, bool]]:
    """Each batch that is to be run through the target, and whether it is this rank's own.

    That is `batch` alone, unless ranks share the target: then those of all, in their order, on the CPU. They must ask equally often.
    """
    sharded = next((p for p in model.parameters() if isinstance(p, DTensor)), None)
    if sharded is None:
        yield dict(batch), True
        return
    group = sharded.device_mesh.get_group()
    own, parts = dist.get_rank(group), [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, {name: tensor.cpu() for name, tensor in batch.items()}, group)
    for rank, part in enumerate(parts):
        assert part is not None
        yield part, rank == own
