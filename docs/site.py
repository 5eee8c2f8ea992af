"""mkdocs hook: the command line's page is made from the commands themselves."""

from typing import Any

import typer
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

from foredraft.cli import app


def on_files(files: Files, config: Any) -> Files:
    """Add reference/cli.md."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="foredraft", title="Command line")
    files.append(File.generated(config, "reference/cli.md", content=text))
    return files
