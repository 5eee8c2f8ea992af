"""Whether a draft is sound, before it is served: `foredraft doctor`."""

from .checkpoint import Checkpoint, TensorInfo
from .finding import Finding

__all__ = ["Checkpoint", "Finding", "TensorInfo"]
