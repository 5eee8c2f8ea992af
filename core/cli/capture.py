"""`foredraft capture`."""

from pathlib import Path
from typing import Annotated

import typer

from .common import BaseUrlOption, EngineArgumentsOption, EngineOption, WorkersOption


def capture(
    run: Annotated[Path, typer.Argument(help="YAML file that describes the run; paths in it are relative to the current directory")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, dotted: hidden_states_dtype=float8")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="rows that the target runs over at once, in this process")] = 8,
    engine: EngineOption = None,
    base_url: BaseUrlOption = None,
    engine_arguments: EngineArgumentsOption = None,
    workers: WorkersOption = None,
) -> None:
    """Store the target's hidden states that a run will read, in its `hidden_states_cache`; a capture that was ended goes on.

    The target runs in this process, in several workers, in an engine that is started for it, or in a server that runs already and
    extracts hidden states.
    """
    from ..training.settings import RunConfig

    config = RunConfig.load(run, overrides or [])
    from ..training.capture import capture as carry_out

    stored = carry_out(config, batch_size=batch_size, engine=engine, base_url=base_url, engine_arguments=engine_arguments, workers=workers)
    told = f"{stored} rows were captured beside training" if isinstance(stored, int) else f"{stored}\nnext: foredraft train {run}"
    print(f"{config.hidden_states_cache}: {told}")
