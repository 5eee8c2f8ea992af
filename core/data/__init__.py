"""From conversations to packed rows and batches."""

from .collate import DraftCollator, reachable
from .conversations import Conversations
from .forms import Conversation, Message, conversation_of
from .packing import pack
from .records import read_records
from .render import Rendered, Renderer
from .skipped import Skipped, Unusable
from .template import Reader, prompt_inputs, tokenizer_of, with_template

__all__ = [
    "Conversation",
    "Conversations",
    "DraftCollator",
    "Message",
    "Reader",
    "Rendered",
    "Renderer",
    "Skipped",
    "Unusable",
    "conversation_of",
    "pack",
    "prompt_inputs",
    "reachable",
    "read_records",
    "tokenizer_of",
    "with_template",
]
