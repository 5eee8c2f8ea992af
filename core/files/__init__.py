"""Drafts on disk: found, read without trust, written all or nothing."""

from .hub import find_draft
from .ours import load_draft, save_draft
from .raw import Checkpoint, TensorInfo

__all__ = ["Checkpoint", "TensorInfo", "find_draft", "load_draft", "save_draft"]
