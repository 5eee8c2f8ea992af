"""Objectives by name, alone or as a weighted sum; and what the acceptance of steps promises."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Annotated, Any

import torch
from pydantic import AfterValidator
from torch import Tensor

from ..contracts.objective import Cost, ObjectiveBase, RowObjective, Sums
from ..errors import ForedraftError
from ..registry import default_registry


class Weighted(ObjectiveBase):
    """A sum of objectives, each with a weight."""

    name = "weighted"

    def __init__(self, parts: Mapping[ObjectiveBase, float]):
        self.parts, self.needs_teacher = parts, any(part.needs_teacher for part in parts)

    def loss(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor) -> Tensor:
        """See `ObjectiveBase`."""
        return torch.stack([weight * part.loss(log_q_NW, p_NW, mass_N) for part, weight in self.parts.items()]).sum(0)

    def differentiated(self, log_q_NW: Tensor, p_NW: Tensor, mass_N: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
        """Each part's own."""
        both = [(w, *part.differentiated(log_q_NW, p_NW, mass_N, weight_N)) for part, w in self.parts.items()]
        return torch.stack([w * loss_N for w, loss_N, _ in both]).sum(0), sum(w * d_NW for w, _, d_NW in both)  # type: ignore[return-value]


class WeightedRows(RowObjective):
    """A sum of `RowObjective`s, each with a weight: one of them again."""

    name = "weighted_rows"

    def __init__(self, parts: Mapping[RowObjective, float]):
        self.parts, self.needs_teacher = parts, any(part.needs_teacher for part in parts)

    def of(self, sums: Sums) -> Cost:
        """See `RowObjective`."""
        costs = [(weight, part.of(sums)) for part, weight in self.parts.items()]

        def total(name: str) -> Any:
            terms = [weight * getattr(cost, name) for weight, cost in costs if getattr(cost, name) is not None]
            return torch.stack(terms).sum(0) if terms else None

        return Cost(*(total(field.name) for field in fields(Cost)))


def objective(asked: str | Mapping[str, float]) -> ObjectiveBase:
    """The installed objective of this name, or the sum of several with weights. Raises `ForedraftError` for unknown names."""
    if isinstance(asked, str):
        return default_registry().objective(asked)()
    parts: dict[Any, float] = {objective(name): weight for name, weight in asked.items()}
    if all(map(RowObjective.by_rows, parts)):
        return WeightedRows(parts)
    if alone := [part.name for part in parts if not part.needs_teacher]:
        raise ForedraftError(f"loss {dict(asked)}: '{alone[0]}' reads the text, which no sum with an objective over whole rows is told of")
    return Weighted(parts)


def _known(asked: Any) -> Any:
    try:
        objective(asked)
    except ForedraftError as error:
        raise ValueError(str(error)) from error
    return asked


Loss = Annotated[str | dict[str, float], AfterValidator(_known)]
"""The option of an algorithm that lets its users choose: the name of an objective, or {name: weight}."""


class Minimising:
    """What algorithms share that let their users choose: `class Mine(AlgorithmBase[MyOptions], Minimising)` with an option `loss: Loss`."""

    options: Any

    @cached_property
    def objective(self) -> ObjectiveBase:
        """What is minimised; looked up once."""
        return objective(self.options.loss)


def estimated_tau(acceptance: Sequence[float]) -> float:
    """Tokens per target pass if step k is accepted with `acceptance[k]`: 1 + Σ_k Π_{i≤k} α_i (the bonus token included)."""
    tau, survives = 1.0, 1.0
    for alpha in acceptance:
        survives *= alpha
        tau += survives
    return tau
