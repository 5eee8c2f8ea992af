"""`foredraft draw`."""

from pathlib import Path
from typing import Annotated

import typer


def draw(
    algorithm: Annotated[str, typer.Argument(help="a drafting algorithm (see `foredraft plugins`)")],
    options: Annotated[list[str] | None, typer.Argument(help="its options, key=value")] = None,
    out: Annotated[Path | None, typer.Option(help="the picture; default: mask_ALGORITHM.png")] = None,
) -> None:
    """Draw who sees whom in a training step of an algorithm, from the mask that training uses."""
    from ..training.draw import draw_mask
    from ..training.settings import parse_options

    print(draw_mask(algorithm, out or Path(f"mask_{algorithm}.png"), parse_options(options or [])))


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(draw)
