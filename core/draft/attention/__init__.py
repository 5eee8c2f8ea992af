"""Attention = geometry (how q, k, v are projected) × pattern (who sees whom)."""

from .geometry import DecodingCache, GroupedQueryAttention, UnrolledCache
from .kernels import kernel_for
from .lookup import Lookup, take_rows
from .mla import MultiHeadLatentAttention
from .patterns import Causal, Full, Masked, Ranged, ranges
from .segments import unrolled_segments
from .unrolled import Unrolled

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
