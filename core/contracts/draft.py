"""The draft as algorithms see it, and the key to the shape suffixes of tensors.

Dimension key: `B` batch, `S` target positions, `Q` draft query slots, `K` drafting steps, `D` draft hidden, `A` num_aux × target
hidden, `T` target hidden, `V` target vocabulary, `W` draft vocabulary, `H` heads, `d` head dim, `N` compacted rows, `R` teacher rows.
In few places: `L` tokens of one text, `C` rows of a chunk, `U` samples, `M` anchors drawn in a row, `E` elements or entries, `F` nodes of
a tree that are expanded together, `k` the best of what is ranked, `X` any width.
Layer ids are indices into HF `hidden_states`: 0 is the embedding output, i the output of the i-th decoder layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from .config import DraftConfigMixin
from .plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor, nn

HeadParts = tuple["Callable[[Tensor], Tensor]", "nn.Linear", "nn.Linear | None"]
"""What is done to a state, the matrix behind it, and the algorithm's `rider`, if it has one."""

Batch = Mapping[str, Any]
"""A collated batch: `input_ids`, `positions`, `documents`, `spans` (each [B, S], see `foredraft.data`), `row` [B], `ends`, and what the
algorithm's `plan` added."""


class Pattern(Protocol):
    """Who attends to whom. Knows nothing of architectures."""

    def visible(self, batch: int, queries: int, entries: Sequence[int], rows: Tensor | None = None) -> Tensor:
        """Who sees whom, spelt out: True where a query may look at a key, [B, Q, K].

        `entries` are the lengths of the keys' entries, whose keys stand side by side; `rows` as in `attend`. For tests and pictures.
        """

    def attend(self, q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, rows: Tensor | None = None) -> Tensor:
        """Attention output [B, H, Q, d]. `keys` and `values` are what the cache returned, oldest first, each [B, H, K, d].

        `rows` [B, Q] are the places of the queries among the keys of the newest entry; None: the last Q.
        """


class KeyValueCache(Protocol):
    """Keeps keys and values between calls of `backbone`."""

    def extend(self, layer: int, k_BHQd: Tensor, v_BHQd: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Add this call's keys and values of `layer`; return all that a pattern may look at."""


@dataclass(frozen=True)
class Layout:
    """Where each input of `backbone` sits and what it may see."""

    positions: Tensor
    """Which token of its text each input is, [B, Q]: its rotary position, unless the target has it elsewhere (`Signal.places_CBS`).

    Under the wiring `Prefix` the inputs are the context's S, then the embeddings' Q.
    """
    pattern: Pattern
    rows: Tensor | int | None = None
    """[B, Q'] inputs whose output is wanted, or how many of the last; the others only give keys and values.

    None: all (under `Prefix`: all embeddings).
    """
    step: int = 0
    """The drafting step, for wirings that have layers of their own for each."""


class Wiring(Protocol):
    """What stands between a draft's embedding and head: how it takes in the target's states. Stateless: the draft has the modules."""

    def modules(self, draft: DraftModel) -> dict[str, nn.Module]:
        """Its modules by the name under which they are saved (`fc`, `layers`, `norm`, ...); fresh, on the default device."""

    def project(self, draft: DraftModel, aux_BSA: Tensor) -> Tensor:
        """See `DraftModel.project_hidden_states`."""

    def backbone(self, draft: DraftModel, embeds_BQD: Tensor, context_BSD: Tensor, layout: Layout, cache: KeyValueCache | None) -> Tensor:
        """See `DraftModel.backbone`."""

    def head_input(self, draft: DraftModel, hidden_BQD: Tensor) -> Tensor:
        """What the head reads of a state."""

    def head_modules(self, draft: DraftModel) -> list[nn.Module]:
        """The modules that `head_input` runs."""

    def start(self, draft: DraftModel, layers: Sequence[Mapping[str, Tensor]], norm: Mapping[str, Tensor]) -> list[str]:
        """Take over the target's decoder `layers` (weights by the draft's names, see `BaseDraft.weights_of`) and its final norm.

        What was taken over, a text each.
        """

    def saved(self, draft: DraftModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as engines read them."""


class DraftModel(Plugin):
    """A draft of any family: the methods that algorithms are written against. `foredraft.BaseDraft` implements them on modules."""

    model_types: ClassVar[tuple[str, ...]]
    """The targets' `model_type`s this adapter drafts for."""
    generic: ClassVar[bool] = False
    """Whether it offers itself for targets whose model_type no adapter lists, see `refuses`."""
    architecture: ClassVar[str]
    """The name engines know this draft by, unless the algorithm's spec names another."""
    config_class: Any
    config: Any

    if TYPE_CHECKING:

        @property
        def draft_ids(self) -> Tensor:
            """[W] the target id of each draft id, ascending."""

        def __getattr__(self, name: str) -> Any:
            """Modules by name, those that the algorithm added included."""

    @abstractmethod
    def embed_input_ids(self, ids_BQ: Tensor) -> Tensor:
        """Token embeddings [B, Q, D]."""

    @abstractmethod
    def project_hidden_states(self, aux_BSA: Tensor) -> Tensor:
        """The target's concatenated aux hidden states in the draft's width, [B, S, D]."""

    @abstractmethod
    def backbone(self, embeds_BQD: Tensor, context_BSD: Tensor, layout: Layout, cache: KeyValueCache | None = None) -> Tensor:
        """The decoder layers: the state to feed back, [B, Q', D]. Under the wiring `Fused`, S = Q: a context for each embedding.

        Where embeddings or states repeat, `foredraft.draft.attention.Lookup` stands for them, and `Fused` projects each once.
        """

    @abstractmethod
    def compute_logits(self, hidden_BQD: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [B, Q, W]; states may carry what the algorithm's `rider` reads, [B, Q, D + r]."""

    def head_parts(self) -> HeadParts | None:
        """`compute_logits` in parts; None if it is anything else, which trains slower."""
        return None

    @classmethod
    @abstractmethod
    def shape(cls, target: Any) -> dict[str, Any]:
        """The native config fields of a draft for `target` (its text config): what is not derived from the algorithm."""

    @classmethod
    def refuses(cls, target: Any) -> str | None:
        """Of an adapter that sets `generic`: why it cannot draft for `target`, whose model_type no adapter lists; None if it can."""
        raise NotImplementedError(f"adapter '{cls.name}' is generic and must say what it takes: def refuses(cls, target) -> str | None")

    @classmethod
    def lacking(cls) -> list[str]:
        """See `Plugin.lacking`."""
        types, config = getattr(cls, "model_types", None), getattr(cls, "config_class", None)
        checks = {
            "model_types: a tuple of the targets' model_type names": isinstance(types, tuple) and all(isinstance(t, str) for t in types),
            "architecture: the name engines know the draft by": isinstance(getattr(cls, "architecture", None), str),
            "config_class: a class XConfig(DraftConfigMixin, family's config)": isinstance(config, type)
            and issubclass(config, DraftConfigMixin),
            "def refuses(cls, target) -> str | None, as it is generic": not cls.generic
            or cls.refuses.__func__ is not DraftModel.refuses.__func__,  # type: ignore[attr-defined]
        }
        return super().lacking() + [text for text, fine in checks.items() if not fine]
