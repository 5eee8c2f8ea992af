"""`foredraft tune`: how much to draft on this machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..contracts.loading import Rendering
from ..errors import ForedraftError
from .common import DraftTokensOption, DtypeOption, TargetOption, load_draft_for, load_target, loads_target

if TYPE_CHECKING:
    from ..decoding import TreeShape
    from ..decoding.costs import Costs

LONGEST = 6
"""Tokens of a chain that are looked at, where the draft makes as many as are asked for."""
TREES = ("3,4,8", "4,4,16", "5,8,32")
"""Trees that are."""


@loads_target
def tune(
    draft: Annotated[str, typer.Argument(help="directory or hub id of the draft")],
    target: TargetOption,
    loading: Rendering,
    prompts: Annotated[Path | None, typer.Option(help="measure acceptance on these; default: a few of our own")] = None,
    batch_size: Annotated[str, typer.Option(help="sequences that are decoded at once")] = "1",
    num_draft_tokens: DraftTokensOption = None,
    limit: Annotated[int, typer.Option(min=1, help="so many prompts")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0.0,
    engine: Annotated[list[str] | None, typer.Option(help="print this engine's arguments; default: all that serve the draft")] = None,
    dtype: DtypeOption = "auto",
) -> None:
    """Measure what is accepted and what it costs here, and say how much to draft: as a chain (or block), or as a tree, at a batch size.

    Costs are those of transformers on this machine: an engine's own are lower, and their relation is what counts. `--num-draft-tokens`
    is the longest chain that is looked at.
    """
    from rich.console import Console
    from rich.table import Table

    from ..decoding.costs import measure_costs
    from ..decoding.served import parse_loads
    from ..doctor.dynamic import asked
    from ..files.hub import find_draft

    sizes = parse_loads(batch_size)
    questions, path = asked(prompts, limit), find_draft(draft)
    model, reader = load_target(target, dtype, loading)
    drafting = load_draft_for(path, model)
    accepted, without = _acceptance(model, drafting, reader, questions, num_draft_tokens, max_new_tokens, temperature)
    (longest,) = (shape for shape in accepted if isinstance(shape, int))
    trees = [shape for shape in accepted if not isinstance(shape, int)]
    console = Console()
    if without:
        console.print(f"no trees: {without}", markup=False)
    for size in sizes:
        costs = measure_costs(model, drafting, [*range(1, longest + 1), *trees], size)
        rows = expected(accepted, costs)
        table = Table(title=f"batch size {size}, a pass over one token {costs.verify[1]:.2f} ms ({model.dtype} on {model.device.type})")
        for column in ("drafted", "tokens per pass", "pass, ms", "drafting, ms", "speed-up"):
            table.add_column(column, justify="left" if column == "drafted" else "right")
        best = max(rows, key=lambda row: row[-1])
        for shape, *figures in rows:
            name = str(shape) if isinstance(shape, int) else f"tree {name_of(shape)}"
            table.add_row(name, *(f"{figure:.2f}" for figure in figures), style="bold" if shape is best[0] else "")
        console.print(table)
        length = max((row for row in rows if isinstance(row[0], int)), key=lambda row: row[-1])[0]
        if best[-1] <= 1:
            told = "nothing that was looked at makes it faster: serve the target without this draft"
        elif best[0] == length:
            told = f"draft {length} token{'s' if length > 1 else ''} per pass"
        else:
            told = f"draft trees where they are at hand: --tree {name_of(best[0])} of generate and eval; else {length} tokens per pass"
        console.print(f"batch size {size}: {told}", markup=False)
        for command in _commands(engine, path, target, length, loading) if best[-1] > 1 else ():
            print(command)


def name_of(shape: "TreeShape") -> str:
    """As `--tree` takes it."""
    return f"{shape.depth},{shape.top_k},{shape.num_nodes}"


def expected(accepted: "Mapping[int | TreeShape, Sequence[float]]", costs: "Costs") -> list[tuple[Any, float, float, float, float]]:
    """Of every length up to the chain's, and every tree: (it, tokens per pass, ms of the pass, ms of drafting, speed-up)."""
    from ..decoding.speedup import speedup, speedups

    plain, rows = costs.verify[1], list[tuple[Any, float, float, float, float]]()
    for shape, positions in accepted.items():
        if isinstance(shape, int):
            lengths = range(1, shape + 1)
            passes, drafts = [costs.verify[1 + k] for k in lengths], [costs.draft[k] for k in lengths]
            gains = speedups(positions, [plain, *passes], drafts)[1:]
            rows += [(k, 1 + sum(positions[:k]), passes[k - 1], drafts[k - 1], gains[k - 1]) for k in lengths]
        else:
            tokens, verify, draft = 1 + sum(positions), costs.verify[1 + shape.num_nodes], costs.draft[shape]
            rows.append((shape, tokens, verify, draft, speedup(tokens, plain, verify, draft)))
    return rows


def _acceptance(
    model: Any, draft: Any, reader: Any, questions: Sequence[Any], num_tokens: int | None, new: int, temperature: float
) -> "tuple[dict[int | TreeShape, list[float]], str | None]":
    """Per position of the longest chain, and per depth of each tree; why there are no trees, if so."""
    from ..contracts.algorithm import tokens_to_draft
    from ..decoding import TreeShape, evaluate

    most = draft.algorithm.max_tokens
    longest = tokens_to_draft(num_tokens or (None if most else LONGEST), most)
    how: dict[str, Any] = {"max_new_tokens": new, "temperature": temperature, "baseline": False}
    chain = evaluate(model, draft, reader, questions, num_draft_tokens=longest, **how).acceptance
    accepted: dict[int | TreeShape, list[float]] = {longest: chain + [0.0] * (longest - len(chain))}
    try:
        for text in TREES:
            tree = TreeShape.parse(text)
            accepted[tree] = evaluate(model, draft, reader, questions, tree=tree, **how).acceptance
    except ForedraftError as error:
        return accepted, str(error)
    return accepted, None


def _commands(engines: list[str] | None, draft: Path, target: str, length: int, loading: Rendering) -> list[str]:
    """A line for each engine that serves the draft. Raises `ForedraftError` for one that was asked for and does not."""
    from ..formats.serving import serve_command
    from ..registry import default_registry

    registry, found = default_registry(), []
    for name in engines or sorted(registry.engines()):
        try:
            found.append(f"{name}: {serve_command(registry.engine(name)(), draft, target, length, loading)}")
        except ForedraftError:
            if engines:
                raise
    return found
