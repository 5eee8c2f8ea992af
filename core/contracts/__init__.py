"""What plugins are written against: the contracts of adapters, algorithms, formats and engines. Nothing here loads torch."""

from .algorithm import AlgorithmBase, Choose, Drafter, DrafterBase, Pairs, Plan, Step, pairs_by_teacher, tokens_to_draft
from .config import DraftConfigMixin
from .draft import Batch, DraftModel, KeyValueCache, Layout, Pattern, Wiring
from .engine import Config, EngineBase
from .finding import Finding
from .format import FormatBase
from .hookspecs import hookimpl
from .objective import Cost, ObjectiveBase, RowObjective, Sums
from .options import Frozen
from .signal import Signal
from .spec import DraftSpec

__all__ = [
    "AlgorithmBase",
    "Batch",
    "Choose",
    "Config",
    "Cost",
    "DraftConfigMixin",
    "DraftModel",
    "DraftSpec",
    "Drafter",
    "DrafterBase",
    "EngineBase",
    "Finding",
    "FormatBase",
    "Frozen",
    "KeyValueCache",
    "Layout",
    "ObjectiveBase",
    "Pairs",
    "Pattern",
    "Plan",
    "RowObjective",
    "Signal",
    "Step",
    "Sums",
    "Wiring",
    "hookimpl",
    "pairs_by_teacher",
    "tokens_to_draft",
]
