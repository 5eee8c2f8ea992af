"""Evaluations as a table and as a picture."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import IO, TYPE_CHECKING, Any

from ..errors import ForedraftError
from .evaluate import Evaluation

if TYPE_CHECKING:
    from rich.table import Table


def table(results: Mapping[str, Evaluation]) -> "Table":
    """One row per prompt set."""
    from rich.table import Table

    settings = next(iter(results.values())).settings
    title = (
        f"{settings['algorithm']}, {settings['shape']}, {settings['num_draft_tokens']} drafted tokens, "
        f"temperature {settings['temperature']:g}, ≤ {settings['max_new_tokens']} new tokens, {settings['dtype']} on {settings['device']}"
    )
    if settings.get("lossy"):
        title += f"\nLOSSY ({settings['lossy']}): the output differs from the target's, and so may its quality"
    rows = Table(title=title, title_justify="left")
    for column in ("prompts", "τ", "accepted per position", "tokens/s plain", "drafted", "speed-up", "identical"):
        rows.add_column(column, justify="left" if column == "prompts" else "right")
    for name, r in results.items():
        rows.add_row(
            f"{name} ({r.prompts})",
            f"{r.tau:.2f}",
            " ".join(f"{a:.2f}" for a in r.acceptance),
            f"{r.plain_tokens_per_second:.1f}" if r.plain_tokens_per_second else "-",
            f"{r.tokens_per_second:.1f}" if r.tokens_per_second else "-",
            f"{r.speedup:.2f}×" if r.speedup else "-",
            f"{r.identical}/{r.prompts}" if r.identical is not None else "-",
        )
    if len(results) > 1:
        speedups = [r.speedup for r in results.values() if r.speedup]
        mean_speedup = f"{fmean(speedups):.2f}×" if speedups else "-"
        rows.add_row("mean", f"{fmean(r.tau for r in results.values()):.2f}", "", "", "", mean_speedup, "", style="bold")
    return rows


@contextmanager
def picture(file: str | Path | IO[bytes], columns: int = 1, dpi: int = 110, **how: Any) -> Iterator[Any]:
    """A figure's axes, side by side in `columns`; behind the block it is written to `file`, a PNG unless its ending says otherwise."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, **how)
    yield axes
    figure.savefig(file, dpi=dpi)
    plt.close(figure)


def plot_acceptance(results: Mapping[str, Evaluation], file: str | Path) -> None:
    """Acceptance per drafted position (of a tree: depth), a line per prompt set, into a PNG."""
    shape = next(iter(results.values())).settings["shape"]
    with picture(file, figsize=(6, 4), constrained_layout=True) as axis:
        for name, r in results.items():
            positions = range(1, len(r.acceptance) + 1)
            axis.plot(positions, r.acceptance, "o-", label=f"{name}: τ {r.tau:.2f}")
            axis.set_xticks(list(positions))
        axis.set(xlabel="drafted position", ylabel="share of drafts accepted up to here", ylim=(0, 1), title=f"acceptance, {shape}")
        axis.grid(alpha=0.3)
        axis.legend()


@dataclass
class Row:
    """One draft of a comparison: what it is, and what was measured by prompt set."""

    draft: str
    """A digest of its weights and options."""
    algorithm: str
    parameters: int = 0
    """Trained ones."""
    training: dict[str, Any] = field(default_factory=dict)
    """`steps` and `seconds`, where its run noted them."""
    results: dict[str, Evaluation] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**vars(self), "results": {name: result.to_dict() for name, result in self.results.items()}}

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> "Row":
        """What `to_dict` gave."""
        names = [f.name for f in fields(Evaluation)]
        results = {name: Evaluation(**{key: result[key] for key in names}) for name, result in said["results"].items()}
        return cls(**{**said, "results": results})

    @property
    def acceptance(self) -> list[float]:
        """Per position, the mean over the prompt sets."""
        return [fmean(a for a in at if a is not None) for at in zip_longest(*(r.acceptance for r in self.results.values()))]

    @property
    def speedup(self) -> float | None:
        """The mean over the prompt sets; None without a baseline."""
        found = [r.speedup for r in self.results.values() if r.speedup]
        return fmean(found) if found else None


def tabulated(rows: Mapping[str, Row]) -> str:
    """Drafts side by side, a line each, in Markdown; figures that stand for several prompt sets are means over them."""
    sets = list(next(iter(rows.values())).results)
    some = next(iter(rows.values())).results[sets[0]]
    title = (
        f"Prompts: {', '.join(f'{name} ({r.prompts})' for name, r in next(iter(rows.values())).results.items())}. Temperature "
        f"{some.settings['temperature']:g}, at most {some.settings['max_new_tokens']} new tokens, {some.settings['dtype']} on "
        f"{some.settings['device']}, {some.settings['threads']} threads. "
        + (
            "Drafts were replayed along the target's own texts, nothing was decoded with them."
            if some.tokens_per_second is None
            else "Speed-ups are against plain decoding beside each draft."
        )
    )
    columns = ["draft", "algorithm", "drafted", "parameters", "training", *(f"τ {name}" for name in sets), "τ", "accepted per position"]
    columns += ["a round of drafting", "tokens/s", "speed-up", "same text"]
    lines = [columns, ["---"] * len(columns), *([name, *_cells(row, sets)] for name, row in rows.items())]
    return f"{title}\n\n" + "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _cells(row: Row, sets: Sequence[str]) -> list[str]:
    results = list(row.results.values())
    drafting, verifying = (fmean(getattr(r, name) for r in results) for name in ("draft_ms", "pass_ms"))
    same = [r.identical for r in results if r.identical is not None]
    speeds = [r.tokens_per_second for r in results if r.tokens_per_second]
    seconds = row.training.get("seconds")
    return [
        row.algorithm,
        f"{results[0].settings['num_draft_tokens']}",
        f"{row.parameters / 1e6:.1f} M",
        f"{seconds / 60:.1f} min, {row.training['steps']} steps" if seconds else "-",
        *(f"{row.results[name].tau:.2f}" if name in row.results else "" for name in sets),
        f"{fmean(r.tau for r in results):.2f}",
        " ".join(f"{a:.2f}" for a in row.acceptance),
        f"{drafting:.2f} ms" + (f", {drafting / verifying:.2f} of a pass" if verifying else ""),
        f"{fmean(speeds):.1f}" if speeds else "-",
        f"{row.speedup:.2f}×" if row.speedup else "-",
        f"{sum(same)}/{sum(r.prompts for r in results)}" if same else "-",
    ]


def plot_comparison(rows: Mapping[str, Row], file: str | Path) -> None:
    """τ, speed-up where it was measured, and acceptance per position of each draft, into a PNG."""
    names, speedups = list(rows), [row.speedup for row in rows.values()]
    count = 3 if any(speedups) else 2
    size = (14 * count / 3, 1.5 + max(2.5, 0.4 * len(rows)))
    with picture(file, count, figsize=size, constrained_layout=True) as (bars, *speed, lines):
        bars.barh(names, [fmean(r.tau for r in row.results.values()) for row in rows.values()], color="C0")
        bars.set(title="τ", xlim=(1, None))
        for axis in speed:
            axis.barh(names, [speedup or 0 for speedup in speedups], color="C1")
            axis.axvline(1, color="black", linewidth=0.8)
            axis.set(title="speed-up")
        for axis in (bars, *speed):
            axis.invert_yaxis()
            axis.grid(alpha=0.3, axis="x")
        for number, (name, row) in enumerate(rows.items()):
            style = ("o-", "s--", "^:")[number // 10 % 3]  # there are ten colours
            lines.plot(range(1, len(row.acceptance) + 1), row.acceptance, style, label=name, markersize=4)
        lines.set(title="share of drafts accepted up to here", xlabel="drafted position", ylim=(0, 1))
        lines.grid(alpha=0.3)
        lines.legend(fontsize=7)


def demand_identical(results: Mapping[str, Evaluation]) -> None:
    """Raises `ForedraftError` if a greedy float32 output differs from plain decoding's.

    In lower precision near-ties may flip; a `Lossy` rule claims nothing.
    """
    exact = {name: r for name, r in results.items() if r.settings["dtype"] == "float32" and not r.settings.get("lossy")}
    different = {name: r.different for name, r in exact.items() if r.different}
    if different:
        raise ForedraftError(
            f"greedy outputs differ from plain decoding on prompts {different}: drafting must not change the output.\n"
            "  Please report this with the target's name and these prompts"
        )
