"""Decoding with a draft inside transformers, and measuring it."""

from .drafters import AutoregressiveDrafter, choose_in_turn
from .evaluate import evaluate, load_prompts
from .generate import generate
from .loop import DraftingStats
from .tree import TreeShape

__all__ = ["AutoregressiveDrafter", "DraftingStats", "TreeShape", "choose_in_turn", "evaluate", "generate", "load_prompts"]
