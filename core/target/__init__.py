"""The frozen target: loaded, run, and matched with the drafts that were made for it."""

from .cached import CachedTarget
from .capture import AuxCapture
from .loading import load_config, load_target, load_tokenizer
from .target import Target

__all__ = ["AuxCapture", "CachedTarget", "Target", "load_config", "load_target", "load_tokenizer"]
