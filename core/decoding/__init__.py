"""Decoding with a draft inside transformers, and measuring it."""

from .evaluate import evaluate, load_prompts
from .generate import drafting, generate
from .stats import DraftingStats

__all__ = ["DraftingStats", "drafting", "evaluate", "generate", "load_prompts"]
