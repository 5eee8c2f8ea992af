"""The draft model: what all families share, the Llama-shaped draft that most adapters offer, and wirings to choose from."""

from .blocks import BlockAlgorithm, BlockOptions
from .grouped_query import GroupedQueryDraft
from .layer import DraftLayer
from .model import BaseDraft
from .unrolled import plan_unrolled, unrolled
from .wiring import Bare, Fused, Prefix, Summed

__all__ = [
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
