"""`foredraft train`."""

from pathlib import Path
from typing import Annotated

import typer


def train(
    run: Annotated[Path, typer.Argument(help="YAML file that describes the run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, dotted: training.learning_rate=1e-4")] = None,
) -> None:
    """Train a draft as a YAML file says; `key=value` overrides its entries."""
    from ..training.settings import RunConfig

    config = RunConfig.load(run, overrides or [])  # before torch is loaded: a misspelt key is told at once
    from ..training.run import train as carry_out

    draft = carry_out(config)
    print(f"\ndraft: {draft}\ncurves: {draft.parent / 'training.png'}")
    print(f"next: foredraft eval --target {config.target} --draft {draft} --prompts FILE")


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(train)
