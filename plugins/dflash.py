"""DFlash: a block of tokens drafted at once, all its slots seeing each other and the target's features before it. arXiv:2602.06036."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional as F

from foredraft import AlgorithmBase, DraftSpec, ForedraftError, hookimpl
from foredraft.contracts import DraftModel, Plan, Signal
from foredraft.contracts.algorithm import Choose, Step
from foredraft.contracts.draft import Batch, Layout
from foredraft.contracts.options import Frozen
from foredraft.decoding import choose_in_turn
from foredraft.draft import Prefix
from foredraft.draft.attention import DecodingCache, Full, Ranged, ranges
from foredraft.draft.attention.patterns import Ranges
from foredraft.loss import Labels, chunked, rows_at_once


class DFlashOptions(Frozen):
    """Options of DFlash."""

    block_size: int = Field(16, ge=2, le=4096, description="slots of a block, its anchor included: one more than it drafts")
    gamma: float | None = Field(None, gt=0, description="slot j weighs exp(-(j-1)/gamma); default: 7, 5 or 4 for 16, 10 or 8 slots")
    weighting: Literal["decay", "dpace"] = Field(
        "decay", description="of slots: decay, by gamma; dpace, by the draft's confidence (D-PACE)"
    )
    dpace_alpha: float = Field(0.5, gt=0, le=1, description="D-PACE: how far the draft's confidence is smoothed towards 1")
    anchors: int = Field(512, ge=1, description="blocks drawn per row of training data, at most")
    num_layers: int = Field(5, ge=1, le=512, description="decoder layers of the draft; they run once for all drafted tokens")
    num_aux: int | None = Field(None, ge=1, le=512, description="target layers whose hidden states are read; default: num_layers")
    mask_token_id: int | None = Field(None, ge=0, description="stands for tokens not known yet; default: one that the data never uses")


class DFlash(AlgorithmBase[DFlashOptions]):
    """The block of anchor a: slot 0 reads x_a, slots j ≥ 1 read the mask token; slot j sits at position a + j and predicts x_{a+j}.

    The target's features are keys and values of every layer, never queries. Training draws random anchors in assistant spans.
    """

    needs = ("aux",)

    name = "dflash"
    summary = "a block of tokens drafted in one forward, slots seeing each other; the target's own embedding and head"

    told_by = frozenset({"fc.weight", "hidden_norm.weight"})

    Options = DFlashOptions

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
            architecture="DFlashDraftModel",
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
        """The decay asked for, or one by block size: lines through the paper's 4, 5 and 7 for 8, 10 and 16 (appendix A.3.1)."""
        size = self.options.block_size
        return self.options.gamma or min(size / 2, (size + 5) / 3)

    @property
    def max_tokens(self) -> int:
        """The slots of a block behind its anchor."""
        return self.options.block_size - 1

    def aux_layers(self, num_layers: int) -> tuple[int, ...]:
        """Evenly spaced from the second layer to the third from the end, as in the published drafts; the middle one if it is but one."""
        count = self.spec.num_aux
        if count == 1:
            return (num_layers // 2 + 1,)
        return tuple(1 + round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))

    def engine_fields(self, config: Any) -> dict[str, Any]:
        """What engines read: the aux layers counted as layer outputs from 0, the mask token, and the block."""
        layers = [i - 1 for i in config.aux_layers]
        fields = {"mask_token_id": config.mask_token_id, "target_layer_ids": layers}
        return {"dflash_config": fields, "block_size": self.options.block_size}

    def plan(self, batch: Batch, generators: Sequence[Generator]) -> Plan:
        """Draw the anchors of every row; `arrange` says what is added to the batch."""
        return self.arrange(batch, [self._draw(*row) for row in zip(batch["spans"], generators, strict=True)])

    def _draw(self, spans_S: Tensor, generator: Generator) -> Tensor:
        """Ascending anchors: x_a, and x_{a+1} at least, lie in one assistant span (each span has a number of its own in the row)."""
        pool = ((spans_S[:-1] >= 0) & (spans_S[:-1] == spans_S[1:])).nonzero()[:, 0]
        return pool[torch.randperm(len(pool), generator=generator)[: self.options.anchors].sort().values]

    def arrange(self, batch: Batch, drawn: Sequence[Tensor]) -> Plan:
        """The plan for the anchors `drawn[row]`; slot j is trained iff x_a .. x_{a+j} lie in one assistant span.

        `anchors` [B, M] are padded with 0: such a block sees no context, and none of its slots is trained. Per drafted
        position k = j - 1, `queries[k]` [N_k] index the flattened [B·M·K], `labels[k]` [N_k] the flattened [B·S]; `counts` [K]
        are the N_k. The target's word is not needed.
        """
        spans_BS, steps = batch["spans"], self.options.block_size - 1
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
        counts, nobody = torch.tensor([len(block) for block in blocks]), torch.empty(0, dtype=torch.long)
        seen = block_ranges(anchors_BM, batch["positions"], self.options.block_size)
        return Plan(counts, nobody, {"anchors": anchors_BM, "queries": queries, "labels": labels, "ranges": seen})

    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        """Cross-entropy against the text, Σ w CE / Σ w with w = exp(-(j-1)/γ) (equation 4); or D-PACE's, see `dpace_weights`."""
        states_ND = self.states(draft, batch, signal.aux_BSA).flatten(0, 1)
        states = [states_ND[query] for query in batch["queries"]]
        labels, counts = Labels(batch["input_ids"].flatten()), batch["counts"]
        if self.options.weighting == "dpace":
            weights = self._dpace(draft, states, batch)
        else:
            decay_K = torch.exp(-torch.arange(len(states), device=counts.device) / self.gamma)
            shares_K = decay_K / (decay_K * counts).sum().clamp(min=1)
            weights = list(shares_K)
        return chunked(draft, states, labels, batch["labels"], weights)

    def states(self, draft: DraftModel, batch: Batch, aux_BSA: Tensor) -> Tensor:
        """The draft's states at slots 1, 2, ... of every block, [B, M·K, D]."""
        anchors_BM, size = batch["anchors"], self.options.block_size
        context_BSD = draft.project_hidden_states(aux_BSA)
        ids_BMs = F.pad(batch["input_ids"].gather(1, anchors_BM)[..., None], (0, size - 1), value=draft.config.mask_token_id)
        position_BM = batch["positions"].gather(1, anchors_BM)
        slot_s = torch.arange(size, device=anchors_BM.device)
        positions = torch.cat([batch["positions"], (position_BM[..., None] + slot_s).flatten(1)], dim=1)
        rows_BQ = drafted_slots(anchors_BM, context_BSD.shape[1], size)
        layout = Layout(positions, Ranged(batch["ranges"], draft.kernel), rows_BQ)
        return draft.backbone(draft.embed_input_ids(ids_BMs.flatten(1)), context_BSD, layout)

    @torch.no_grad()
    def _dpace(self, draft: DraftModel, states: Sequence[Tensor], batch: Batch) -> list[Tensor]:
        """D-PACE's weights, over the number of blocks: their own sum would cancel what they say of the accepted length."""
        ids, alpha = batch["input_ids"].flatten(), self.options.dpace_alpha
        # An untrained slot ends its block: nothing behind it counts.
        smoothed_MK = states[0].new_zeros(batch["anchors"].numel() * len(states), dtype=torch.float32)
        most = rows_at_once(draft.config.draft_vocab_size, states[0])
        for step in zip(states, batch["queries"], batch["labels"], strict=True):
            for state_ND, query, label in zip(*(t.split(most) for t in step), strict=True):
                cross_entropy_N = F.cross_entropy(draft.compute_logits(state_ND).float(), ids[label], reduction="none")
                smoothed_MK[query] = (1 - alpha) * (-cross_entropy_N).exp() + alpha
        weights_MK = dpace_weights(smoothed_MK.view(-1, len(states))).flatten()
        return [weights_MK[query] / batch["counts"][0].clamp(min=1) for query in batch["queries"]]

    def drafter(self, draft: Any) -> "BlockDrafter":
        """Drafts a block in one forward."""
        return BlockDrafter(draft, self.options.block_size)


def block_ranges(anchors_BM: Tensor, positions_BS: Tensor, size: int) -> Ranges:
    """Who sees whom among the context's S features and the blocks of `size` slots behind them.

    A slot sees the features of its document up to its anchor (exclusive: the target has not read x_a yet), and its own block both ways.
    """
    (rows, blocks), context = anchors_BM.shape, positions_BS.shape[1]
    begin_BM = anchors_BM - positions_BS.gather(1, anchors_BM)
    own_BM = (context + size * torch.arange(blocks)).expand(rows, -1)
    first, end = (torch.stack(pair, dim=-1) for pair in ((begin_BM, own_BM), (anchors_BM, own_BM + size)))
    first, end = (F.pad(x.repeat_interleave(size, dim=1), (0, 0, context, 0)) for x in (first, end))  # the context itself asks nothing
    return ranges(first, end, drafted_slots(anchors_BM, context, size), blocks * size)


def drafted_slots(anchors_BM: Tensor, context: int, size: int) -> Tensor:
    """Slots 1, 2, ... of every block among all inputs, [B, M·(size-1)]."""
    slots = torch.arange(anchors_BM.shape[1] * size, device=anchors_BM.device).view(-1, size)[:, 1:].flatten()
    return (context + slots).expand(len(anchors_BM), -1)


def dpace_weights(smoothed_MK: Tensor) -> Tensor:
    """w_j = Σ_{m≥j} Π_{i≤m} q̃_i (D-PACE, arXiv:2605.18810, equation 8): what log q_j adds to a block's expected accepted length.

    q_j is the draft's probability of the label at slot j, q̃ = (1-α) q + α (equation 7).
    """
    return smoothed_MK.cumprod(-1).flip(-1).cumsum(-1).flip(-1)


class BlockDrafter:
    """Keeps the keys and values of the target's features; a block's own are forgotten."""

    def __init__(self, draft: DraftModel, block_size: int):
        self.draft, self.block_size, self.cache, self.confirmed = draft, block_size, DecodingCache(), 0

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Choose) -> tuple[list[int], list[Tensor]]:
        """See `foredraft.contracts.Drafter`; never more tokens than a block has slots behind its anchor.

        The block is whole, as in training, however few are wanted: its slots see each other.
        """
        draft, size, start, fresh = self.draft, self.block_size, self.confirmed, aux_1NA.shape[1]
        self.confirmed = start + fresh
        self.cache.crop(start)
        ids_1s = F.pad(ids[None, self.confirmed :], (0, size - 1), value=draft.config.mask_token_id)
        positions = torch.arange(start, self.confirmed + size, device=ids.device)[None]
        rows = torch.arange(fresh + 1, fresh + 1 + min(limit, size - 1), device=ids.device)[None]
        embeds, context = draft.embed_input_ids(ids_1s), draft.project_hidden_states(aux_1NA)
        hidden_1QD = draft.backbone(embeds, context, Layout(positions, Full(), rows), self.cache)
        return choose_in_turn(draft.compute_logits(hidden_1QD)[0], choose)


@hookimpl
def foredraft_algorithms() -> list[type[Any]]:
    """The algorithms of this file."""
    return [DFlash]
