"""Drafts in other projects' formats: read into ours, and written."""

from .exporting import export_draft
from .importing import Imported, import_draft
from .opening import open_draft
from .serving import serve_command

__all__ = ["Imported", "export_draft", "import_draft", "open_draft", "serve_command"]
