"""The draft model: what all families share, the Llama-shaped draft that most adapters offer, and wirings to choose from."""

from .grouped_query import GroupedQueryDraft
from .layer import DraftLayer
from .model import BaseDraft
from .wiring import Fused, Prefix

__all__ = ["BaseDraft", "DraftLayer", "Fused", "GroupedQueryDraft", "Prefix"]
