"""The loss of all drafting steps: readable, and in chunks, which training uses."""

from .chunked import fused_cross_entropy
from .cross_entropy import Labels, Supervisor, Teacher, cross_entropy, estimated_tau, step_weights

__all__ = ["Labels", "Supervisor", "Teacher", "cross_entropy", "estimated_tau", "fused_cross_entropy", "step_weights"]
