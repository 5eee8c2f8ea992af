"""`foredraft import`, `foredraft export` and `foredraft serve-command`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..contracts.loading import Loading, Repository
from ..errors import ForedraftError
from .common import DraftTokensOption, TargetOption, loads_target


@loads_target
def import_(
    source: Annotated[str, typer.Argument(help="directory or hub id of a draft in a format that `foredraft plugins` lists")],
    out: Annotated[Path, typer.Argument(help="where the draft of ours goes")],
    target: TargetOption,
    loading: Loading,
) -> None:
    """Read another project's draft, told by its content, into a draft of ours."""
    from transformers.utils import logging

    from ..errors import printable
    from ..formats import import_draft

    logging.disable_progress_bar()
    done = import_draft(source, out, target, loading=loading)
    print(f"{done.path}: a draft by {done.algorithm}, in the format {done.form}")
    for note in done.notes:
        print(f"  {printable(note)}")


def export(
    context: typer.Context,
    draft: Annotated[str, typer.Argument(help="directory or hub id of a draft of ours")],
    out: Annotated[Path, typer.Argument(help="where the export goes: a directory, or a file where the format is one")],
    form: Annotated[str, typer.Option("--format", help="a format that can be written, speculators say (see `foredraft plugins`)")],
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-draft-tokens", "-k", min=1, help="what servers draft unless told otherwise; default: all that it makes at once, else 4"
        ),
    ] = None,
) -> None:
    """Write a draft of ours in another format; vLLM and SGLang read ours as it is.

    Options of a format are given as `--outtype q8_0`; `foredraft info FORMAT` lists them.
    """
    from transformers.utils import logging

    from ..formats import export_draft

    logging.disable_progress_bar()
    print(export_draft(draft, out, form, num_draft_tokens, **_options(context.args)))


def _options(words: list[str]) -> dict[str, Any]:
    """`--name value` and `--name=value` as options of a plugin, which checks them. Raises `ForedraftError` for what is neither."""
    options: dict[str, Any] = {}
    left = list(words)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if not name.startswith("--") or not (equals or left):
            raise ForedraftError(f"'{name}': options of a format are given as --name value")
        options[name.removeprefix("--").replace("-", "_")] = value if equals else left.pop(0)
    return options


@loads_target
def serve(
    draft: Annotated[str, typer.Argument(help="directory or hub id of the draft")],
    target: TargetOption,
    loading: Repository,
    engine: Annotated[str, typer.Option(help="serving system (see `foredraft plugins`)")] = "vllm",
    num_draft_tokens: DraftTokensOption = None,
    costs: Annotated[
        Path | None, typer.Option(help="JSON of what passes cost here (benchmarks/llamacpp.py): chooses how many tokens are drafted")
    ] = None,
) -> None:
    """Print the command line that serves a draft, or why the engine does not serve it."""
    from ..formats.serving import serve_command
    from ..registry import default_registry

    if costs and num_draft_tokens:
        raise ForedraftError("--costs chooses how many tokens are drafted: leave --num-draft-tokens out, or --costs")
    print(serve_command(default_registry().engine(engine)(), draft, target, num_draft_tokens, loading, costs=costs))
