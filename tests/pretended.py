"""CUDA devices that are not there: tensors whose values the CPU holds, and the rule by which CUDA refuses operands that lie elsewhere.

Inside `pretended()` all that Python does runs with its values, chooses what it would choose on CUDA, and raises where two devices meet.
The kernels are the CPU's: of those that CUDA alone has, these stand in, and no speed is measured.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from foredraft.draft.attention import kernels, patterns, unrolled
from foredraft.draft.attention.masked import dense_mask
from foredraft.loss import chunks
from foredraft.target import segments, weights

aten = torch.ops.aten
CPU = torch.device("cpu")
MOVES = {Tensor.cuda: torch.device("cuda", 0), Tensor.cpu: CPU, Tensor.to: None}
BY_INDICES = {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""Their indices may lie on the CPU."""
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default}


class There(Tensor):
    """A tensor on a pretended device: torch takes it for the CPU's, Python is told otherwise."""

    held: Tensor
    at: torch.device | None
    """None: autograd's own zeros, which are where they are wanted."""

    @staticmethod
    def __new__(cls, held: Tensor, at: torch.device | None) -> "There":
        """As large as `held`, and laid out as it is."""
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype, "device": CPU}
        return Tensor._make_wrapper_subclass(cls, held.shape, **layout)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, held: Tensor, at: torch.device | None):
        """Values that the CPU holds."""
        self.held, self.at = held, at

    device = property(lambda self: self.at or torch.device("cuda", 0))
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __repr__(self, **_: Any) -> str:
        return f"{self.held!r} on {self.at}"

    def numpy(self, **_: Any) -> Any:
        """Refused, as CUDA's are."""
        raise TypeError(f"can't convert {self.at} device type tensor to numpy")

    def untyped_storage(self) -> torch.UntypedStorage:
        """For those who ask which tensors share one."""
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        """See `untyped_storage`."""
        return self.held.data_ptr()

    def __deepcopy__(self, known: Any) -> "There":
        """There, too."""
        return known.setdefault(id(self), There(self.held.clone(), self.at))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file holds values, and is read to where they are asked for."""
        return self.held.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func}: outside of pretended()")


class Operators(TorchDispatchMode):
    """Runs each on the values, and gives its results the device of its operands, or the one that was asked for."""

    def __init__(self) -> None:
        """Nothing is waited for yet."""
        super().__init__()
        self.moving = False
        self.within = False
        self.on_cpu = False  # a way back that begins there
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [x for x in operands if isinstance(x, There)]
        moving, self.moving = self.moving, False
        asked = kwargs.get("device")
        fetched = (moving and asked == CPU) or (func is aten.copy_.default and not isinstance(args[0], There))
        self.waits += bool(there) and (func in WAITS or fetched)
        behind = self.within or (torch._C._current_graph_task_id() != -1 and not self.on_cpu)
        if behind or not moving:  # torch itself takes all of this for the CPU's
            asked = None if asked == CPU and (there or behind) else asked
        if asked is None:
            asked = self._place(func, args, operands) if there or behind else CPU
        if "device" in kwargs:
            kwargs["device"] = CPU
        values, named = tree_map_only(There, lambda x: x.held, (args, kwargs))
        out = STAND_INS.get(func, func)(*values, **named)
        if func is aten.copy_.default:
            return args[0]
        if asked == CPU:
            return out
        if func is aten._to_copy.default and out is values[0]:
            out = out.clone()
        wrapped = tree_map_only(Tensor, lambda x: There(x, asked), out)
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if there and not moving else wrapped

    @staticmethod
    def _place(func: Any, args: Any, operands: list[Tensor]) -> torch.device | None:
        """Where all operands are, but for numbers; raises what CUDA would."""
        if func in BY_INDICES:
            operands = [x for x in (args[0], *args[2:3]) if isinstance(x, Tensor)]
        places = {x.at if isinstance(x, There) else CPU for x in operands if isinstance(x, There) or x.ndim} - {None}
        if len(places) > 1 and func is not aten.copy_.default:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {places} in {func}")
        return next(iter(places), None)


class Calls(TorchFunctionMode):
    """What torch would decide by a device that it takes for the CPU, or by one that it looks for."""

    def __init__(self, operators: Operators):
        """`operators`: which is told that a tensor is moved on purpose."""
        super().__init__()
        self.operators = operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.device, _indexed, (args, dict(kwargs or {})))
        if isinstance(kwargs.get("device"), str | int):
            kwargs["device"] = _indexed(torch.device(kwargs["device"]))
        if func in MOVES:
            return self._moved(args[0], *args[1:], **{"device": MOVES[func], **kwargs})
        if func in (Tensor.pin_memory, Tensor.is_pinned):
            return args[0] if func is Tensor.pin_memory else False
        if func is Tensor.tolist and isinstance(args[0], There):
            self.operators.waits += 1
            return args[0].held.tolist()
        if func is Tensor.new_tensor:
            func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and (kwargs.get("device") or CPU) != CPU:
            return self._moved(func(*args, **{**kwargs, "device": None}), kwargs["device"])
        operators, there = self.operators, any(isinstance(x, There) for x in tree_leaves((args, kwargs)))
        before, operators.within, operators.on_cpu = (operators.within, operators.on_cpu), there, not there and func is Tensor.backward
        try:
            return func(*args, **kwargs)
        finally:
            operators.within, operators.on_cpu = before

    def _moved(self, x: Tensor, *args: Any, dtype: Any = None, device: Any = None, copy: bool = False, **rest: Any) -> Tensor:
        """`Tensor.to`, in all its spellings."""
        for arg in args:
            if isinstance(arg, Tensor):
                device, dtype = arg.device, arg.dtype
            elif isinstance(arg, torch.dtype):
                dtype = arg
            elif not isinstance(arg, bool | None):
                device = _indexed(torch.device(arg))
        device, dtype = device or x.device, dtype or x.dtype
        if not copy and (device, dtype) == (x.device, x.dtype):
            return x
        self.operators.moving = True
        layout = {"memory_format": rest["memory_format"]} if rest.get("memory_format") else {}
        return aten._to_copy.default(x, dtype=dtype, device=device, **layout)


class Flash(kernels.Eager):
    """In place of CUDA's: what these ask for is checked."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bounds: kernels.Bounds, scale: float) -> tuple[Tensor, Tensor]:
        """See `kernels`."""
        assert q.dtype == k.dtype == v.dtype in (torch.bfloat16, torch.float16)
        assert bounds.cu_q.dtype == bounds.cu_k.dtype == torch.int32
        assert bounds.cu_k.ndim == 1
        return kernels.Eager.forward(q, k, v, bounds, scale)


class VarlenFlex:
    """In place of FlexAttention's."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, bounds: kernels.Bounds, scale: float, wanted: bool):
        """See `flex`."""
        self.out, self.lse = unrolled.varlen(q, k, v, *bounds, scale, "eager")
        self.rest = (*bounds, scale, "eager")

    def back(self, *given: Tensor) -> Any:
        """See `flex`."""
        return unrolled.varlen_backward(*given, *self.rest)


class Generator(torch.Generator):
    """The CPU's, whatever device it is for."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        """As the CPU's is made."""
        return super().__new__(cls)


def _sum_of_halves(total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return torch.addmm(total, left.to(out_dtype), right.to(out_dtype), out=out)


def _flex(q: Tensor, k: Tensor, v: Tensor, sees: Any, rows_BQ: Tensor, table: Any, scale: float) -> Tensor:
    mask = dense_mask(sees, rows_BQ, k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _count(x: Tensor, *bins: int) -> Tensor:
    return torch.histc(x.float(), *bins).to(x.dtype)


STAND_INS: dict[Any, Any] = {aten.addmm.dtype_out: _sum_of_halves, aten.histc.default: _count}


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


def _run_by(device_type: str) -> str:
    return device_type.replace("cuda", "cpu")


@contextmanager
def pretended(capability: tuple[int, int] = (9, 0), devices: int = 1) -> Iterator[Operators]:
    """CUDA is there, and the default wherever a program looks for it. What it gives counts how often the host `waits` for a device."""
    load, as_it_is, with_autocast = transformers.PreTrainedModel.from_pretrained.__func__, weights.is_plain, torch.autocast.__init__

    def loaded(cls: Any, *args: Any, device_map: Any = None, **kwargs: Any) -> Any:
        """By threads, which know nothing of this; then moved, also what would stay on disk."""
        model = load(cls, *args, **kwargs)
        places = device_map.values() if isinstance(device_map, dict) else [] if device_map is None else ["cuda"]
        places = [torch.device("cuda", place) if isinstance(place, int) else place for place in places]
        return next((model.to(place) for place in places if str(place) != "disk"), model)

    def by_documents(*given: Any) -> Tensor:
        """As a kernel for CUDA does, which reads the documents' ends where they are."""
        before = operators.waits
        out = segments._emulated(*given)
        operators.waits = before
        return out

    with pytest.MonkeyPatch.context() as patch:
        said = {
            "is_available": True,
            "device_count": devices,
            "current_device": 0,
            "get_device_capability": capability,
            "get_device_name": "pretended",
            "is_bf16_supported": True,
            "mem_get_info": (80 << 30, 80 << 30),
            "is_current_stream_capturing": False,
            **dict.fromkeys(("_lazy_init", "synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all"), None),
            **dict.fromkeys(("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"), 0),
        }
        for name, answer in said.items():
            patch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
        for name in ("get_rng_state", "set_rng_state"):
            patch.setattr(torch.cuda.random, name, lambda *_: torch.zeros(1, dtype=torch.uint8))
        stream = SimpleNamespace(is_capturing=lambda: False)
        accelerator = {"is_available": True, "current_accelerator": torch.device("cuda"), "current_stream": stream, "synchronize": None}
        for name, answer in accelerator.items():
            patch.setattr(torch.accelerator, name, lambda *_, answer=answer, **__: answer)
        patch.setattr(torch.autocast, "__init__", lambda self, device_type, *a, **k: with_autocast(self, _run_by(device_type), *a, **k))
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            patch.setattr(torch, name, lambda device_type="cpu", of=getattr(torch, name): of(_run_by(device_type)))
        for module in [m for name, m in sys.modules.items() if name.startswith("foredraft") and vars(m).get("is_plain") is as_it_is]:
            patch.setattr(module, "is_plain", lambda weight: as_it_is(getattr(weight, "held", weight)))
        patch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(loaded))
        patch.setitem(kernels.KERNELS, "flash", Flash)
        patch.setattr(segments, "_flash", by_documents)
        patch.setattr(patterns, "masked_flex", _flex)
        patch.setattr(unrolled, "VarlenFlex", VarlenFlex)
        patch.setattr(chunks, "find_spec", lambda _: None)  # no Triton
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(torch.backends.cudnn, "is_acceptable", lambda _: False)
        swapped = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with (operators := Operators()), Calls(operators):
                yield operators
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swapped)
