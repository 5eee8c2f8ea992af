"""Whether a draft is sound, before it is served: `foredraft doctor`."""

from ..contracts.finding import Finding
from ..files.raw import SIDE_FILE, Checkpoint, TensorInfo
from .dynamic import Runner, diagnose
from .mend import mend
from .static import ask_engines, examine, examine_subject, open_subject, worst_first
from .subject import Subject

__all__ = [
    "SIDE_FILE",
    "Checkpoint",
    "Finding",
    "Runner",
    "Subject",
    "TensorInfo",
    "ask_engines",
    "diagnose",
    "examine",
    "examine_subject",
    "mend",
    "open_subject",
    "worst_first",
]
