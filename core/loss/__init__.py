"""The loss of all drafting steps: teachers, objectives, and one call, in chunks (training uses it) and readable."""

from .chunks import chunked, rows_at_once
from .objectives import CrossEntropy, Loss, estimated_tau, objective, step_weights
from .readable import reference
from .teachers import Labels, Supervisor, Taught, Teacher

__all__ = [
    "CrossEntropy",
    "Labels",
    "Loss",
    "Supervisor",
    "Taught",
    "Teacher",
    "chunked",
    "estimated_tau",
    "objective",
    "reference",
    "rows_at_once",
    "step_weights",
]
