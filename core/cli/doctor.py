"""`foredraft doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..contracts.loading import Loading
from .common import loads_target

if TYPE_CHECKING:
    from ..contracts.finding import Finding

COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}


@loads_target
def doctor(
    draft: Annotated[str, typer.Argument(help="directory or hub id of a draft, ours or anybody's")],
    loading: Loading,
    target: Annotated[
        str | None, typer.Option(help="directory or hub id of its target; without weights, only configs are compared")
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="an engine that is to serve it; may be given again. Default: notes on all")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL of prompts to measure acceptance on; default: a few of our own")] = None,
    measure: Annotated[bool, typer.Option(help="run the draft with the target, where the target's weights are there")] = True,
    fix: Annotated[Path | None, typer.Option(metavar="OUT", help="write a copy mended where the mend is certain")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Whether a draft is sound: what is wrong, what it breaks, how to mend it. Exit status 1 if anything is an error."""
    import json
    from dataclasses import asdict

    from transformers.utils import logging

    from ..doctor import Runner, diagnose, mend, open_subject
    from ..errors import ForedraftError
    from ..registry import default_registry

    logging.disable_progress_bar()
    registry = default_registry()
    engines = [registry.engine(name) for name in engine] if engine else list(registry.engines().values())

    def findings(path: str | Path) -> "list[Finding]":
        subject = open_subject(path, target, loading.revision)
        return diagnose(subject, engines, asked=bool(engine), runner=runner)

    def show(path: str | Path) -> None:
        if as_json:
            print(json.dumps({"draft": str(path), "mended": done, "findings": [asdict(f) for f in found]}, indent=2, ensure_ascii=False))
        else:
            _show(found, done, fix)

    done: list[str] = []
    runner = Runner(prompts, loading, show=True) if measure and target else None
    found = findings(draft)
    if fix is not None:
        try:
            done = mend(open_subject(draft, target, loading.revision), found, fix, runner.accepted if runner else None)
            found = findings(fix)
        except ForedraftError:
            show(draft)
            raise
    show(fix or draft)
    if any(f.severity == "error" for f in found):
        raise typer.Exit(1)


def _show(found: "list[Finding]", done: list[str], fix: Path | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..errors import printable

    console = Console()
    if done:
        console.print(f"[bold]mended in '{escape(str(fix))}'[/]:\n  " + escape(printable("\n  ".join(done))))
    if found:
        table = Table(show_lines=True)
        for column in ("finding", "what was found", "what it breaks", "how to mend it"):
            table.add_column(column, overflow="fold")
        for f in found:
            texts = (escape(printable(text)) for text in (f.found, f.breaks, f.mend))
            table.add_row(f"[{COLOURS[f.severity]}]{f.severity}[/]\n{escape(f.id)}", *texts)
        console.print(table)
    counts = {kind: sum(f.severity == kind for f in found) for kind in COLOURS}
    console.print(", ".join(f"{n} {kind}{'' if n == 1 else 's'}" for kind, n in counts.items()))
