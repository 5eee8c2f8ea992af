"""Decoding with a draft inside transformers, and measuring it."""

from .drafters import AutoregressiveDrafter, BlockDrafter, Turn, choose_in_turn
from .evaluate import evaluate, load_prompts
from .generate import generate
from .loop import DraftingStats
from .tree import TreeShape

__all__ = [
    "AutoregressiveDrafter",
    "BlockDrafter",
    "DraftingStats",
    "TreeShape",
    "Turn",
    "choose_in_turn",
    "evaluate",
    "generate",
    "load_prompts",
]
