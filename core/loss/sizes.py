"""How much of the loss is alive at a time."""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_fake(tensor: Tensor) -> bool:
    """Fake tensors hold no values, and stand for those of a GPU: a step that is run on them is counted, whatever machine counts."""
    return isinstance(tensor, FakeTensor)


def in_cache(tensor: Tensor) -> bool:
    """Whether pieces should fit a CPU's cache; a GPU wants few launches."""
    return tensor.device.type == "cpu" and not is_fake(tensor)
