"""Tensors that a draft does not have to itself: parameters shared out among ranks (FSDP2), and what is lent to it by its target.

It is shared out as one unit: its losses read the head beside the layers.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel, TrainerCallback

from ..draft.model import BaseDraft
from ..target.weights import is_plain


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


class Borrow(TrainerCallback):
    """Puts the target's embedding and head in place of the draft's copies, once a checkpoint is loaded into these.

    They must be frozen, on one device and of the same values; in the draft's own dtype, or in the one that `products` are taken in
    (autocast), which they would be cast to. Copies come back by `give_back`, so that whatever is done to the draft later stays its own.
    """

    def __init__(self, target: PreTrainedModel, products: torch.dtype | None):
        self._theirs = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}
        self._products = products
        self._lent: dict[str, tuple[Any, torch.dtype, Any]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """After the checkpoint is loaded."""
        for name, theirs in self._theirs.items():
            module, weight = getattr(model, name), getattr(theirs, "weight", None)
            if weight is not None and self._may_stand_for(weight, module.weight):
                dtype, hook = module.weight.dtype, None
                if name == "embed_tokens" and weight.dtype != dtype:
                    hook = module.register_forward_hook(lambda module, given, out, dtype=dtype: out.to(dtype))
                self._lent[name] = module, dtype, hook
                module.weight = nn.Parameter(weight.detach(), requires_grad=False)

    def _may_stand_for(self, theirs: Tensor, own: Tensor) -> bool:
        there = is_plain(theirs) and not own.requires_grad and theirs.device == own.device and theirs.shape == own.shape
        return there and theirs.dtype in (own.dtype, self._products) and torch.equal(theirs.to(own.dtype), own)

    def own(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of the draft with what is borrowed in the draft's dtype, as it is saved."""
        lent = {f"{name}.weight": dtype for name, (_, dtype, _) in self._lent.items()}
        return {name: t.to(lent[name]) if name in lent and t is not None else t for name, t in state.items()}

    def give_back(self) -> None:
        """The draft has copies again."""
        for module, dtype, hook in self._lent.values():
            module.weight = nn.Parameter(module.weight.detach().to(dtype, copy=True), requires_grad=False)
            if hook is not None:
                hook.remove()
        self._lent.clear()
