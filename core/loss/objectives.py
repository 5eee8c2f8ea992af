"""Objectives by name, alone or as a weighted sum; cross-entropy, the default."""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import AfterValidator
from torch import Tensor

from ..contracts.objective import ObjectiveBase
from ..errors import ForedraftError
from ..registry import default_registry


class CrossEntropy(ObjectiveBase):
    """-Σ p log q. KL divergence is this less the teacher's entropy, a constant: its gradient is the same."""

    name = "ce"
    summary = "cross-entropy against the teacher"

    def loss(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor) -> Tensor:
        """See `ObjectiveBase`."""
        return -(p_NW * log_q_NW).sum(-1)

    def differentiated(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
        """See `ObjectiveBase`."""
        return self.loss(log_q_NW, p_NW, mass_N), -weight_N[:, None] * p_NW


class Weighted(ObjectiveBase):
    """A sum of objectives, each with a weight."""

    name = "weighted"

    def __init__(self, parts: Mapping[ObjectiveBase, float]):
        self.parts = parts

    def loss(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor) -> Tensor:
        """See `ObjectiveBase`."""
        return torch.stack([weight * part.loss(log_q_NW, p_NW, mass_N) for part, weight in self.parts.items()]).sum(0)

    def differentiated(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
        """Each part's own."""
        both = [(w, *part.differentiated(log_q_NW, p_NW, mass_N, weight_N)) for part, w in self.parts.items()]
        return torch.stack([w * loss_N for w, loss_N, _ in both]).sum(0), sum(w * d_NW for w, _, d_NW in both)  # type: ignore[return-value]


def objective(asked: str | Mapping[str, float]) -> ObjectiveBase:
    """The installed objective of this name, or the sum of several with weights. Raises `ForedraftError` for unknown names."""
    if isinstance(asked, str):
        return default_registry().objective(asked)()
    return Weighted({objective(name): weight for name, weight in asked.items()})


def _known(asked: Any) -> Any:
    try:
        objective(asked)
    except ForedraftError as error:
        raise ValueError(str(error)) from error
    return asked


Loss = Annotated[str | dict[str, float], AfterValidator(_known)]
"""The option of an algorithm that lets its users choose: the name of an objective, or {name: weight}."""
