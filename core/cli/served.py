"""`foredraft eval` of an engine's server."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..contracts.loading import Loading
from ..errors import ForedraftError
from .common import load_draft_for, load_target


@dataclass(frozen=True)
class Asked:
    """What is measured."""

    target: str | None
    draft: Path | None
    engine: str | None
    base_url: str | None
    engine_arguments: str | None
    loads: list[int]
    """How many requests at once, in turn."""
    num_draft_tokens: int | None
    max_new_tokens: int
    temperature: float
    dtype: str
    baseline: bool
    ours: bool
    loading: Loading


def evaluate_served(asked: Asked, questions: Mapping[str, list[Any]], out: Path | None) -> None:
    """Measure a server that runs, or an engine with and without the draft; print, and write JSON and a plot."""
    from rich.console import Console

    from ..decoding.served import Served, check_drafted, measure, plot_served, served_table
    from ..files.writing import write_text
    from ..registry import default_registry
    from ..serving import Server, running_engine

    engine = default_registry().engine(asked.engine)() if asked.engine else None
    requests: dict[str, Any] = {"max_tokens": asked.max_new_tokens, "temperature": asked.temperature}
    settings = {"engine": asked.engine or asked.base_url, **requests}
    if template := getattr(asked.loading, "template_kwargs", None):
        requests["extra_body"] = {"chat_template_kwargs": template}

    def at(url: str) -> dict[str, Any]:
        server = Server(url, retries=0)
        counting = engine or _told_by_counters(server.root)
        return {name: measure(server, counting, prompts, asked.loads, **requests) for name, prompts in questions.items()}

    if asked.base_url is not None:
        results = {name: Served(found, settings=settings) for name, (found, _) in at(asked.base_url).items()}
    else:
        plain_command, command = _commands(asked, engine)
        ours = _ours(asked, questions) if asked.ours else {}
        plain = {}
        if asked.baseline:
            with running_engine(plain_command, asked.engine_arguments) as url:
                plain = at(url)
        with running_engine(command, asked.engine_arguments) as url:
            drafted = at(url)
            check_drafted([load for found, _ in drafted.values() for load in found], url)
        results = {}
        for name, (found, texts) in drafted.items():
            before, without = plain.get(name, ([], []))
            same = None if asked.temperature or not without else sum(a == b for a, b in zip(texts, without, strict=True))
            results[name] = Served(found, before, same, ours.get(name), settings)
    console = Console()
    console.print(served_table(results))
    for name, result in results.items():
        if result.identical is not None:
            answers = max(len(questions[name]), 2 * asked.loads[0])
            console.print(f"{name}: {result.identical} of {answers} answers are the same with and without the draft")
    if out is not None:
        write_text(out, json.dumps({name: result.to_dict() for name, result in results.items()}, indent=2))
        plot_served(results, out.with_suffix(".png"))
        console.print(f"written: {out} and {out.with_suffix('.png')}")


def _commands(asked: Asked, engine: Any) -> tuple[list[str], list[str]]:
    """(the server of the target alone, the one with the draft); what that needs before it starts has been run."""
    from ..formats.serving import serve_commands
    from ..serving.process import run_command

    assert asked.target is not None
    assert asked.draft is not None
    plain = engine.server(asked.target)
    if plain is None:
        raise ForedraftError(f"engine '{asked.engine}' has no server: leave --engine out, and transformers is measured")
    *before, drafted = serve_commands(engine, asked.draft, asked.target, asked.num_draft_tokens, asked.loading, dtype=asked.dtype)
    for words in before:
        run_command(words)
    return [*plain, *engine.repository_arguments(asked.loading, asked.dtype)], drafted


def _ours(asked: Asked, questions: Mapping[str, list[Any]]) -> dict[str, dict[str, Any]]:
    """τ and acceptance in this process; the memory is free again before a server starts."""
    from ..decoding import evaluate

    model, tokenizer = load_target(str(asked.target), asked.dtype, asked.loading)
    draft = load_draft_for(Path(str(asked.draft)), model)
    found = {}
    for name, prompts in questions.items():
        how: dict[str, Any] = {"num_draft_tokens": asked.num_draft_tokens, "max_new_tokens": asked.max_new_tokens}
        got = evaluate(model, draft, tokenizer, prompts, temperature=asked.temperature, baseline=False, **how)
        found[name] = {"tau": got.tau, "acceptance": got.acceptance}
    return found


def _told_by_counters(root: str) -> Any:
    """The engine whose counters a server has; None if nobody knows them."""
    from ..registry import default_registry
    from ..serving import read_metrics

    names = {name.partition(":")[0] for name, _, _ in read_metrics(root)}
    return next((engine() for name, engine in default_registry().engines().items() if name in names), None)
