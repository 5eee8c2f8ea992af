"""The loss of all drafting steps: teachers, objectives, and one call, in chunks (training uses it) and readable."""

from ..contracts.objective import CrossEntropy
from .chunks import chunked, in_turn, rows_at_once, step_weights
from .objectives import Loss, Minimising, estimated_tau, objective
from .readable import reference
from .teachers import Labels, Supervisor, Taught, Teacher

__all__ = [
    "CrossEntropy",
    "Labels",
    "Loss",
    "Minimising",
    "Supervisor",
    "Taught",
    "Teacher",
    "chunked",
    "estimated_tau",
    "in_turn",
    "objective",
    "reference",
    "rows_at_once",
    "step_weights",
]
