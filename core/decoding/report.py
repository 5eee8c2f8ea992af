"""Evaluations as a table and as a picture."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

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
    rows = Table(title=title, title_justify="left")
    for column in ("prompts", "τ", "accepted per position", "tokens/s plain", "drafted", "speed-up", "identical"):
        rows.add_column(column, justify="left" if column == "prompts" else "right")
    for name, r in results.items():
        rows.add_row(
            f"{name} ({r.prompts})",
            f"{r.tau:.2f}",
            " ".join(f"{a:.2f}" for a in r.acceptance),
            f"{r.plain_tokens_per_second:.1f}" if r.plain_tokens_per_second else "-",
            f"{r.tokens_per_second:.1f}",
            f"{r.speedup:.2f}×" if r.speedup else "-",
            f"{r.identical}/{r.prompts}" if r.identical is not None else "-",
        )
    if len(results) > 1:
        speedups = [r.speedup for r in results.values() if r.speedup]
        mean_speedup = f"{fmean(speedups):.2f}×" if speedups else "-"
        rows.add_row("mean", f"{fmean(r.tau for r in results.values()):.2f}", "", "", "", mean_speedup, "", style="bold")
    return rows


def plot_acceptance(results: Mapping[str, Evaluation], file: str | Path) -> None:
    """Acceptance per drafted position (of a tree: depth), a line per prompt set, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shape = next(iter(results.values())).settings["shape"]
    figure, axis = plt.subplots(figsize=(6, 4), constrained_layout=True)
    for name, r in results.items():
        positions = range(1, len(r.acceptance) + 1)
        axis.plot(positions, r.acceptance, "o-", label=f"{name}: τ {r.tau:.2f}")
        axis.set_xticks(list(positions))
    axis.set(xlabel="drafted position", ylabel="share of drafts accepted up to here", ylim=(0, 1), title=f"acceptance, {shape}")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def demand_identical(results: Mapping[str, Evaluation]) -> None:
    """Raises `ForedraftError` if a greedy float32 output differs from plain decoding's (in lower precision near-ties may flip)."""
    different = {name: r.different for name, r in results.items() if r.different and r.settings["dtype"] == "float32"}
    if different:
        raise ForedraftError(
            f"greedy outputs differ from plain decoding on prompts {different}: drafting must not change the output.\n"
            "  Please report this with the target's name and these prompts"
        )
