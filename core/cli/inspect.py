"""`foredraft info` and `foredraft plugins`."""

from typing import Annotated

import typer


def info(
    name: Annotated[str, typer.Argument(help="a target (directory or hub id) or a draft's directory")],
    algorithm: Annotated[str | None, typer.Option(help="algorithm to plan for, with a target")] = None,
    draft_vocab_size: Annotated[int | None, typer.Option(min=1, help="draft vocabulary to plan with, for a target")] = None,
    rows: Annotated[int, typer.Option(min=1, help="rows per batch, for the memory of a training step")] = 1,
    length: Annotated[int, typer.Option("--max-length", min=8, help="tokens per row")] = 2048,
) -> None:
    """What foredraft makes of a target or a draft: adapter, dimensions, parameters, aux layers, memory of a training step."""
    from rich.console import Console
    from rich.table import Table

    from ..describe import describe

    table = Table(show_header=False, box=None)
    for key, value in describe(name, algorithm, draft_vocab_size, rows, length).items():
        table.add_row(f"[bold]{key}[/]", value)
    Console().print(table)


def plugins() -> None:
    """List installed adapters, algorithms and engines, and the plugins that failed to load."""
    from rich.console import Console
    from rich.table import Table

    from ..registry import default_registry

    registry = default_registry()
    table = Table()
    for column in ("kind", "name", "from", "about"):
        table.add_column(column)
    for r in sorted(registry.registered, key=lambda r: (r.kind, r.name)):
        about = getattr(r.cls, "summary", "")
        if r.kind == "adapter":
            about += f" (model_type {', '.join(r.cls.model_types)})"
        table.add_row(r.kind, r.name, r.distribution, about)
    console = Console()
    console.print(table)
    for broken in registry.broken:
        console.print(f"[red]failed to load[/] {broken}")
    for problem in registry.double_claims():
        console.print(f"[red]claimed twice[/] {problem}")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(info)
    app.command()(plugins)
