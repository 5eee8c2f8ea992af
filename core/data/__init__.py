"""From conversations to packed rows and batches."""

from .collate import DraftCollator
from .conversations import Conversations, Message, messages_of
from .packing import pack
from .render import Rendered, Renderer

__all__ = ["Conversations", "DraftCollator", "Message", "Rendered", "Renderer", "messages_of", "pack"]
