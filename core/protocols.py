"""The contracts between core, adapters and algorithms, and the key to the shape suffixes of tensors.

Dimension key: `B` batch, `S` target positions, `Q` draft query slots, `K` drafting steps, `D` draft hidden, `A` num_aux × target
hidden, `T` target hidden, `V` target vocabulary, `W` draft vocabulary, `H` heads, `d` head dim, `N` compacted rows, `R` teacher rows.
Layer ids are indices into HF `hidden_states`: 0 is the embedding output, i the output of the i-th decoder layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import Field
from torch import Generator, Tensor, nn

from .errors import ForedraftError
from .frozen import Frozen
from .layouts import MOST

if TYPE_CHECKING:
    from .draft import BaseDraft
    from .target import Signal

Batch = Mapping[str, Any]
"""A collated batch: `input_ids`, `positions`, `documents`, `spans` (each [B, S], see `foredraft.data`), `row` [B], and what the
algorithm's `plan` added."""


class DraftSpec(Frozen):
    """All that an algorithm may ask of an adapter."""

    wiring: Literal["fuse", "prefix"] = Field(
        "fuse",
        description="fuse: embedding and context side by side into a 2·D-wide first layer; prefix: the context as extra keys and values of "
        "every layer",
    )
    num_layers: int = Field(1, ge=0, le=MOST, description="decoder layers of the draft")
    num_aux: int = Field(3, ge=1, le=MOST, description="target layers whose hidden states the draft reads")
    fc_norm: bool = Field(False, description="one RMSNorm per aux chunk before fc (EAGLE-3.1)")
    context_norm: bool = Field(False, description="a norm after fc (DFlash)")
    norm_output: bool = Field(False, description="the post-norm state is fed back, and the head applies no second norm (EAGLE-3.1)")
    norm_before_residual: bool = Field(False, description="fuse: the first layer adds to the normed context, not to the context itself")
    qk_norm: bool = Field(False, description="a norm on queries and keys, as in Qwen3")
    mask_token: bool = Field(False, description="the draft reads a token that stands for the unknown, config.mask_token_id")
    mask_token_id: int | None = Field(None, ge=0, description="which one; None: one that the training data never uses")
    target_head: bool = Field(False, description="embedding and head are the target's own: frozen, and not in the draft's file")
    architecture: str | None = Field(None, description="the name engines know the draft by; None: the adapter's")


class Pattern(Protocol):
    """Who attends to whom. Knows nothing of architectures."""

    def visible(self, batch: int, queries: int, entries: Sequence[int]) -> Tensor:
        """Who sees whom, spelt out: True where a query may look at a key, [B, Q, K].

        `entries` are the lengths of the keys' entries, whose keys stand side by side. For tests and pictures.
        """
        ...

    def attend(self, q_BHQd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float) -> Tensor:
        """Attention output [B, H, Q, d]. `keys` and `values` are what the cache returned, oldest first, each [B, H, K, d]."""
        ...


class KeyValueCache(Protocol):
    """Keeps keys and values between calls of `backbone`."""

    def extend(self, layer: int, k_BHQd: Tensor, v_BHQd: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Add this call's keys and values of `layer`; return all that a pattern may look at."""
        ...


@dataclass(frozen=True)
class Layout:
    """Where each input of `backbone` sits and what it may see."""

    positions: Tensor
    """Rotary position of each input, [B, Q]; under the wiring `prefix` the inputs are the context's S, then the embeddings' Q."""
    pattern: Pattern
    rows: Tensor | None = None
    """[B, Q'] inputs whose output is wanted; the others only give keys and values. None: all (under `prefix`: all embeddings)."""
    below: Pattern | None = None
    """What the layers below the last one see: all inputs are queries there, whatever `rows` says. None: the same pattern."""


class DraftModel(Protocol):
    """The four methods that algorithms are written against; `foredraft.BaseDraft` implements them for any adapter."""

    def embed_input_ids(self, ids_BQ: Tensor) -> Tensor:
        """Token embeddings [B, Q, D]."""
        ...

    def project_hidden_states(self, aux_BSA: Tensor) -> Tensor:
        """The target's concatenated aux hidden states in the draft's width, [B, S, D]."""
        ...

    def backbone(self, embeds_BQD: Tensor, context_BSD: Tensor, layout: Layout, cache: KeyValueCache | None = None) -> Tensor:
        """The decoder layers: the state to feed back, [B, Q', D]. Under the wiring `fuse`, S = Q: a context for each embedding."""
        ...

    def compute_logits(self, hidden_BQD: Tensor) -> Tensor:
        """Logits over the draft vocabulary, [B, Q, W]."""
        ...


@dataclass
class Step:
    """What one batch gave: the loss, and sums (not means) per drafting step, on the device."""

    loss: Tensor
    metrics: dict[str, Tensor]


class Drafter(Protocol):
    """The inference side of an algorithm, for one sequence."""

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: "Choose") -> tuple[list[int], list[Tensor]]:
        """Draft at most `limit` tokens after `ids` [L].

        `aux_1NA` are the target's aux hidden states of the tokens accepted since the last call (all but the newest
        token have one). Returns the drafted target ids and, where `choose` sampled, the logits [V] each was drawn from.
        """
        ...


class Choose(Protocol):
    """Picks a token from draft logits, as the caller's generation settings say."""

    def __call__(self, logits_W: Tensor, drafted: list[int]) -> tuple[int, Tensor | None] | None:
        """The chosen target id, and the processed logits [V] when sampling; None if no token may follow."""
        ...


DEFAULT_TOKENS = 4
"""Drafted per pass of the target, unless the draft makes its tokens at once."""


def tokens_to_draft(asked: int | None, most: int | None) -> int:
    """How many tokens to draft per pass: those asked for, else all that the draft makes at once (`AlgorithmBase.max_tokens`), else 4.

    Raises `ForedraftError` for none, or more than it makes.
    """
    if asked is not None and asked < 1:
        raise ForedraftError(f"num_draft_tokens={asked}: at least one token must be drafted")
    if asked is not None and most is not None and asked > most:
        raise ForedraftError(f"{asked} tokens were asked for; this draft makes {most} at once, and no more")
    return asked or most or DEFAULT_TOKENS


class AlgorithmBase:
    """A drafting algorithm: stateless but for its options.

    A subclass sets `name`, `summary` and `Options` (a pydantic model whose fields are described) and implements the methods below.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""

    class Options(Frozen):
        """Options of the algorithm."""

    def __init__(self, options: "Frozen | None" = None, **fields: Any):
        self.options: Any = options if options is not None else self.Options(**fields)

    @property
    def spec(self) -> DraftSpec:
        """The draft that this algorithm needs."""
        raise NotImplementedError(f"algorithm '{self.name}' must state its draft: def spec(self) -> DraftSpec")

    @property
    def max_tokens(self) -> int | None:
        """How many tokens the draft makes at once, at most; None: one after another, as many as are asked for."""
        return None

    def aux_layers(self, num_layers: int) -> tuple[int, ...] | None:
        """The target layers to read by default (HF `hidden_states` indices), for a target of `num_layers`; None: the adapter's choice."""
        return None

    def modules(self, config: Any) -> dict[str, nn.Module | nn.Parameter]:
        """What the algorithm adds to the draft (P-EAGLE's `mask_hidden`, say), by the name under which it is saved; fresh, on the
        default device."""
        return {}

    def engine_fields(self, config: Any) -> dict[str, Any]:
        """What engines look for in the `config.json` of a draft by this algorithm, from its config."""
        return {}

    def plan(self, batch: Batch, generators: Sequence[Generator]) -> dict[str, Any]:
        """What the collator adds to a batch, on the CPU: tensors, or lists of tensors, of active rows and sampled indices.

        Two keys are read by others: `teacher_rows` [R], the positions (in the flattened [B·S]) at which the target's word is
        needed, and `counts` [K], the denominators of the loss. `generators` holds one random generator per row of the
        batch, seeded by (seed, epoch, row).
        """
        raise NotImplementedError(f"algorithm '{self.name}' must plan its batches: def plan(self, batch, generators) -> dict")

    def loss(self, draft: "BaseDraft", batch: Batch, signal: "Signal", counts: Tensor) -> Step:
        """The training loss of a batch; `counts` are the global denominators (all ranks, all accumulated batches)."""
        raise NotImplementedError(f"algorithm '{self.name}' must define its loss: def loss(self, draft, batch, signal, counts) -> Step")

    def drafter(self, draft: "BaseDraft") -> Drafter:
        """A drafter for one sequence."""
        raise NotImplementedError(f"algorithm '{self.name}' must draft: def drafter(self, draft) -> Drafter")
