"""`foredraft info`, `foredraft plugins`, `foredraft targets` and `foredraft draw`."""

from pathlib import Path
from typing import Annotated

import typer

from ..contracts.loading import Loading
from .common import loads_target, show_keys


@loads_target
def info(
    name: Annotated[str, typer.Argument(help="a target or a draft: a directory or an id on the hub; or the name of a plugin")],
    loading: Loading,
    algorithm: Annotated[str | None, typer.Option(help="algorithm to plan for, with a target")] = None,
    draft_vocab_size: Annotated[int | None, typer.Option(min=1, help="draft vocabulary to plan with, for a target")] = None,
    rows: Annotated[int, typer.Option(min=1, help="rows per batch, for the memory of a training step")] = 1,
    length: Annotated[int, typer.Option("--max-length", min=8, help="tokens per row")] = 2048,
) -> None:
    """What foredraft makes of a target or a draft: adapter, dimensions, parameters, aux layers, memory of a training step."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..registry import default_registry

    if not Path(name).exists() and any(r.name == name for r in default_registry().registered):
        _plugin(name)
        return
    from ..errors import printable
    from .describe import describe

    table = Table(show_header=False, box=None)
    for key, value in describe(name, algorithm, draft_vocab_size, rows, length, loading).items():
        table.add_row(f"[bold]{key}[/]", escape(printable(value)))
    Console().print(table)


def _plugin(name: str) -> None:
    from ..registry import default_registry
    from . import keys

    for r in keys.offered(default_registry(), name):
        print(f"{r.kind} {name}, from {r.distribution}: {keys.about(r)}")
        if rows := keys.options(r):
            show_keys("options", rows)
        else:
            print("it takes no options")


def plugins(
    write: Annotated[Path | None, typer.Option(help="write the keys of run files and all options to this Markdown file")] = None,
) -> None:
    """List installed adapters, algorithms, engines and formats, and the plugins that failed to load."""
    from rich.console import Console
    from rich.table import Table

    from ..files.writing import write_text
    from ..registry import default_registry
    from . import keys

    registry = default_registry()
    table = Table()
    for column in ("kind", "name", "from", "about"):
        table.add_column(column)
    for r in keys.offered(registry):
        table.add_row(r.kind, r.name, r.distribution, keys.about(r))
    console = Console()
    console.print(table)
    for broken in registry.broken:
        console.print(f"[red]failed to load[/] {broken}")
    for problem in registry.double_claims():
        console.print(f"[red]claimed twice[/] {problem}")
    if write:
        write_text(write, keys.as_markdown(registry))


def targets(
    model_types: Annotated[
        list[str] | None, typer.Argument(help="model types of transformers; all language models, with or without images, if left out")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="write the table to this Markdown file")] = None,
) -> None:
    """Which targets drafts can be made for: by a training step and a decode on a tiny random model of each family, and what engines say."""
    import torch
    from transformers.utils import logging

    from ..decoding.compatibility import as_markdown, language_models, verdict
    from ..files.writing import write_text

    logging.set_verbosity_error()
    torch.set_num_threads(1)  # tiny models are slower on more
    verdicts = []
    for name in model_types or language_models():
        verdicts.append(v := verdict(name))
        print(f"{name}: {v.problem or f'trains, adapter {v.adapter}; ' + (v.decoding or 'decodes in transformers')}", flush=True)
    if write:
        write_text(write, as_markdown(verdicts))


def draw(
    algorithm: Annotated[str, typer.Argument(help="a drafting algorithm (see `foredraft plugins`)")],
    options: Annotated[list[str] | None, typer.Argument(help="its options, key=value")] = None,
    out: Annotated[Path | None, typer.Option(help="the picture; default: mask_ALGORITHM.png")] = None,
) -> None:
    """Draw who sees whom in a training step of an algorithm, from the mask that training uses."""
    from ..training.draw import draw_mask
    from ..training.settings import parse_options

    print(draw_mask(algorithm, out or Path(f"mask_{algorithm}.png"), parse_options(options or [])))
