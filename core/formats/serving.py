"""The command line by which an engine serves a draft."""

import json
import shlex
from itertools import pairwise
from pathlib import Path

from ..contracts.algorithm import tokens_to_draft
from ..contracts.engine import Config, EngineBase
from ..contracts.loading import PLAIN, Repository
from ..decoding.speedup import best_length
from ..errors import ForedraftError
from ..files.hub import find_draft
from ..files.raw import Checkpoint
from ..files.reading import check_fields, most_tokens, read_config
from ..registry import Registry, default_registry
from ..target.pairing import check_named
from .content import recognise


def serve_command(
    engine: EngineBase,
    draft: str | Path,
    target: str,
    num_tokens: int | None = None,
    repository: Repository = PLAIN,
    registry: Registry | None = None,
    costs: Path | None = None,
) -> str:
    """`serve_commands` as lines for a shell; with `costs`, a file that `tokens_that_pay` reads, it chooses how many tokens are drafted."""
    if costs is not None:
        num_tokens = tokens_that_pay(costs, find_draft(draft))
    return "\n".join(map(shlex.join, serve_commands(engine, draft, target, num_tokens, repository, registry)))


def tokens_that_pay(costs: Path, draft: Path) -> int:
    """How many tokens are best drafted, by what was recorded of a draft's acceptance (`foredraft eval --record`) and by measured costs.

    Of prompt sets the mean. `costs` is JSON with `{"costs": {"1": 1.3, "2": 1.6, "4": 2.4}}`: what a pass with so many drafted tokens
    costs, drafting included, in passes of the target alone (`benchmarks/llamacpp.py` writes it); what lies between is interpolated,
    nothing beyond is looked at. Raises `ForedraftError` for anything else, and where no number of tokens pays.
    """
    config: Config = {} if draft.is_file() else read_config(draft)
    measured = check_fields(config, draft).foredraft.measured.values() if "foredraft" in config else ()
    found = [prompts.acceptance for prompts in measured if prompts.acceptance]
    if not found:
        record = "measure it, `foredraft eval --record` of its directory, and name that"
        raise ForedraftError(f"--costs: how often drafts of '{draft}' are accepted is not recorded; {record}")
    cost = _read_costs(costs)
    shares = [sum(at) / len(at) for at in zip(*found, strict=False)][: max(cost)]
    best, _ = best_length(shares, [cost[k] for k in range(len(shares) + 1)], [0.0] * len(shares))
    if best == 0:
        gains = ", ".join(f"{1 + sum(shares[:k]):.2f} tokens for {cost[k]:.2f} passes with {k}" for k in range(1, len(shares) + 1))
        raise ForedraftError(f"by '{costs}' no number of drafted tokens pays ({gains}): serve the target alone, or name --num-draft-tokens")
    return best


def _read_costs(file: Path) -> dict[int, float]:
    """By number of drafted tokens, from none, without gaps."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))["costs"]
        known = {0: 1.0, **{int(k): float(cost) for k, cost in told.items()}}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ForedraftError(f"--costs {file}: expected JSON such as {{'costs': {{'1': 1.3, '2': 1.6}}}}: {error}") from error
    between: dict[int, float] = {}
    for (a, low), (b, high) in pairwise(sorted(known.items())):
        between |= {k: low + (high - low) * (k - a) / (b - a) for k in range(a, b + 1)}
    return between


def serve_commands(
    engine: EngineBase,
    draft: str | Path,
    target: str,
    num_tokens: int | None = None,
    repository: Repository = PLAIN,
    registry: Registry | None = None,
    dtype: str | None = None,
) -> list[list[str]]:
    """The command by which `engine` serves the draft in a directory, in a file or on the hub; before it what has to be run once.

    By default it drafts all that the draft makes at once, or 4 tokens. Raises `ForedraftError` if the engine does not serve this draft,
    saying why, or not so many tokens, or not for this target.
    """
    path = find_draft(draft)
    draft = path if Path(draft).exists() else draft  # engines know the hub themselves
    config, described = _read(path, registry)
    if reason := engine.refuses(config):
        raise ForedraftError(
            f"{engine.name} does not serve the draft '{draft}': {reason}\n  `foredraft info {draft}` says which engines do"
        )
    if reason := engine.refuses_target(target):
        raise ForedraftError(f"{engine.name} does not serve the target '{target}': {reason}")
    if "foredraft" in config:
        check_named(check_fields(config, path).foredraft.target.model_dump(), target, repository)
    arguments = engine.arguments(config, str(draft), target, tokens_to_draft(num_tokens, most_tokens(described)))
    commands = [engine.prepare(config, str(draft), target), [*arguments, *engine.repository_arguments(repository, dtype)]]
    return [words for words in commands if words]


def _read(path: Path, registry: Registry | None) -> tuple[Config, Config]:
    """What engines are told of a draft, and its fields in our words, which are the same unless it is a file."""
    if not path.is_file():
        return (config := read_config(path)), config
    registry = registry or default_registry()
    file = Checkpoint.open(path, registry)
    if file.findings:
        raise ForedraftError(f"'{path}' cannot be read: {file.findings[0].found}")
    return file.config, recognise(file.config, file.tensors, registry).config
