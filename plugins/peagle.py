"""P-EAGLE: EAGLE-3's draft, with all tokens drafted in one forward; a learned state replaces features not there yet. arXiv:2602.01469."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from foredraft import AlgorithmBase, DraftSpec, hookimpl
from foredraft.contracts import DraftModel, Plan, Signal
from foredraft.contracts.algorithm import Choose, Step
from foredraft.contracts.draft import Batch, Layout
from foredraft.contracts.engine import Files
from foredraft.contracts.finding import Finding, error
from foredraft.contracts.options import Frozen
from foredraft.data.collate import padded_width, positions_within, reachable
from foredraft.decoding import choose_in_turn
from foredraft.draft import Fused
from foredraft.draft.attention import Causal, DecodingCache, Lookup, Ranged, ranges
from foredraft.draft.attention.patterns import Ranges
from foredraft.draft.config import eagle_fields
from foredraft.loss import Loss, Minimising, Teacher, chunked, in_turn


class PEagleOptions(Frozen):
    """Options of P-EAGLE."""

    num_depths: int = Field(8, ge=1, le=512, description="tokens drafted in one forward, at most")
    ratio: float = Field(0.7, gt=0, le=1, description="share of the anchors trained on at a depth, relative to the depth before")
    floor: float = Field(0.2, ge=0, le=1, description="least share of the anchors trained on at a depth")
    num_layers: int = Field(4, ge=1, le=512, description="decoder layers of the draft; they run once for all drafted tokens")
    num_aux: int = Field(3, ge=1, le=512, description="target layers whose hidden states the draft reads")
    fc_norm: bool = Field(False, description="norm each aux chunk (of mask_hidden, too) before fc")
    qk_norm: bool = Field(False, description="norms on queries and keys: a Qwen3-shaped draft")
    loss: Loss = Field("ce", description="objective by name, or {name: weight} of several (see `foredraft plugins`)")
    mask_token_id: int | None = Field(None, ge=0, description="stands for tokens not known yet; default: one that the data never uses")


class PEagle(AlgorithmBase[PEagleOptions], Minimising):
    """Element (anchor a, depth d) predicts x_{a+2+d} from the text up to x_{a+1}; at depth 0 it is EAGLE-3's slot a.

    Deeper ones sit at position a + d and read the mask token and `mask_hidden`: neither x_{a+1+d} nor the target's features of
    x_{a+d} are there yet. Training takes all of depth 0 and, of the depths below it, a sample that thins out (COD sampling).
    """

    by_ranges = True

    name = "peagle"
    summary = "all tokens drafted in one forward, a learned state in place of unknown features"

    told_by = frozenset({"fc.weight", "layers.0.hidden_norm.weight", "mask_hidden"})

    Options = PEagleOptions

    @property
    def spec(self) -> DraftSpec:
        """EAGLE-3's draft with a mask token."""
        o = self.options
        return DraftSpec(num_layers=o.num_layers, num_aux=o.num_aux, qk_norm=o.qk_norm, mask_token=True, mask_token_id=o.mask_token_id)

    @property
    def wiring(self) -> Fused:
        """EAGLE-3's."""
        return Fused(fc_norm=self.options.fc_norm)

    @property
    def max_tokens(self) -> int:
        """One per depth: deeper ones were not trained."""
        return self.options.num_depths

    def modules(self, draft: DraftModel) -> dict[str, nn.Module | nn.Parameter]:
        """`mask_hidden` [1, 1, A], small: it enters the residual stream, where a large one is noise to all depths."""
        config = draft.config
        width = config.num_aux_hidden_states * config.target_hidden_size
        return {"mask_hidden": nn.Parameter(torch.randn(1, 1, width) * config.initializer_range)}

    def engine_fields(self, config: Any) -> dict[str, Any]:
        """The wiring's flags, the aux layers in SGLang's convention, and the mask token by the other names that engines look for."""
        return {**self.wiring.fields, **eagle_fields(config), "ptd_token_id": config.mask_token_id, "pard_token": config.mask_token_id}

    @classmethod
    def findings(cls, draft: Files) -> list[Finding]:
        """The learned state, there iff the draft is parallel, and as wide as what fc reads."""
        held, fc = draft.tensors.get("mask_hidden"), draft.tensors.get("fc.weight")
        named = any(draft.config.get(name) is not None for name in ("ptd_token_id", "pard_token"))
        if held is None and named and "hidden_norm.weight" not in draft.tensors:
            return [
                error(
                    "mask-hidden-missing",
                    "the config names a mask token for parallel drafting, the file holds no mask_hidden",
                    "vLLM refuses to draft in parallel",
                    "copy mask_hidden from the training's checkpoint",
                )
            ]
        if held is None or fc is None or len(fc.shape) != 2 or prod(held.shape) == fc.shape[1]:
            return []
        found = f"mask_hidden has {prod(held.shape)} numbers, fc reads {fc.shape[1]}"
        breaks = "it is read in place of the concatenated aux states, before fc"
        return [error("mask-hidden-shape", found, breaks, "export it anew in that space")]

    def plan(self, batch: Batch, generators: Sequence[Generator]) -> Plan:
        """Draw the anchors of every row; `arrange` says what is added to the batch."""
        reached_KBS = [reachable(batch["spans"], batch["documents"], d) for d in range(self.options.num_depths)]
        return self.arrange(batch, [self._draw(*row) for row in zip(zip(*reached_KBS, strict=True), generators, strict=True)])

    def _draw(self, reached_KS: Sequence[Tensor], generator: Generator) -> list[Tensor]:
        """Ascending anchors per depth. Each depth draws from those of the depth before: a chain has no gaps, as in serving."""
        drawn = [reached_KS[0].nonzero()[:, 0]]
        for d, reached_S in enumerate(reached_KS[1:], 1):
            pool = drawn[-1][reached_S[drawn[-1]]]
            count = int(max(0, len(drawn[0]) - d) * max(self.options.ratio**d, self.options.floor))
            drawn.append(pool[torch.randperm(len(pool), generator=generator)[:count].sort().values])
        return drawn

    def arrange(self, batch: Batch, drawn: Sequence[Sequence[Tensor]]) -> Plan:
        """The plan for the anchors `drawn[row][depth]`.

        `anchors` and `depths` [B, E] are the elements: every slot at depth 0, then the others by anchor and depth, then padding.
        `supervised` [B, Q] are those with a loss, padded with slot 0. Per depth, `queries[d]` [N_d] index the flattened [B·Q].
        """
        rows, length = batch["input_ids"].shape
        num_depths, slots_S = self.options.num_depths, torch.arange(length)
        deeper = [_chains(row) for row in drawn]
        anchors_BE = _stack(batch, [torch.cat([slots_S, anchors]) for anchors, _ in deeper], 0)
        # Padding is deeper than any other element: it sees itself, and none of the others sees it.
        depths_BE = _stack(batch, [torch.cat([0 * slots_S, depths]) for _, depths in deeper], num_depths)
        supervised_BQ = _stack(
            batch, [torch.cat([row[0], length + torch.arange(len(d))]) for row, (_, d) in zip(drawn, deeper, strict=True)], 0
        )
        depth_of_query_N = _stack(batch, [torch.cat([0 * row[0], d]) for row, (_, d) in zip(drawn, deeper, strict=True)], -1).flatten()
        queries = [(depth_of_query_N == d).nonzero()[:, 0] for d in range(num_depths)]
        at_BQ = length * torch.arange(rows)[:, None] + (anchors_BE + depths_BE).gather(1, supervised_BQ) + 1
        taught = [at_BQ.flatten()[query] for query in queries]
        seen = chain_ranges(anchors_BE, depths_BE, batch["documents"], supervised_BQ, num_depths)
        return Plan.taught(queries, taught, anchors=anchors_BE, depths=depths_BE, supervised=supervised_BQ, ranges=seen)

    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        """The mean objective over all drawn elements of all depths."""
        states_ND = self.states(draft, batch, signal.aux_BSA).flatten(0, 1)
        share = 1 / batch["counts"].sum().clamp(min=1)
        return chunked(
            draft,
            in_turn(states_ND, batch["queries"]),
            Teacher.of(signal, batch["teacher_rows"], batch["input_ids"]),
            batch["teachers"],
            [share] * len(batch["queries"]),
            self.objective,
            batch["pairs"],
        )

    def states(self, draft: DraftModel, batch: Batch, aux_BSA: Tensor) -> Tensor:
        """The draft's states at `batch["supervised"]`, [B, Q, D]."""
        ids_BS, anchors_BE, depths_BE, rows_BQ = (batch[name] for name in ("input_ids", "anchors", "depths", "supervised"))
        embeds, context = with_masks(draft, ids_BS.roll(-1, dims=1), aux_BSA, 1)
        # All masked elements read the same two states, which stand behind those of the slots.
        inputs_BE = anchors_BE.where(depths_BE == 0, ids_BS.shape[1])
        inputs: tuple[Any, Any] = Lookup(embeds, inputs_BE), Lookup(context, inputs_BE)
        positions = batch["positions"].gather(1, anchors_BE) + depths_BE
        return draft.backbone(*inputs, Layout(positions, Ranged(batch["ranges"], draft.kernel), rows_BQ))

    def drafter(self, draft: Any) -> "ParallelDrafter":
        """Drafts a chain in one forward."""
        return ParallelDrafter(draft, self.options.num_depths)


def chain_ranges(anchors_BE: Tensor, depths_BE: Tensor, documents_BS: Tensor, supervised_BQ: Tensor, num_depths: int) -> Ranges:
    """Who sees whom among the elements: within a document, every earlier or same slot, and the own anchor's chain so far.

    Padding sees itself, and is seen by none.
    """
    rows, count = anchors_BE.shape
    length, index_E = documents_BS.shape[1], torch.arange(count)
    padding_BE, slot_E = depths_BE == num_depths, index_E < length
    # In each row the elements behind the slots ascend by anchor, then depth: a chain lies side by side, padding last.
    deeper_BE = anchors_BE.where(~padding_BE, length)[:, length:].contiguous()
    chain_BE = torch.cat([index_E[:length].expand(rows, -1), length + torch.searchsorted(deeper_BE, deeper_BE)], dim=1)
    chain_BE = torch.where(padding_BE, index_E, chain_BE)
    begin_BE = (torch.arange(length) - positions_within(documents_BS)).gather(1, anchors_BE)
    context_end_BE = torch.where(padding_BE, begin_BE, anchors_BE + 1)
    first = torch.stack([begin_BE, chain_BE], dim=-1)
    end = torch.stack([context_end_BE, torch.where(slot_E, chain_BE, index_E + 1)], dim=-1)
    return ranges(first, end, supervised_BQ)


def with_masks(draft: DraftModel, ids_BN: Tensor, aux_BNA: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Embeddings and context of N known slots and `count` masked ones behind them, each [B, N + count, D]."""
    embeds = draft.embed_input_ids(F.pad(ids_BN, (0, count), value=draft.config.mask_token_id))
    mask_hidden: Any = draft.mask_hidden
    masked = draft.project_hidden_states(mask_hidden).expand(len(ids_BN), count, -1)
    return embeds, torch.cat([draft.project_hidden_states(aux_BNA), masked], dim=1)


class ParallelDrafter:
    """Keeps the keys and values of confirmed slots; masked ones are drafted from once and forgotten.

    In a chain from the newest slot, what an element may see (`chain_ranges`) is all that stands before it: attention is causal.
    """

    def __init__(self, draft: DraftModel, num_depths: int):
        self.draft, self.num_depths, self.cache, self.confirmed = draft, num_depths, DecodingCache(), 0

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Choose) -> tuple[list[int], list[Tensor]]:
        """See `foredraft.contracts.Drafter`; never more tokens than there are depths, as deeper ones were not trained."""
        start, fresh, limit = self.confirmed, aux_1NA.shape[1], min(limit, self.num_depths)
        self.confirmed = start + fresh
        self.cache.crop(start)
        embeds, context = with_masks(self.draft, ids[None, start + 1 : self.confirmed + 1], aux_1NA, limit - 1)
        positions = torch.arange(start, self.confirmed + limit - 1, device=ids.device)[None]
        hidden_1QD = self.draft.backbone(embeds, context, Layout(positions, Causal(), limit), self.cache)
        return choose_in_turn(self.draft.compute_logits(hidden_1QD)[0], choose)


def _chains(row: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Anchors and depths of a row's elements below depth 0, by anchor, then depth."""
    anchors = torch.cat([row[0][:0], *row[1:]])
    depths = torch.cat([row[0][:0], *(torch.full_like(a, d) for d, a in enumerate(row[1:], 1))])
    order = (anchors * (len(row) + 1) + depths).argsort()
    return anchors[order], depths[order]


def _stack(batch: Batch, rows: Sequence[Tensor], value: int) -> Tensor:
    """[B, n], padded with `value` to the longest of them, and to one at least: a batch without supervision has a query, too."""
    width = padded_width(batch, rows)
    return torch.stack([F.pad(row, (0, width - len(row)), value=value) for row in rows])


@hookimpl
def foredraft_algorithms() -> list[type[Any]]:
    """The algorithms of this file."""
    return [PEagle]
