"""`foredraft serve-command`."""

from typing import Annotated

import typer

from ..contracts.loading import Repository
from .common import DraftTokensOption, TargetOption, loads_target


def serve(
    draft: Annotated[str, typer.Argument(help="directory or hub id of the draft")],
    target: TargetOption,
    loading: Repository,
    engine: Annotated[str, typer.Option(help="serving system (see `foredraft plugins`)")] = "vllm",
    num_draft_tokens: DraftTokensOption = None,
) -> None:
    """Print the command line that serves a draft, or why the engine does not serve it."""
    from ..formats.serving import serve_command
    from ..registry import default_registry

    print(serve_command(default_registry().engine(engine)(), draft, target, num_draft_tokens, loading))


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("serve-command")(loads_target(serve))
