"""`foredraft train` and `foredraft init`."""

from pathlib import Path
from typing import Annotated

import typer

from ..contracts.loading import Rendering
from ..registry import DEFAULT_ALGORITHM
from .common import loads_target, show_keys

SHAPE = ("adapter", "aux_layers", "draft_vocab_size")


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


@loads_target
def init(
    target: Annotated[str, typer.Argument(help="directory or hub id of the target")],
    out: Annotated[Path, typer.Argument(help="where the draft goes")],
    loading: Rendering,
    settings: Annotated[
        list[str] | None, typer.Argument(help=f"key=value: {', '.join(SHAPE)}, and the algorithm's options (`foredraft info NAME`)")
    ] = None,
    algorithm: Annotated[str, typer.Option(help="drafting algorithm")] = DEFAULT_ALGORITHM,
    data: Annotated[str | None, typer.Option(help="conversations that a reduced vocabulary and a mask token are chosen by")] = None,
    length: Annotated[int, typer.Option("--max-length", min=8, help="tokens per packed row")] = 1024,
) -> None:
    """Write an untrained draft that has started from its target, as a run would: to look at, to serve as a baseline, or to train."""
    from ..training.settings import RunConfig, parse_options

    options = parse_options(settings or [])
    shape = {name: options.pop(name) for name in SHAPE if name in options}
    fields = {"target": target, "output_dir": str(out), "data": {"train": data or "none", "max_length": length}, "algorithm": algorithm}
    config = RunConfig.check({**loading.model_dump(), **fields, **shape, "options": options}, "init")
    from transformers.utils import logging

    from ..training.run import init as carry_out

    logging.disable_progress_bar()
    print(f"{out}: {carry_out(config, with_data=data is not None)}\nnext: foredraft train RUN draft={out}")
