"""Measures a draft where it serves: an engine's server with and without it, under load."""

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contracts.engine import EngineBase
from ..errors import ForedraftError
from ..serving import Server, read_metrics
from .evaluate import Prompt
from .report import picture

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Load:
    """A server asked by so many at once."""

    concurrency: int
    tokens: int
    tokens_per_second: float
    """Of all requests together."""
    first_token: float
    """Median seconds to the first token."""
    first_token_slow: float
    """Seconds within which 95 of 100 requests had it."""
    tau: float | None
    """As the engine counts it; None where it drafts nothing, or does not tell."""
    acceptance: list[float]
    """Share of drafts accepted up to each position, by the engine's counts."""


@dataclass
class Served:
    """What a server gave with a draft, without it, and what the draft gives in this process."""

    drafted: list[Load]
    plain: list[Load] = field(default_factory=list)
    """Empty where only one server was asked."""
    identical: int | None = None
    """Prompts answered alike by both, greedily, one at a time."""
    ours: dict[str, Any] | None = None
    """τ and acceptance by `evaluate`, where it ran."""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def speedups(self) -> list[float]:
        """Drafted over plain tokens per second, by load."""
        return [d.tokens_per_second / p.tokens_per_second for d, p in zip(self.drafted, self.plain, strict=False)]

    def to_dict(self) -> dict[str, Any]:
        """All fields, and the speed-ups, ready for JSON."""
        return {**asdict(self), "speedups": self.speedups}


def measure(
    server: Server, engine: EngineBase | None, prompts: Sequence[Prompt], loads: Sequence[int], **settings: Any
) -> tuple[list[Load], list[str]]:
    """(what each load gave, the texts of the first load). Every load asks all prompts, and some of them again where it is larger.

    `settings` go with each request. Raises `ForedraftError` for a request that is not answered: a measurement without it would flatter.
    """
    server.stream(prompts[0], **{**settings, "max_tokens": 8})
    found, texts = [], list[str]()
    for load in loads:
        asked = [prompts[i % len(prompts)] for i in range(max(len(prompts), 2 * load))]
        before, start = read_metrics(server.root), time.perf_counter()
        with ThreadPoolExecutor(load) as pool:
            answers = list(pool.map(lambda prompt: server.stream(prompt, **settings), asked))
        seconds, tokens = time.perf_counter() - start, sum(a.tokens for a in answers)
        accepted = engine.accepted(before, read_metrics(server.root)) if engine else None
        first = sorted(a.first for a in answers)
        slow = first[min(len(first) - 1, round(0.95 * len(first)))]
        told = (accepted.tau, accepted.positions) if accepted else (None, [])
        found.append(Load(load, tokens, tokens / seconds, statistics.median(first), slow, *told))
        texts = texts or [a.text for a in answers]
    return found, texts


def check_drafted(found: Sequence[Load], url: str) -> None:
    """Raises `ForedraftError` where a server that has a draft and tells what it counts drafted nothing.

    llama.cpp only logs that a draft could not be set up, and goes on without it.
    """
    if all(load.tau is None for load in found) and read_metrics(url):
        raise ForedraftError("the server answered without drafting a token: its draft is not in use, see what it said of it")


def parse_loads(text: str) -> list[int]:
    """`1,4,16` as numbers. Raises `ForedraftError` for anything else."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ForedraftError(f"--concurrency {text}: expected numbers of requests at once, as in 1,4,16")
    return found


def served_table(results: Mapping[str, Served]) -> "Table":
    """A row per prompt set and load."""
    from rich.table import Table

    settings = next(iter(results.values())).settings
    rows = Table(title=", ".join(f"{name} {value}" for name, value in settings.items() if name != "prompts"), title_justify="left")
    for column in (
        "prompts",
        "at once",
        "tokens/s plain",
        "drafted",
        "speed-up",
        "first token plain",
        "drafted",
        "τ",
        "accepted per position",
    ):
        rows.add_column(column, justify="left" if column == "prompts" else "right")
    for name, r in results.items():
        for i, load in enumerate(r.drafted):
            plain = r.plain[i] if r.plain else None
            rows.add_row(
                name if i == 0 else "",
                str(load.concurrency),
                f"{plain.tokens_per_second:.1f}" if plain else "-",
                f"{load.tokens_per_second:.1f}",
                f"{r.speedups[i]:.2f}×" if plain else "-",
                f"{1000 * plain.first_token:.0f} ms" if plain else "-",
                f"{1000 * load.first_token:.0f} ms",
                f"{load.tau:.2f}" if load.tau else "-",
                " ".join(f"{a:.2f}" for a in load.acceptance),
            )
        if r.ours:
            rows.add_row(
                "in this process", *["-"] * 6, f"{r.ours['tau']:.2f}", " ".join(f"{a:.2f}" for a in r.ours["acceptance"]), style="dim"
            )
    return rows


def plot_served(results: Mapping[str, Served], file: str | Path) -> None:
    """Tokens per second by load, and acceptance per position by the engine and by us, into a PNG."""
    with picture(file, 2, figsize=(10, 4), constrained_layout=True) as (speed, acceptance):
        for i, (name, r) in enumerate(results.items()):
            for loads, style, what in ((r.plain, "o--", "plain"), (r.drafted, "o-", "drafted")):
                if loads:
                    speed.plot(
                        [x.concurrency for x in loads], [x.tokens_per_second for x in loads], style, color=f"C{i}", label=f"{name}, {what}"
                    )
            for found, style, what in ((r.drafted[0].acceptance, "o-", "engine"), ((r.ours or {}).get("acceptance", []), "x--", "ours")):
                if found:
                    acceptance.plot(range(1, len(found) + 1), found, style, color=f"C{i}", label=f"{name}, {what}")
        speed.set(xscale="log", xlabel="requests at once", ylabel="tokens/s", title="speed")
        acceptance.set(xlabel="drafted position", ylabel="share of drafts accepted up to here", ylim=(0, 1), title="acceptance")
        for axis in (speed, acceptance):
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize=7)
