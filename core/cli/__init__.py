"""The command line: `foredraft COMMAND`. Heavy imports happen inside the commands, so that `--help` answers at once."""

import os
import sys

import typer

from ..errors import ForedraftError
from . import data, decode, doctor, draw, formats, inspect, new, serve, train

app = typer.Typer(
    name="foredraft",
    help="Train, check and serve draft models for speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for module in (train, decode, serve, doctor, data, inspect, draw, formats, new):
    module.add_to(app)


def main() -> None:
    """Run the command line; what a user can mend is printed without a traceback."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app()
    except ForedraftError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
