"""The draft model: what all families share, the Llama-shaped draft that most adapters offer, and wirings to choose from."""

from .blocks import BlockAlgorithm, BlockOptions
from .grouped_query import GroupedQueryDraft
from .layer import DraftLayer
from .model import BaseDraft
from .wiring import Fused, Prefix

__all__ = ["BaseDraft", "BlockAlgorithm", "BlockOptions", "DraftLayer", "Fused", "GroupedQueryDraft", "Prefix"]
