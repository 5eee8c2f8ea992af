"""Attention = geometry (how q, k, v are projected) × pattern (who sees whom)."""

from .cache import DecodingCache, UnrolledCache
from .geometry import GroupedQueryAttention, take_rows
from .mla import MultiHeadLatentAttention
from .patterns import Causal, Full, Masked, Unrolled

__all__ = [
    "Causal",
    "DecodingCache",
    "Full",
    "GroupedQueryAttention",
    "Masked",
    "MultiHeadLatentAttention",
    "Unrolled",
    "UnrolledCache",
    "take_rows",
]
