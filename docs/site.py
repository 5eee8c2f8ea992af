"""mkdocs hooks: the command line's page is made from the commands themselves, the front page's table is the README's."""

import re
from pathlib import Path
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


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put the README's matrix where a page asks for it."""
    if "<!-- matrix -->" not in markdown:
        return markdown
    readme = Path(config["config_file_path"]).with_name("README.md").read_text(encoding="utf-8")
    rows = re.search(r"<!-- matrix:.*?-->\n(.*?)<!-- /matrix -->", readme, flags=re.DOTALL)
    if rows is None:
        raise ValueError("README.md has no matrix between its marks: run `make matrix`")
    return markdown.replace("<!-- matrix -->", rows[1])
