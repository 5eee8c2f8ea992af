"""The loss of all drafting steps: teachers, objectives, and one call, in chunks (training uses it) and readable."""

from .chunks import CHUNK, chunked
from .objectives import CrossEntropy, Loss, objective
from .readable import estimated_tau, reference, step_weights
from .teachers import Labels, Supervisor, Teacher

__all__ = [
    "CHUNK",
    "CrossEntropy",
    "Labels",
    "Loss",
    "Supervisor",
    "Teacher",
    "chunked",
    "estimated_tau",
    "objective",
    "reference",
    "step_weights",
]
