"""A target's matrices and norms, wherever its parts are: offloaded, sharded over ranks, packed by a quantiser."""

from collections.abc import Callable
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
    """The matrix [out, in] of a projection, or [V, T] of an embedding, whole.

    Of one that is quantised, or has an adapter beside it (LoRA), what the module itself makes of one-hot rows, in `dtype`. Raises
    `ForedraftError` for a module that does not run here, or that is no projection.
    """
    weight = own_tensors(module).get("weight")
    if weight is not None and is_plain(weight) and not weight.is_meta:
        return weight
    kind = type(module).__name__
    if not hasattr(module, "in_features") and not _looks_up(module):
        raise ForedraftError(f"the target's {kind} is quantised, and neither an embedding nor a projection: a draft cannot start from it")
    try:
        return _rows(module, dtype) if _looks_up(module) else _columns(module, slice(None), dtype).T
    except Exception as error:  # quantisers raise anything where their kernels do not run
        raise ForedraftError(
            f"the target's {kind} is quantised, and does not run here: {type(error).__name__}: {str(error)[:200]}\n"
            "  Load it where it runs, or dequantised (quantization: {quant_method: ..., dequantize: true}, where the method has that)"
        ) from error


def known_ids(embedding: Any) -> int:
    """How many ids it has a row for, however they are stored."""
    return next((m.num_embeddings for m in embedding.modules() if isinstance(m, nn.Embedding)), 0) or len(embedding.weight)


def corner_of(module: Any, pick: Callable[[torch.Size], tuple[list[int], list[int]]]) -> Tensor | None:
    """Some numbers of the matrix that a projection multiplies by, with the adapter beside it: those rows and columns that `pick` says of
    its shape. None if it is quantised."""
    base = own_tensors(getattr(module, "base_layer", module)).get("weight")
    if base is None or not is_plain(base) or base.is_meta or base.ndim != 2:
        return None
    rows, columns = pick(base.shape)  # ranks that share a module may call its part of them its features
    return (base[:, columns] if not hasattr(module, "base_layer") else _columns(module, columns, base.dtype).T)[rows]


def is_plain(weight: Any) -> bool:
    """Whether a weight is kept as it is: quantisers keep integers, subclasses of Tensor, or parts under other names."""
    return type(weight) in (Tensor, nn.Parameter) and weight.dtype in FLOATS


def norm_behind(decoder: nn.Module) -> nn.Module | None:
    """The norm behind the last layer, by its vector of weights; some families have another one behind their embedding."""
    return next((m for m in reversed(list(decoder.children())) if getattr(getattr(m, "weight", None), "ndim", 0) == 1), None)


@torch.no_grad()
def norm_scale(norm: nn.Module) -> Tensor:
    """What a norm multiplies each normed feature by, [D]; asked of the norm itself, since Gemma's keep it less one."""
    weight = own_tensors(norm)["weight"]
    signs = torch.ones_like(weight)
    signs[1::2] = -1
    loud = 4096 * signs  # RMS and deviation are a power of two that drowns epsilon; a mean is 0, a bias drops out below
    return (norm(loud) - norm(-loud)) / 2 * signs


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor is kept in: several where a quantiser has packed it."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return [part for name in names for part in parts_of(getattr(tensor, name))] or [tensor]


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _looks_up(module: nn.Module) -> bool:
    """Whether it is an embedding, perhaps with an adapter around it."""
    return any(isinstance(part, nn.Embedding) for part in module.modules())


def _columns(projection: Any, columns: list[int] | slice, dtype: torch.dtype) -> Tensor:
    """Some columns [columns, out] of the matrix by which any projection multiplies, however it is stored, less its bias."""
    eye = torch.eye(projection.in_features, dtype=dtype, device=_device_of(projection))[columns]
    return projection(eye) - projection(torch.zeros_like(eye[:1]))


def _rows(embedding: Any, dtype: torch.dtype) -> Tensor:
    """The rows [V, T] that any embedding looks up, however they are stored; families that multiply them (Gemma) do so behind the table."""
    scale = next((m.embed_scale for m in embedding.modules() if hasattr(m, "embed_scale")), 1.0)
    return (embedding(torch.arange(known_ids(embedding), device=_device_of(embedding))) / scale).to(dtype)


def _device_of(module: nn.Module) -> torch.device | None:
    return next((t.device for t in (*module.parameters(), *module.buffers()) if not t.is_meta), None)
