"""The command line by which an engine serves a draft."""

import shlex
from pathlib import Path

from ..contracts.algorithm import tokens_to_draft
from ..contracts.engine import EngineBase
from ..contracts.loading import PLAIN, Repository
from ..errors import ForedraftError
from ..files.hub import find_draft
from ..files.reading import check_fields, most_tokens, read_config
from ..target.pairing import check_named


def serve_command(engine: EngineBase, draft: str | Path, target: str, num_tokens: int | None = None, repository: Repository = PLAIN) -> str:
    """`serve_arguments` as a line for a shell."""
    return shlex.join(serve_arguments(engine, draft, target, num_tokens, repository))


def serve_arguments(
    engine: EngineBase, draft: str | Path, target: str, num_tokens: int | None = None, repository: Repository = PLAIN
) -> list[str]:
    """The command by which `engine` serves the draft in a directory or on the hub.

    By default it drafts all that the draft makes at once, or 4 tokens. Raises `ForedraftError` if the engine does not serve this draft,
    saying why, or not so many tokens, or not for this target.
    """
    directory = find_draft(draft)
    draft = directory if Path(draft).exists() else draft  # engines know the hub themselves
    config = read_config(directory)
    if reason := engine.refuses(config):
        raise ForedraftError(
            f"{engine.name} does not serve the draft '{draft}': {reason}\n  `foredraft info {draft}` says which engines do"
        )
    if "foredraft" in config:
        check_named(check_fields(config, directory).foredraft.target.model_dump(), target, repository)
    arguments = engine.arguments(config, str(draft), target, tokens_to_draft(num_tokens, most_tokens(config)))
    return [*arguments, *engine.repository_arguments(repository)]
