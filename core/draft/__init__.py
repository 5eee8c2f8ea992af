"""The draft model: what all families share, the Llama-shaped draft that most adapters offer, and wirings to choose from."""

from ..data.collate import plan_unrolled
from .attention.unrolled import unrolled
from .blocks import BlockAlgorithm, BlockOptions
from .grouped_query import GroupedQueryDraft
from .layer import DraftLayer
from .model import BaseDraft
from .ordinary import Alone, Bare, Summed
from .wiring import Fused, Prefix

__all__ = [
    "Alone",
    "Bare",
    "BaseDraft",
    "BlockAlgorithm",
    "BlockOptions",
    "DraftLayer",
    "Fused",
    "GroupedQueryDraft",
    "Prefix",
    "Summed",
    "plan_unrolled",
    "unrolled",
]
