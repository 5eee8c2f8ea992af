"""A draft whose parameters are shared out among ranks (FSDP2), as one unit: its losses read the head beside the layers."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from ..draft.model import BaseDraft


def shard(draft: BaseDraft, device: torch.device, bf16: bool) -> None:
    """Share out the trained parameters of `draft`, on `device`; they are gathered once a step, and stay so until the backward pass.

    With `bf16` they are gathered in bfloat16, and their gradients summed in float32. Frozen ones are on every rank.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if bf16 else MixedPrecisionPolicy()
    fully_shard(
        draft.to(device),
        mesh=init_device_mesh(device.type, (dist.get_world_size(),)),
        reshard_after_forward=False,
        mp_policy=policy,
        ignored_params={p for p in draft.parameters() if not p.requires_grad},
    )
    draft.register_load_state_dict_pre_hook(_share_out)


def whole(state: Any, kept: bool) -> Any:
    """A state dict of shared tensors with each of them whole, on the CPU; all ranks must call, those that do not keep it get none."""

    def gathered(value: Any) -> Any:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.cpu() if kept and isinstance(value, Tensor) else value if kept else None

    return tree_map(gathered, state)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share_out_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A whole optimizer's state, as saved by any number of ranks, as this rank's part of it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parts = {
        i: {name: _as(value, parameters[i]) if isinstance(value, Tensor) else value for name, value in values.items()}
        for i, values in state["state"].items()
    }
    return {**state, "state": parts}


def _share_out(draft: Any, state: dict[str, Any], *_: Any) -> None:
    """Before whole tensors are loaded."""
    for name, own in (*draft.named_parameters(), *draft.named_buffers()):
        if name in state:
            state[name] = _as(state[name], own)


def _as(tensor: Tensor, own: Tensor) -> Tensor:
    """Shared out as `own` is, if it is of its shape: counters are not."""
    if not isinstance(own, DTensor) or isinstance(tensor, DTensor) or tensor.shape != own.shape:
        return tensor
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements)
