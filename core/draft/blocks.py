"""Blocks: slots drafted at once behind an anchor, which see each other and the target's features before it (DFlash and its kin)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional as F
from typing_extensions import TypeVar

from ..contracts.algorithm import AlgorithmBase, Plan, Step
from ..contracts.draft import Batch, DraftModel, Layout
from ..contracts.options import Frozen
from ..contracts.signal import Signal
from ..contracts.spec import DraftSpec
from ..errors import ForedraftError
from ..loss import Labels, Loss, Minimising, Teacher, chunked, in_turn
from .attention import Ranged, ranges
from .attention.patterns import Ranges
from .wiring import Prefix


class BlockOptions(Frozen):
    """Options that algorithms of blocks share."""

    block_size: int = Field(16, ge=2, le=4096, description="slots of a block, its anchor's included")
    gamma: float | None = Field(
        None, gt=0, description="the k-th drafted token weighs exp(-(k-1)/gamma); default: 7, 5 or 4 for 16, 10 or 8 slots"
    )
    anchors: int = Field(512, ge=1, description="blocks drawn per row of training data, at most")
    num_layers: int = Field(5, ge=1, le=512, description="decoder layers of the draft; they run once for all drafted tokens")
    num_aux: int | None = Field(None, ge=1, le=512, description="target layers whose hidden states are read; default: num_layers")
    mask_token_id: int | None = Field(None, ge=0, description="stands for tokens not known yet; default: one that the data never uses")
    loss: Loss = Field("text", description="objective by name, or {name: weight} of several (see `foredraft plugins`)")


OptionsT = TypeVar("OptionsT", bound=BlockOptions, default=BlockOptions)


class BlockAlgorithm(AlgorithmBase[OptionsT], Minimising):
    """The block of anchor a: slot 0 reads x_a, slots j ≥ 1 read the mask token; slot j sits at position a + j and predicts x_{a+j+shift}.

    The target's features are keys and values of every layer, never queries. Training draws random anchors in assistant spans. A
    subclass sets `architecture`, and has a `drafter`: `foredraft.decoding.BlockDrafter`, as a rule.
    """

    by_ranges = True

    architecture: ClassVar[str]
    """The name engines know the draft by."""
    whole: ClassVar[bool] = False
    """Whether the last layer works on whole blocks, too: a slot's output there depends on other slots'."""

    told_by = frozenset({"fc.weight", "hidden_norm.weight"})

    @property
    def shift(self) -> int:
        """0: the anchor's slot drafts nothing; 1: it drafts the first token, and every slot the next one."""
        return 0

    @property
    def max_tokens(self) -> int:
        """One per slot that drafts."""
        return self.options.block_size - 1 + self.shift

    @property
    def needs(self) -> tuple[Literal["aux", "final"], ...]:  # type: ignore[override]
        """The teacher only where the objective asks for it."""
        return ("aux", "final") if self.objective.needs_teacher else ("aux",)

    @property
    def spec(self) -> DraftSpec:
        """A Qwen3-shaped stack over the target's features, between the target's own embedding and head."""
        o = self.options
        return DraftSpec(
            num_layers=o.num_layers,
            num_aux=o.num_aux or o.num_layers,
            qk_norm=True,
            mask_token=True,
            mask_token_id=o.mask_token_id,
            target_head=True,
            architecture=self.architecture,
        )

    @classmethod
    def options_from(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """See `AlgorithmBase.options_from`; the block is not told by any tensor."""
        settled = super().options_from(fields)
        if "block_size" not in settled:
            raise ForedraftError("the draft's config.json names no block_size: add what it was trained with")
        return settled

    @property
    def wiring(self) -> Prefix:
        """The features as keys and values of every layer."""
        return Prefix()

    @property
    def gamma(self) -> float:
        """The decay asked for, or one by block size: lines through DFlash's 4, 5 and 7 for 8, 10 and 16 (its appendix A.3.1)."""
        size = self.options.block_size
        return self.options.gamma or min(size / 2, (size + 5) / 3)

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """Evenly spaced from the second layer to the third from the end, as in the published drafts; the middle one if it is but one."""
        count = self.spec.num_aux
        if count == 1:
            return (num_layers // 2 + 1,)
        return tuple(1 + round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))

    def plan(self, batch: Batch, generators: Sequence[Generator]) -> Plan:
        """Draw the anchors of every row; `arrange` says what is added to the batch."""
        return self.arrange(batch, [self._draw(*row) for row in zip(batch["spans"], generators, strict=True)])

    def _draw(self, spans_S: Tensor, generator: Generator) -> Tensor:
        """Ascending anchors: x_a, and x_{a+1} at least, lie in one assistant span (each span has a number of its own in the row)."""
        pool = ((spans_S[:-1] >= 0) & (spans_S[:-1] == spans_S[1:])).nonzero()[:, 0]
        return pool[torch.randperm(len(pool), generator=generator)[: self.options.anchors].sort().values]

    def arrange(self, batch: Batch, drawn: Sequence[Tensor]) -> Plan:
        """The plan for the anchors `drawn[row]`; the token x_{a+1+k} is trained iff x_a .. x_{a+1+k} lie in one assistant span.

        `anchors` [B, M] are padded with 0: such a block sees no context, and none of its slots is trained. Per drafted
        position k, `queries[k]` [N_k] index the flattened [B·M·K], `labels[k]` [N_k] the flattened [B·S]; `counts` [K] are the N_k.
        Where the objective needs the target's word, it is that at the token before the label.
        """
        spans_BS, steps = batch["spans"], self.max_tokens
        width = max(1, *(len(a) for a in drawn))
        anchors_BM = torch.stack([F.pad(a, (0, width - len(a)), value=-1) for a in drawn])
        real_BM, anchors_BM = anchors_BM >= 0, anchors_BM.clamp(min=0)
        at_BMK = anchors_BM[..., None] + 1 + torch.arange(steps)
        span_BMK = F.pad(spans_BS, (0, steps), value=-1).gather(1, at_BMK.flatten(1)).view_as(at_BMK)
        own_BM1 = spans_BS.gather(1, anchors_BM)[..., None]
        trained_BMK = real_BM[..., None] & (own_BM1 >= 0) & (span_BMK == own_BM1)
        flat_BMK = at_BMK + spans_BS.shape[1] * torch.arange(len(drawn))[:, None, None]
        blocks = [trained_BMK[..., k].flatten().nonzero()[:, 0] for k in range(steps)]
        queries = [block * steps + k for k, block in enumerate(blocks)]
        labels = [flat_BMK[..., k].flatten()[block] for k, block in enumerate(blocks)]
        seen = block_ranges(anchors_BM, batch["positions"], self.options.block_size, self.shift)
        added = {"anchors": anchors_BM, "labels": labels, "ranges": seen}
        if self.objective.needs_teacher:
            return Plan.taught(queries, [label - 1 for label in labels], **added)
        nobody = torch.empty(0, dtype=torch.long)
        return Plan(torch.tensor([len(block) for block in blocks]), nobody, {**added, "queries": queries})

    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        """Σ w L / Σ w with w = exp(-k/γ) for the drafted position k, counted from 0 (DFlash's equation 4)."""
        states_ND = self.states(draft, batch, signal.aux_BSA).flatten(0, 1)
        return self.supervised(draft, states_ND, batch, signal, self.shares(batch))

    def shares(self, batch: Batch) -> list[Tensor]:
        """What a row of each drafted position weighs: exp(-k/γ), over the sum of all rows'."""
        counts = batch["counts"]
        decay_K = torch.exp(-torch.arange(len(counts), device=counts.device) / self.gamma)
        return list(decay_K / (decay_K * counts).sum().clamp(min=1))

    def supervised(self, draft: DraftModel, states_ND: Tensor, batch: Batch, signal: Signal, weights: Sequence[Tensor]) -> Step:
        """The objective at the trained ones of all slots that draft [B·M·K, D], with these weights for each drafted position."""
        states, ids_BS = in_turn(states_ND, batch["queries"]), batch["input_ids"]
        if not self.objective.needs_teacher:
            return chunked(draft, states, Labels(self.texts(batch)), batch["labels"], weights, self.objective)
        teacher = Teacher.of(signal, batch["teacher_rows"], ids_BS)
        return chunked(draft, states, teacher, batch["teachers"], weights, self.objective, batch["pairs"])

    def states(self, draft: DraftModel, batch: Batch, aux_BSA: Tensor) -> Tensor:
        """The draft's states at the slots of every block that draft, [B, M·K, D]."""
        anchors_BM, size = batch["anchors"], self.options.block_size
        context_BSD = draft.project_hidden_states(aux_BSA)
        ids_BMs = F.pad(batch["input_ids"].gather(1, anchors_BM)[..., None], (0, size - 1), value=draft.config.mask_token_id)
        position_BM = batch["positions"].gather(1, anchors_BM)
        slot_s = torch.arange(size, device=anchors_BM.device)
        positions = torch.cat([batch["positions"], (position_BM[..., None] + slot_s).flatten(1)], dim=1)
        drafting_BQ = drafting_slots(anchors_BM, context_BSD.shape[1], size, self.shift)
        layout = Layout(positions, Ranged(batch["ranges"], draft.kernel), None if self.whole else drafting_BQ)
        hidden_BQD = draft.backbone(draft.embed_input_ids(ids_BMs.flatten(1)), context_BSD, layout)
        return hidden_BQD.unflatten(1, (-1, size))[:, :, 1 - self.shift :].flatten(1, 2) if self.whole else hidden_BQD

    def texts(self, batch: Batch) -> Tensor:
        """The tokens that `labels` are the places of, [B·S]."""
        return batch["input_ids"].flatten()

    def tokens_before(self, batch: Batch) -> Tensor:
        """The tokens before those that the slots draft, x_{a+k}, [B, M, K]; behind the text anything, where nothing is trained."""
        ids_BS, anchors_BM = batch["input_ids"], batch["anchors"]
        at_BMK = anchors_BM[..., None] + torch.arange(self.max_tokens, device=anchors_BM.device)
        return ids_BS.gather(1, at_BMK.flatten(1).clamp(max=ids_BS.shape[1] - 1)).view_as(at_BMK)


def block_ranges(anchors_BM: Tensor, positions_BS: Tensor, size: int, shift: int) -> Ranges:
    """Who sees whom among the context's S features and the blocks of `size` slots behind them.

    A slot sees the features of its document up to its anchor (exclusive: the target has not read x_a yet), and its own block both ways.
    """
    (rows, blocks), context = anchors_BM.shape, positions_BS.shape[1]
    begin_BM = anchors_BM - positions_BS.gather(1, anchors_BM)
    own_BM = (context + size * torch.arange(blocks)).expand(rows, -1)
    first, end = (torch.stack(pair, dim=-1) for pair in ((begin_BM, own_BM), (anchors_BM, own_BM + size)))
    first, end = (F.pad(x.repeat_interleave(size, dim=1), (0, 0, context, 0)) for x in (first, end))  # the context itself asks nothing
    return ranges(first, end, drafting_slots(anchors_BM, context, size, shift), blocks * size)


def drafting_slots(anchors_BM: Tensor, context: int, size: int, shift: int) -> Tensor:
    """The slots of every block that draft, among all inputs, [B, M·(size-1+shift)]."""
    slots = torch.arange(anchors_BM.shape[1] * size, device=anchors_BM.device).view(-1, size)[:, 1 - shift :].flatten()
    return (context + slots).expand(len(anchors_BM), -1)
