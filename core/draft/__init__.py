"""The draft model: what all families share, and the Llama-shaped draft that most adapters offer."""

from .grouped_query import GroupedQueryDraft
from .model import BaseDraft

__all__ = ["BaseDraft", "GroupedQueryDraft"]
