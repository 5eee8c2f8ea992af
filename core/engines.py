"""The contract of engines: which drafts a serving system loads, and the command line that serves one."""

import re
import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import ForedraftError
from .layouts import architecture_of
from .loading import PLAIN, Repository

if TYPE_CHECKING:
    from .doctor import Checkpoint, Finding

Config = Mapping[str, Any]
"""A draft's `config.json`, ours or a peer's."""


class EngineBase:
    """A serving system. What it serves is told by what its loader reads of a `config.json`, never by who wrote the draft.

    A subclass sets `name` and `summary` and implements `refuses` and `arguments`; `findings` are its checks for `foredraft doctor`.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""

    def refuses(self, config: Config) -> str | None:
        """Why this engine does not serve a draft with this `config.json`; None if it does."""
        raise NotImplementedError(f"engine '{self.name}' must say what it serves: def refuses(self, config) -> str | None")

    def arguments(self, config: Config, draft: str, target: str, num_tokens: int) -> list[str]:
        """The command that serves the draft, as a list of arguments."""
        raise NotImplementedError(f"engine '{self.name}' must be started: def arguments(self, config, draft, target, num_tokens) -> list")

    def findings(self, checkpoint: "Checkpoint") -> "list[Finding]":
        """What goes wrong with a draft's files in this engine, beside what is wrong with them anywhere."""
        from .doctor import Finding

        if reason := self.refuses(checkpoint.config):
            breaks = f"{self.name} does not serve this draft"
            return [Finding(f"{self.name}-refuses", "error", reason, breaks, "`foredraft info DRAFT` says which engines do")]
        return []

    def repository_arguments(self, repository: Repository) -> list[str]:
        """What `arguments` are followed by: how the target's repository is read. All engines known so far spell it alike."""
        revision = ["--revision", repository.revision] if repository.revision else []
        return [*revision, *(["--trust-remote-code"] if repository.trust_remote_code else [])]

    def command(self, draft: str | Path, target: str, num_tokens: int | None = None, repository: Repository = PLAIN) -> str:
        """The command line that serves the draft in a directory or on the hub; by default it drafts all it makes at once, or 4 tokens.

        Raises `ForedraftError` if the engine does not serve this draft, saying why, or not so many tokens, or not for this target.
        """
        from .hub import find_draft
        from .pairing import check_named
        from .protocols import tokens_to_draft
        from .reading import check_fields, read_config

        directory = find_draft(draft)
        draft = directory if Path(draft).exists() else draft  # engines know the hub themselves
        config = read_config(directory)
        if reason := self.refuses(config):
            raise ForedraftError(
                f"{self.name} does not serve the draft '{draft}': {reason}\n  `foredraft info {draft}` says which engines do"
            )
        if "foredraft" in config:
            check_named(check_fields(config, directory).foredraft.target.model_dump(), target, repository)
        arguments = self.arguments(config, str(draft), target, tokens_to_draft(num_tokens, most_tokens(config)))
        return shlex.join([*arguments, *self.repository_arguments(repository)])


def most_tokens(config: Config) -> int | None:
    """How many tokens a draft makes at once, None if one after another: as its algorithm says, else as its block has slots to draft."""
    from .auto import make_algorithm
    from .registry import default_registry

    with suppress(ForedraftError, KeyError, TypeError):  # a peer's, or the plugin is not here
        made = config["foredraft"]
        return make_algorithm(made["algorithm"], made["options"], default_registry()).max_tokens
    block = config.get("block_size")
    return block - 1 if isinstance(block, int) and block > 1 else None


def unknown_architecture(config: Config, known: Mapping[str, Any] | tuple[str, ...]) -> str | None:
    """A reason to refuse a draft whose architecture is none of the `known` ones."""
    if (architecture := architecture_of(config)) in known:
        return None
    return f"its loader knows no draft architecture {architecture or '(none is named)'!r}; it takes {', '.join(known)}"


def layers_without(norm: str, names: Collection[str]) -> list[str]:
    """The layers above the first that have tensors but no `norm`; what a draft calls the norm before their attention differs."""
    layers = {match[1] for name in names if (match := re.match(r"(?:model\.)?(layers\.[1-9]\d*)\.", name))}
    return sorted(layer for layer in layers if not {f"{layer}.{norm}.weight", f"model.{layer}.{norm}.weight"} & set(names))
