"""The command line by which an engine serves a draft."""

import shlex
from pathlib import Path

from ..contracts.algorithm import tokens_to_draft
from ..contracts.engine import Config, EngineBase
from ..contracts.loading import PLAIN, Repository
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
) -> str:
    """`serve_commands` as lines for a shell."""
    return "\n".join(map(shlex.join, serve_commands(engine, draft, target, num_tokens, repository, registry)))


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
