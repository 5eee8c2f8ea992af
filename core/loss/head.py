"""The draft's head as the loss runs it: logits of some rows, and the way back, gradients summed in float32."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..contracts.draft import DraftModel


class Head(Protocol):
    """Runs rows forth and back, in turn."""

    gradients: list[Tensor]
    """Of the head's trained parameters so far."""

    def logits(self, states_ND: Tensor) -> Tensor:
        """Of some rows, [N, W]."""
        ...

    def back(self, d_logits_NW: Tensor) -> Tensor:
        """The gradient by the states of the latest rows, [N, D]; those of the parameters are added to `gradients`."""
        ...


def head_of(draft: DraftModel, parameters: list[Tensor], wanted: bool) -> Head:
    """The draft's head, whose trained `parameters` are wanted in that order; `wanted`: whether there is a way back at all."""
    parts = draft.head_parts()
    if parts is None:
        return AnyHead(draft.compute_logits, parameters, wanted)
    return MatrixHead(*parts, parameters, wanted)


class AnyHead:
    """A head of which nothing is known: autograd finds the way back."""

    def __init__(self, compute_logits: Callable[[Tensor], Tensor], parameters: list[Tensor], wanted: bool):
        self._compute, self._parameters, self._wanted = compute_logits, parameters, wanted
        self.gradients = [_zeros(p) for p in parameters]

    def logits(self, states_ND: Tensor) -> Tensor:
        """See `Head`."""
        with torch.set_grad_enabled(self._wanted):
            self._states_ND = states_ND.detach().requires_grad_(self._wanted)
            self._logits_NW = self._compute(self._states_ND[:])  # no leaf: hooks of FlopCounterMode cannot stand on one
        return self._logits_NW.detach().clone()  # what is written into it, the way back must not see

    def back(self, d_logits_NW: Tensor) -> Tensor:
        """See `Head`."""
        # A rider is among the parameters, whether or not these states carry something for it.
        inputs = [self._states_ND, *self._parameters]
        d_states_ND, *found = torch.autograd.grad(self._logits_NW, inputs, d_logits_NW, materialize_grads=True)
        del self._logits_NW
        for total, d in zip(self.gradients, found, strict=True):
            total += d
        return d_states_ND


class MatrixHead:
    """Something cheap over D features (a norm, nothing), then a matrix, whose way back is two products added up in place.

    What states carry behind these features goes through the `rider` alone. Under autocast the matrices are cast once for all rows.
    """

    def __init__(
        self, before: Callable[[Tensor], Tensor], linear: nn.Linear, rider: nn.Linear | None, parameters: list[Tensor], wanted: bool
    ):
        dtype = autocast_dtype(linear.weight) or linear.weight.dtype
        self._before, self._wanted, self._width = before, wanted, linear.in_features
        self._weight_WD = linear.weight.detach().to(dtype)
        self._rider_Wr = None if rider is None else rider.weight.detach().to(dtype)
        self._bias_W = None if linear.bias is None else linear.bias.detach().to(dtype)
        self.gradients = [_zeros(p) for p in parameters]
        found = {id(p): total for p, total in zip(parameters, self.gradients, strict=True)}
        self._d_weight_WD, self._d_bias_W = found.pop(id(linear.weight), None), found.pop(id(linear.bias), None)
        self._d_rider_Wr = None if rider is None else found.pop(id(rider.weight), None)
        self._others = [(p, found[id(p)]) for p in parameters if id(p) in found]

    def logits(self, states_ND: Tensor) -> Tensor:
        """See `Head`."""
        with torch.set_grad_enabled(self._wanted):
            self._states_ND = states_ND.detach().requires_grad_(self._wanted)
            self._hidden_ND = self._before(self._states_ND[:, : self._width])  # no leaf: hooks of FlopCounterMode cannot stand on one
        self._read_ND, self._carried_Nr = (x.detach().to(self._weight_WD.dtype) for x in (self._hidden_ND, states_ND[:, self._width :]))
        with torch.autocast(self._weight_WD.device.type, enabled=False):
            logits_NW = nn.functional.linear(self._read_ND, self._weight_WD, self._bias_W)
            return logits_NW if self._rider_Wr is None or not self._carries else logits_NW.addmm_(self._carried_Nr, self._rider_Wr.T)

    @property
    def _carries(self) -> bool:
        return self._carried_Nr.shape[1] > 0

    def back(self, d_logits_NW: Tensor) -> Tensor:
        """See `Head`."""
        with torch.autocast(self._weight_WD.device.type, enabled=False):
            if self._d_weight_WD is not None:
                add_product(self._d_weight_WD, d_logits_NW.T, self._read_ND)
            if self._d_bias_W is not None:
                self._d_bias_W += d_logits_NW.sum(0, dtype=self._d_bias_W.dtype)
            d_hidden_ND = (d_logits_NW @ self._weight_WD).to(self._hidden_ND.dtype)
            d_carried_Nr = None if self._rider_Wr is None or not self._carries else d_logits_NW @ self._rider_Wr
            if self._d_rider_Wr is not None and self._carries:
                add_product(self._d_rider_Wr, d_logits_NW.T, self._carried_Nr)
        d_states_ND, *found = torch.autograd.grad(self._hidden_ND, [self._states_ND, *(p for p, _ in self._others)], d_hidden_ND)
        del self._hidden_ND
        if d_carried_Nr is not None:
            d_states_ND[:, self._width :] = d_carried_Nr
        for (_, total), d in zip(self._others, found, strict=True):
            total += d
        return d_states_ND


def is_fake(tensor: Tensor) -> bool:
    """Fake tensors hold no values, and stand for those of a GPU: a step that is run on them is counted, whatever machine counts."""
    return isinstance(tensor, FakeTensor)


def in_cache(tensor: Tensor) -> bool:
    """Whether pieces should fit a CPU's cache; a GPU wants few launches."""
    return tensor.device.type == "cpu" and not is_fake(tensor)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """In what autocast runs products of x's device; None: there is none."""
    device = x.device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if casts else None


def add_product(total_WD: Tensor, left_WN: Tensor, right_ND: Tensor) -> None:
    """total += left @ right, in the total's precision: a sum kept in bfloat16 loses what is added last."""
    if total_WD.dtype == left_WN.dtype:
        torch.addmm(total_WD, left_WN, right_ND, out=total_WD)
    elif total_WD.is_cuda and total_WD.dtype == torch.float32:
        torch.addmm(total_WD, left_WN, right_ND, out_dtype=torch.float32, out=total_WD)
    else:
        total_WD += left_WN @ right_ND


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
