"""The command line: `foredraft COMMAND`. Heavy imports happen inside the commands, so that `--help` answers at once."""

import os
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Annotated

import typer

from .. import __version__
from ..errors import ForedraftError, printable
from . import compare, data, decode, doctor, formats, inspect, new, train, tune

app = typer.Typer(
    name="foredraft",
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "train": train.train,
    "capture": train.capture,
    "plan": train.plan,
    "report": train.report,
    "init": train.init,
    "generate": decode.generate,
    "eval": decode.evaluate,
    "compare": compare.compare,
    "tune": tune.tune,
    "serve-command": formats.serve,
    "doctor": doctor.doctor,
    "preview": data.preview,
    "regenerate": data.regenerate,
    "info": inspect.info,
    "plugins": inspect.plugins,
    "targets": inspect.targets,
    "draw": inspect.draw,
    "import": formats.import_,
    "export": formats.export,
}
OPEN = {"export": {"allow_extra_args": True, "ignore_unknown_options": True}}
"""Commands that hand on options of a plugin."""
for name, command in COMMANDS.items():
    app.command(name, context_settings=OPEN.get(name))(command)
app.add_typer(new.commands, name="new")


@app.callback()
def about(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="print the versions that matter, and exit")] = False,
) -> None:
    """Train, check and serve draft models for speculative decoding."""
    if version:
        found = {name: metadata.version(name) for name in ("torch", "transformers")}
        print(f"foredraft {__version__} ({', '.join(f'{name} {number}' for name, number in found.items())})")
        raise typer.Exit


def main() -> None:
    """Run the command line; what a user can mend is printed without a traceback."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {printable(str(message))}\n"
    try:
        app()
    except ForedraftError as error:
        text = printable(str(error))
        print(f"error: {text}" if error.status == 1 else text, file=sys.stderr)
        raise SystemExit(error.status) from None
