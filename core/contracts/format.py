"""The contract of formats: how another project writes a draft down."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import ForedraftError
from .draft import DraftModel
from .engine import Config, Files
from .finding import Finding
from .options import Frozen
from .plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OneFile:
    """What the file of a draft holds that is one file, none of its tensors loaded."""

    config: Mapping[str, Any]
    """What it says of the draft; it stands for a `config.json`."""
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and torch's name of the dtype of each tensor, as `load` gives it."""
    load: Callable[[str], Tensor]
    """One tensor, by its name."""


class FormatBase(Plugin):
    """A way of writing a draft down that is not ours, told by what a checkpoint holds, never by where it comes from.

    A subclass sets `name`, `summary` and `sign` and implements `recognises`; the rest says where its words are not ours. One that drafts
    of ours can be exported to implements `write`, and `refuses` for what it cannot express; `Options` are those of the export. One whose
    drafts are a file each sets `suffix` and implements `open` (and `save`).
    """

    sign: ClassVar[str]
    """What tells it, in words."""
    priority: ClassVar[int] = 1
    """Of the formats that recognise a checkpoint the one of the highest priority counts, and two of one priority are refused: 1 for one
    told by a name of its own, 0 by what others may have, too."""
    suffix: ClassVar[str] = ""
    """How its files end, if a draft is one file, and no directory of safetensors and a `config.json`."""
    Options: ClassVar[type[Frozen]] = Frozen
    """Of an export: `foredraft export --format NAME --OPTION VALUE`."""

    def __init__(self, options: Frozen | None = None):
        self.options: Any = self.Options() if options is None else options

    @abstractmethod
    def recognises(self, names: Collection[str], config: Config) -> bool:
        """Whether a checkpoint with tensors of these names and this `config.json` is written so."""

    def rename(self, name: str) -> str | None:
        """Our name of a tensor; None for one that only its training reads."""
        return name

    def flatten(self, config: Config) -> dict[str, Any]:
        """Its `config.json` in the words that engines know, all fields of the draft side by side, its own defaults filled in.

        Raises `ForedraftError` for what no draft of ours computes.
        """
        return dict(config)

    def notes(self, config: Config) -> list[str]:
        """What of its `config.json` is taken in a sense of its own, a text each."""
        return []

    def findings(self, draft: Files) -> list[Finding]:
        """What is wrong with a draft that is written so, for `foredraft doctor`, beside what may be wrong with any."""
        return []

    def algorithm(self, config: Config) -> str | None:
        """The algorithm that its `config.json` names, by our name; None if it names none: the tensors tell it."""
        return None

    def open(self, file: Path) -> OneFile:
        """What such a file holds. Raises `ForedraftError` for what it lacks to be read; whatever else it raises, the file is damaged."""
        raise NotImplementedError

    def refuses(self, config: Config) -> list[str]:
        """Why a draft of ours with this `config.json` cannot be written so, all reasons, a line each."""
        return []

    def write(
        self, draft: DraftModel, tensors: Mapping[str, Tensor], algorithm: str | None, num_tokens: int
    ) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """The `config.json` and the tensors, by their names there, of a draft of ours, from its own `tensors`.

        `algorithm` is what these tell (EAGLE-3 for one of its variants, say), `num_tokens` what servers draft unless told otherwise. Raises
        `ForedraftError` for a draft that the format cannot express.
        """
        raise ForedraftError(f"format '{self.name}' is read, not written")

    def save(self, file: Path, config: Config, tensors: Mapping[str, Tensor]) -> None:
        """Put what `write` gives into the one file that a draft is."""
        raise NotImplementedError

    @classmethod
    def written(cls) -> bool:
        """Whether drafts of ours can be exported to it."""
        return cls.write is not FormatBase.write

    @classmethod
    def lacking(cls) -> list[str]:
        """See `Plugin.lacking`."""
        texts = [] if isinstance(getattr(cls, "sign", None), str) else ["sign: what tells it, in words"]
        needed = [FormatBase.open, *([FormatBase.save] if cls.written() else [])] if cls.suffix else []
        return super().lacking() + texts + [f"{m.__name__}(...): it has a suffix" for m in needed if getattr(cls, m.__name__) is m]
