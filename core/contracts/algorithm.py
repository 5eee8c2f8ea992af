"""The contract of algorithms: how a draft is planned, trained and drafted with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, Self, cast

from typing_extensions import TypeVar

from ..errors import ForedraftError
from .draft import Batch, DraftModel, Wiring
from .engine import Files
from .finding import Finding
from .options import Frozen
from .plugin import Plugin
from .signal import Signal
from .spec import DraftSpec

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn


@dataclass(frozen=True)
class Plan:
    """Which slots of a batch are trained, and by what; its parts join the batch under their names."""

    counts: Tensor
    """[K] trained slots per drafting step: the denominators of the loss, in `loss` those of all ranks and accumulated batches."""
    teacher_rows: Tensor
    """[R] the positions (in the flattened [B·S]) at which the target's word is needed; empty if it is not."""
    added: Mapping[str, Any]
    """What the algorithm's own loss reads: tensors, or lists of tensors."""

    @classmethod
    def taught(cls, queries: Sequence[Tensor], positions: Sequence[Tensor], **added: Any) -> Plan:
        """These rows, taught by those: the draft states `queries[k]` [N_k] at step k, by the target at `positions[k]` [N_k] of [B·S].

        Adds `queries`, `teachers`: for each of them its row among the R distinct `teacher_rows`, and `pairs`: in which order the loss
        visits them.
        """
        import torch

        counts = [len(query) for query in queries]
        teacher_rows, inverse = torch.cat(list(positions)).unique(return_inverse=True)
        paired = {"queries": list(queries), "teachers": list(inverse.split(counts)), "pairs": pairs_by_teacher([inverse])}
        return cls(torch.tensor(counts), teacher_rows, {**paired, **added})

    def joined(self, batch: Batch) -> dict[str, Any]:
        """The batch with the plan."""
        return {**batch, "counts": self.counts, "teacher_rows": self.teacher_rows, **self.added}


@dataclass
class Step:
    """What one batch gave: the loss, and sums (not means) per drafting step, on the device."""

    loss: Tensor
    metrics: dict[str, Tensor]
    acceptance: Sequence[Tensor] = ()
    """Per drafting step [N_k], of every row: the chance that speculative sampling accepts its token; a constant."""


class Drafter(Protocol):
    """The inference side of an algorithm, for one sequence."""

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Choose) -> tuple[list[int], list[Tensor]]:
        """Draft at most `limit` tokens after `ids` [L].

        `aux_1NA` are the target's aux hidden states of the tokens accepted since the last call (all but the newest
        token have one); without weights, A is 0. Returns the drafted target ids and, where `choose` sampled them, the logits [V]
        each was drawn from. Ids without logits are point masses: accepted where the target itself says them, greedy or sampled.
        """


class Choose(Protocol):
    """Picks a token from draft logits, as the caller's generation settings say."""

    def __call__(self, logits_W: Tensor, drafted: list[int]) -> tuple[int, Tensor | None] | None:
        """The chosen target id, and the processed logits [V] when sampling; None if no token may follow."""


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


OptionsT = TypeVar("OptionsT", bound=Frozen, default=Any)


class DrafterBase(Plugin, Generic[OptionsT]):
    """A way to draft, stateless but for its options. One without weights (prompt lookup) is this alone.

    A subclass sets `name`, `summary` and `Options` (a pydantic model whose fields are described), and implements `drafter`. Type
    checkers know `self.options` where the base says what they are: `class Mine(AlgorithmBase[MyOptions])` with `Options = MyOptions`.
    """

    Options: ClassVar[type[Frozen]] = Frozen

    def __init__(self, options: OptionsT | None = None, **fields: Any):
        self.options = cast(OptionsT, self.Options(**fields) if options is None else options)

    @property
    def max_tokens(self) -> int | None:
        """How many tokens are made at once, at most; None: one after another, as many as are asked for."""
        return None

    @abstractmethod
    def drafter(self, draft: DraftModel | None) -> Drafter:
        """A drafter for one sequence; `draft` is None for an algorithm without weights."""

    @classmethod
    def lacking(cls) -> list[str]:
        """See `Plugin.lacking`."""
        options = getattr(cls, "Options", None)
        fine = isinstance(options, type) and issubclass(options, Frozen)
        return super().lacking() + ([] if fine else ["Options: a subclass of foredraft.contracts.Frozen"])


class AlgorithmBase(DrafterBase[OptionsT]):
    """An algorithm with a draft model: how it is wired, planned, trained and drafted with. `drafter` always gets the draft."""

    needs: ClassVar[tuple[Literal["aux", "final"], ...]] = ("aux", "final")
    """Which of the target's states its loss reads: those of the aux layers, those after the final norm. Others are not kept."""

    by_ranges: ClassVar[bool] = False
    """Whether it says who sees whom as ranges of keys (the pattern `Ranged`), which have kernels of their own."""

    @property
    @abstractmethod
    def spec(self) -> DraftSpec:
        """The draft that this algorithm needs: its sizes and its vocabulary."""

    @property
    @abstractmethod
    def wiring(self) -> Wiring:
        """What stands between the draft's embedding and head; `foredraft.draft` has `Fused` and `Prefix`."""

    def fitted(self, target: Any) -> Self:
        """The same for a target of this config, with the options filled in that it settles."""
        return self

    def sized_by(self, target: Any) -> Any:
        """The config of the model that the draft's layers are sized by, and that its adapter is of: as a rule the target's."""
        return target

    def start(self, draft: DraftModel, target: Any) -> list[str] | None:
        """Start the draft where it begins as another model, not near the target (a `foredraft.Target`): what was taken, a text each.

        None, as a rule: it starts from the target. Raises `ForedraftError` where that model does not fit.
        """
        return None

    def shipped(self, draft: DraftModel, names: Collection[str]) -> Mapping[str, str]:
        """What of the tensors in the target's own checkpoint is a draft by it already: their names there by ours. As a rule, nothing."""
        return {}

    def aux_layers(self, num_layers: int) -> tuple[int, ...] | None:
        """The target layers to read by default (HF `hidden_states` indices), for a target of `num_layers`; None: the adapter's choice."""
        return None

    def modules(self, draft: DraftModel) -> dict[str, nn.Module | nn.Parameter]:
        """What the algorithm adds to the draft beside its wiring (P-EAGLE's `mask_hidden`, say), by the name under which it is saved;
        fresh, on the default device."""
        return {}

    def engine_fields(self, config: Any) -> dict[str, Any]:
        """What engines look for in the `config.json` of a draft by this algorithm, from its config."""
        return {}

    def rider(self, draft: DraftModel) -> nn.Linear | None:
        """A matrix [W, r] of the draft's that adds to logits, without a bias: it reads what states carry behind their D features.

        So a bias of low rank, which may depend on the token before, costs no tensor of a vocabulary's width.
        """
        return None

    @abstractmethod
    def plan(self, batch: Batch, generators: Sequence[Generator]) -> Plan:
        """What the loss will need of a batch, made in the collator on the CPU.

        `generators` holds one random generator per row of the batch, seeded by (seed, epoch, row).
        """

    # What tells a draft by it, in files of any origin.

    told_by: ClassVar[frozenset[str]] = frozenset()
    """Tensors, by our names, that every draft by it has; of the algorithms whose tensors a peer's checkpoint holds, the one that names most
    of them made it. Empty: no checkpoint is read as a draft by it. A variant inherits its parent's, and the parent counts."""

    @classmethod
    def options_from(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Options that a peer's `config.json`, made flat, settles: by default those that a field is named after.

        Raises `ForedraftError` for what no draft by it computes, and where an option that must be known is not said.
        """
        return {name: fields[name] for name in cls.Options.model_fields if fields.get(name) is not None}

    @classmethod
    def findings(cls, draft: Files) -> list[Finding]:
        """What is wrong with a draft by it, for `foredraft doctor`, beside what may be wrong with any.

        `draft` has the fields of its config side by side, and its tensors by our names, whatever they hold. Of a peer's draft every
        algorithm is asked: it says nothing of one that is not its own. A tensor of its own that `found` names is not told of again.
        """
        return []

    @abstractmethod
    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        """The training loss of a batch; `batch["counts"]` are the global denominators (all ranks, all accumulated batches).

        In a training `batch["progress"]` is the share of it that is done, from 0 to 1; elsewhere it is not there, and what fades has faded.
        """


UNIT = 128
"""Teacher rows from one mark of `Pairs` to the next."""

Pairs = tuple["Tensor", list[int]]
"""Which pairs [N] follow each other by teacher row, and how many of them precede teacher rows 0, `UNIT`, 2 · `UNIT`, ..."""


def pairs_by_teacher(rows: Sequence[Tensor]) -> Pairs:
    """The pairs `rows[k]` [N_k] of all drafting steps, one behind the other, in the order of their teacher rows.

    Made where the rows are planned, since the marks are Python's: asked for on another device than the CPU, it waits for it.
    """
    import torch

    rows_N, order_N = torch.cat(list(rows)).cpu().sort(stable=True)
    units = int(rows_N[-1]) // UNIT + 1 if len(rows_N) else 0
    return order_N, torch.searchsorted(rows_N, UNIT * torch.arange(units + 1, device="cpu")).tolist()
