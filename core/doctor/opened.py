"""A draft's files, and its target's, in one view for any format: their tensors and fields by our names."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..contracts.aux_layers import check_aux_layers
from ..contracts.format import FormatBase
from ..errors import ForedraftError
from ..files.raw import Checkpoint
from ..formats.content import known_by
from ..registry import Registry, default_registry
from .described import LARGE

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
"""Ends of its name in the files of targets."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Opened:
    """A draft and, where known, its target. Fields and tensors that are not what they should be read as absent."""

    draft: Checkpoint
    target: Checkpoint | None = None
    plugins: Registry | None = None
    """None: all that is installed."""

    @property
    def registry(self) -> Registry:
        """The plugins that are asked."""
        return self.plugins or default_registry()

    @cached_property
    def forms(self) -> list[FormatBase]:
        """The formats in which it is written, the surest first."""
        found = []
        for cls in self.registry.formats().values():
            with suppress(Exception):  # a format is a plugin, and may stumble over what it did not expect
                found += known_by([cls()], self.draft.tensors, self.draft.config)
        return sorted(found, key=lambda form: -form.priority)

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """The draft's config, a peer's in the words that engines know, as far as it can be read."""
        for form in self.forms if not self.made else ():
            with suppress(Exception):
                return form.flatten(self.draft.config)
        return self.draft.config

    @cached_property
    def target_fields(self) -> Mapping[str, Any]:
        """The target's config, of a multimodal one that of its text model, by the names that families share; empty without a target."""
        config = self.target.config if self.target else {}
        text = config.get("text_config")
        fields = {**config, **text} if isinstance(text, Mapping) else config
        if not fields or "num_hidden_layers" in fields:
            return fields
        from transformers import CONFIG_MAPPING

        kind = str(fields.get("model_type"))
        shared = {"num_hidden_layers": "num_layers", **(CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {})}
        return {**fields, **{name: fields[own] for name, own in shared.items() if own in fields}}

    @cached_property
    def ours(self) -> Mapping[str, str]:
        """The name in our format of each tensor that a draft reads, by the name in the file."""
        named: dict[str, str | None] = {name: name for name in self.draft.tensors}
        for form in self.forms:
            named = {theirs: form.rename(ours) if ours else None for theirs, ours in named.items()}
        return {theirs: ours for theirs, ours in named.items() if ours}

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The name in the file of each tensor, by the name in our format."""
        return {ours: theirs for theirs, ours in self.ours.items()}

    @cached_property
    def made(self) -> Mapping[str, Any]:
        """What foredraft recorded when it made the draft; empty for a peer's."""
        return as_mapping(self.draft.config.get("foredraft"))

    @cached_property
    def spec(self) -> Mapping[str, Any]:
        """What the algorithm asked for and what it was told, where foredraft recorded it."""
        return {**as_mapping(self.made.get("options")), **as_mapping(self.made.get("spec"))}

    @cached_property
    def saved(self) -> Mapping[str, Any]:
        """Fields as they were when foredraft wrote the draft, of those that its tensors do not tell."""
        return as_mapping(self.made.get("fields"))

    def integer(self, name: str) -> int | None:
        """A size, count or id of the draft's config."""
        return as_integer(self.fields.get(name))

    def shape(self, name: str) -> Shape | None:
        """Of the tensor called so in our format."""
        return self.draft.tensors[self.names[name]].shape if name in self.names else None

    def load(self, name: str) -> "Tensor | None":
        """The tensor called so in our format; None if it is not there or cannot be read."""
        try:
            return self.draft.tensor(self.names[name]) if name in self.names else None
        except ForedraftError:
            return None

    def load_target(self, end: str) -> "Tensor | None":
        """The target's tensor whose name ends so; None if it is not there, cannot be read, or is quantised."""
        names = self.target.tensors if self.target else ()
        return self._load_target(next((name for name in names if name.endswith(end)), None))

    def target_embedding(self) -> "Tensor | None":
        """[V, T], whatever the target calls it; None if it is not there."""
        return self._load_target(self._target_tables[0])

    def target_head(self) -> "Tensor | None":
        """[V, T], whatever the target calls it, its embedding where they are tied; None if it is not there."""
        return self._load_target(self._target_tables[1])

    def _load_target(self, name: str | None) -> "Tensor | None":
        try:
            found = self.target.tensor(name) if self.target and name else None
        except ForedraftError:
            return None
        return found if found is not None and found.is_floating_point() and found.element_size() > 1 else None

    @cached_property
    def _target_tables(self) -> tuple[str | None, str | None]:
        """The names of the target's embedding and head: matrices of a row per token that belong to no layer."""
        rows, width = (as_integer(self.target_fields.get(name)) for name in ("vocab_size", "hidden_size"))
        if self.target is None or not rows or not width:
            return None, None
        shapes = {name: info.shape for name, info in self.target.tensors.items() if not re.search(r"\.\d+\.", name)}
        tables = [name for name, shape in shapes.items() if len(shape) == 2 and shape[1] == width and shape[0] >= rows]
        embedding = next((name for end in EMBEDDING for name in tables if name.endswith(end)), None)
        heads = [name for name in tables if name != embedding]
        if not heads and self.target_fields.get("tie_word_embeddings") is not False:
            heads = [embedding] if embedding else []
        return embedding, heads[0] if len(heads) == 1 else None


def as_mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def as_integer(value: Any, low: int = 0) -> int | None:
    """`value` if it is an integer of a sane size."""
    return value if isinstance(value, int) and not isinstance(value, bool) and low <= value <= LARGE else None


def readable(layers: Sequence[Any], count: int | None) -> bool:
    """Whether these can be aux layers of a target of `count` layers (None: any): in order, and not the last."""
    try:
        return bool(check_aux_layers(tuple(layers), count or max(*layers, 1) + 1))
    except (ForedraftError, TypeError):
        return False
