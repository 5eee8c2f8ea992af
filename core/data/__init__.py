"""From conversations to packed rows and batches."""

from .collate import DraftCollator
from .conversations import Conversations
from .forms import Conversation, Message, conversation_of
from .packing import pack
from .records import read_records
from .render import Rendered, Renderer
from .skipped import Skipped, Unusable
from .template import prompt_ids, with_template

__all__ = [
    "Conversation",
    "Conversations",
    "DraftCollator",
    "Message",
    "Rendered",
    "Renderer",
    "Skipped",
    "Unusable",
    "conversation_of",
    "pack",
    "prompt_ids",
    "read_records",
    "with_template",
]
