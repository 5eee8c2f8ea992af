"""`foredraft train`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import show_keys


def _keys(asked: bool) -> None:
    if not asked:
        return
    from ..registry import default_registry
    from . import keys

    show_keys("run file", keys.run_keys())
    show_keys("training arguments of other defaults than transformers'", keys.training_keys())
    for r in keys.offered(default_registry()):
        if rows := keys.options(r):
            show_keys(f"options of {r.kind} {r.name}", rows)
    raise typer.Exit


def train(
    run: Annotated[Path, typer.Argument(help="YAML file that describes the run; paths in it are relative to the current directory")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, dotted: training.learning_rate=1e-4")] = None,
    keys: Annotated[bool, typer.Option("--keys", callback=_keys, is_eager=True, help="print every key, and exit")] = False,
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
