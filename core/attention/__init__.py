"""Attention = geometry (how q, k, v are projected) × pattern (who sees whom)."""

from .cache import DecodingCache, UnrolledCache
from .geometry import GroupedQueryAttention, take_rows
from .patterns import Causal, Unrolled

__all__ = ["Causal", "DecodingCache", "GroupedQueryAttention", "Unrolled", "UnrolledCache", "take_rows"]
