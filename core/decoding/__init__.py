"""Decoding with a draft inside transformers, and measuring it."""

from .autoregressive import AutoregressiveDrafter
from .evaluate import evaluate, load_prompts
from .generate import generate
from .parallel import choose_in_turn
from .stats import DraftingStats
from .tree import TreeShape

__all__ = ["AutoregressiveDrafter", "DraftingStats", "TreeShape", "choose_in_turn", "evaluate", "generate", "load_prompts"]
