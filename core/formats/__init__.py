"""Drafts in other projects' formats: read into ours, and written."""

from .exporting import FORMATS, export_draft
from .importing import Imported, import_draft
from .opening import open_draft
from .peers import PEERS
from .serving import serve_command

__all__ = ["FORMATS", "PEERS", "Imported", "export_draft", "import_draft", "open_draft", "serve_command"]
