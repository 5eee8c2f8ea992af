"""Attention = geometry (how q, k, v are projected) × pattern (who sees whom)."""

from ...data.collate import unrolled_segments
from .geometry import GroupedQueryAttention, Lookup, take_rows
from .kernels import kernel_for
from .mla import MultiHeadLatentAttention
from .patterns import Causal, DecodingCache, Full, Masked, Ranged, ranges
from .unrolled import Unrolled, UnrolledCache

__all__ = [
    "Causal",
    "DecodingCache",
    "Full",
    "GroupedQueryAttention",
    "Lookup",
    "Masked",
    "MultiHeadLatentAttention",
    "Ranged",
    "Unrolled",
    "UnrolledCache",
    "kernel_for",
    "ranges",
    "take_rows",
    "unrolled_segments",
]
