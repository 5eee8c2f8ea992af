"""A target's matrices, wherever its parts are: offloaded, sharded over ranks, packed by a quantiser."""

from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import ForedraftError

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """What a module itself saves, by name: fetched where it is offloaded, gathered by all ranks where it is sharded."""
    with align_module_device(module):
        kept = [n for n in module._buffers if n not in module._non_persistent_buffers_set]
        found = {**module._parameters, **{name: module._buffers[name] for name in kept}}
        return {name: _gathered(t.detach()) for name, t in found.items() if t is not None}


def matrix_of(module: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix [out, in] of a projection, or [V, T] of an embedding, whole; packed ones by multiplying in `dtype`.

    Raises `ForedraftError` for an embedding that is packed.
    """
    weight = own_tensors(module).get("weight")
    if weight is not None and is_plain(weight) and not weight.is_meta:
        return weight
    if not hasattr(module, "in_features"):
        raise ForedraftError(
            f"the target's {type(module).__name__} is quantised, and a draft takes over its rows: quantise projections alone"
        )
    return _asked(module, dtype)


def runs_on(module: nn.Module) -> torch.device:
    """Where a module multiplies; of one that is offloaded, where its tensors are fetched to."""
    fetched_to = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return next(module.parameters()).device if fetched_to is None else torch.device(fetched_to)


def home_of(model: Any) -> torch.device:
    """Where a target reads its ids; parts of it may be elsewhere."""
    return runs_on(model.get_input_embeddings())


def is_sharded(module: nn.Module) -> bool:
    """Whether ranks keep a part each, so that all must run it together."""
    return any(isinstance(p, DTensor) for p in module.parameters())


def is_settled(model: nn.Module) -> bool:
    """Whether its parts were put where they are for a reason, so that it must not be moved: by a device map, a quantiser, over ranks."""
    return hasattr(model, "hf_device_map") or getattr(model, "hf_quantizer", None) is not None or is_sharded(model)


def is_plain(weight: Any) -> bool:
    """Whether a weight is kept as it is: quantisers keep integers, subclasses of Tensor, or parts under other names."""
    return type(weight) in (Tensor, nn.Parameter) and weight.dtype in FLOATS


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor is kept in: several where a quantiser has packed it."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return [part for name in names for part in parts_of(getattr(tensor, name))] or [tensor]


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _asked(projection: Any, dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] by which any projection multiplies, however it is stored: what it makes of the identity, less its bias."""
    device = next((t.device for t in (*projection.parameters(), *projection.buffers()) if not t.is_meta), None)
    eye = torch.eye(projection.in_features, dtype=dtype, device=device)
    return (projection(eye) - projection(torch.zeros_like(eye[:1]))).T
