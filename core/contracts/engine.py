"""The contract of engines: which drafts a serving system loads, and the command line that serves one."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from .finding import Finding
from .loading import Repository
from .plugin import Plugin


class Files(Protocol):
    """A draft's directory, or file, as it lies on disk; `foredraft.files.Checkpoint` is one."""

    @property
    def config(self) -> Mapping[str, Any]:
        """`config.json` as it stands."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """By the names in the files: each has a `shape` and a `dtype`."""

    def tensor(self, name: str) -> Any:
        """One of them, loaded. Raises `ForedraftError` if its file is damaged."""


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of `architectures`, by which engines choose the class to load; empty if there is none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def drafts_in_parallel(config: Mapping[str, Any]) -> bool:
    """Whether a draft reads a token that stands for the unknown, as P-EAGLE and DFlash do."""
    return any(config.get(name) is not None for name in ("mask_token_id", "ptd_token_id", "pard_token"))


def is_reduced(config: Mapping[str, Any]) -> bool:
    """Whether the draft's vocabulary is a part of the target's."""
    return config.get("draft_vocab_size") not in (None, config.get("vocab_size"))


Config = Mapping[str, Any]
"""A draft's `config.json`, ours or a peer's."""
Metrics = Sequence[tuple[str, Mapping[str, str], float]]
"""What a server counts: name, labels, value."""


@dataclass(frozen=True)
class Accepted:
    """What a server counted of its drafting."""

    tau: float
    """Tokens per pass of the target, the bonus token included."""
    positions: list[float]
    """Share of drafts that were accepted up to each position; empty where the server does not count them apart."""


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """The sum of a counter over all that have these labels."""
    return sum(value for called, has, value in metrics if called == name and labels.items() <= has.items())


def accepted_by_position(server: str, before: Metrics, after: Metrics) -> Accepted | None:
    """By counters as vLLM names them, and llama.cpp after it: `server`:spec_decode_num_drafts_total and its kin."""

    def since(name: str, **labels: str) -> float:
        called = f"{server}:spec_decode_{name}_total"
        return total(after, called, **labels) - total(before, called, **labels)

    if not (drafts := since("num_drafts")):
        return None
    name = "num_accepted_tokens_per_pos"
    positions = sorted({int(has["position"]) for called, has, _ in after if called == f"{server}:spec_decode_{name}_total"})
    return Accepted(1 + since("num_accepted_tokens") / drafts, [since(name, position=str(p)) / drafts for p in positions])


class EngineBase(Plugin):
    """A serving system. What it serves is told by what its loader reads of a `config.json`, never by who wrote the draft.

    A subclass sets `name` and `summary` and implements `refuses` and `arguments`; `findings` are its checks for `foredraft doctor`.
    """

    targets: ClassVar[frozenset[str] | None] = None
    """The architectures of which it hands hidden states to an EAGLE-3 draft, where that is known: `foredraft targets` has a column then."""

    @abstractmethod
    def refuses(self, config: Config) -> str | None:
        """Why this engine does not serve a draft with this `config.json`; None if it does."""

    @abstractmethod
    def arguments(self, config: Config, draft: str, target: str, num_tokens: int) -> list[str]:
        """The command that serves the draft, as a list of arguments."""

    def server(self, target: str) -> list[str] | None:
        """The command of an OpenAI server of the target alone, `--host` and `--port` to follow; None where the engine has none."""
        return None

    def extraction(self, target: str, layers: Sequence[int], directory: str) -> list[str] | None:
        """The same of a server that writes the states of `layers` (HF `hidden_states` indices, that of the last layer before its norm) of
        every prompt to `directory`; None where the engine cannot."""
        return None

    def accepted(self, before: Metrics, after: Metrics) -> Accepted | None:
        """What the server accepted between two looks at its counters; None where they do not tell."""
        return None

    def refuses_target(self, target: str) -> str | None:
        """Why this engine cannot serve the target in a directory, in a file or on the hub; None if nothing speaks against it."""
        return None

    def prepare(self, config: Config, draft: str, target: str) -> list[str]:
        """A command to be run once before `arguments`, where the draft is served from another file than ours; none as a rule."""
        return []

    def findings(self, checkpoint: Files) -> list[Finding]:
        """What goes wrong with a draft's files in this engine, beside what is wrong with them anywhere."""
        if reason := self.refuses(checkpoint.config):
            breaks = f"{self.name} does not serve this draft"
            return [Finding(f"{self.name}-refuses", "error", reason, breaks, "`foredraft info DRAFT` says which engines do")]
        return []

    def repository_arguments(self, repository: Repository, dtype: str | None = None) -> list[str]:
        """What `arguments` are followed by: how the target's repository is read, and its dtype (auto, float32, ...), if told.

        All engines known so far that read such repositories spell it alike.
        """
        revision = ["--revision", repository.revision] if repository.revision else []
        trusted = ["--trust-remote-code"] if repository.trust_remote_code else []
        return [*revision, *trusted, *(["--dtype", dtype] if dtype else [])]


def unknown_architecture(config: Config, known: Mapping[str, Any] | tuple[str, ...]) -> str | None:
    """A reason to refuse a draft whose architecture is none of the `known` ones."""
    if (architecture := architecture_of(config)) in known:
        return None
    return f"its loader knows no draft architecture {architecture or '(none is named)'!r}; it takes {', '.join(known)}"


def layers_without(norm: str, names: Collection[str]) -> list[str]:
    """The layers above the first that have tensors but no `norm`; what a draft calls the norm before their attention differs."""
    layers = {match[1] for name in names if (match := re.match(r"(?:model\.)?(layers\.[1-9]\d*)\.", name))}
    return sorted(layer for layer in layers if not {f"{layer}.{norm}.weight", f"model.{layer}.{norm}.weight"} & set(names))
