"""DFlash: a block of tokens drafted at once, all its slots seeing each other and the target's features before it. arXiv:2602.06036."""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from foredraft import hookimpl
from foredraft.contracts import DraftModel, Signal
from foredraft.contracts.algorithm import Step
from foredraft.contracts.draft import Batch
from foredraft.decoding import BlockDrafter
from foredraft.draft import BlockAlgorithm, BlockOptions
from foredraft.loss import rows_at_once


class DFlashOptions(BlockOptions):
    """Options of DFlash."""

    weighting: Literal["decay", "dpace"] = Field(
        "decay", description="of slots: decay, by gamma; dpace, by the draft's confidence (D-PACE)"
    )
    dpace_alpha: float = Field(0.5, gt=0, le=1, description="D-PACE: how far the draft's confidence is smoothed towards 1")


class DFlash(BlockAlgorithm[DFlashOptions]):
    """Slot j ≥ 1 predicts x_{a+j}, all at once: no slot is told what another one drafted."""

    name = "dflash"
    summary = "a block of tokens drafted in one forward, slots seeing each other; the target's own embedding and head"
    architecture = "DFlashDraftModel"

    Options = DFlashOptions

    def engine_fields(self, config: Any) -> dict[str, Any]:
        """What engines read: the aux layers counted as layer outputs from 0, the mask token, and the block."""
        layers = [i - 1 for i in config.aux_layers]
        fields = {"mask_token_id": config.mask_token_id, "target_layer_ids": layers}
        return {"dflash_config": fields, "block_size": self.options.block_size}

    def loss(self, draft: DraftModel, batch: Batch, signal: Signal) -> Step:
        """As for all blocks, by default cross-entropy against the text; or with D-PACE's weights, see `dpace_weights`."""
        states_ND = self.states(draft, batch, signal.aux_BSA).flatten(0, 1)
        dpace = self.options.weighting == "dpace"
        return self.supervised(draft, states_ND, batch, signal, self._dpace(draft, states_ND, batch) if dpace else self.shares(batch))

    @torch.no_grad()
    def _dpace(self, draft: DraftModel, states_ND: Tensor, batch: Batch) -> list[Tensor]:
        """D-PACE's weights, over the number of blocks: their own sum would cancel what they say of the accepted length."""
        ids, alpha, steps = batch["input_ids"].flatten(), self.options.dpace_alpha, self.max_tokens
        # An untrained slot ends its block: nothing behind it counts.
        smoothed_MK = states_ND.new_zeros(batch["anchors"].numel() * steps, dtype=torch.float32)
        most = rows_at_once(draft.config.draft_vocab_size, states_ND)
        for queries, labels in zip(batch["queries"], batch["labels"], strict=True):
            for query, label in zip(queries.split(most), labels.split(most), strict=True):
                cross_entropy_N = F.cross_entropy(draft.compute_logits(states_ND[query]).float(), ids[label], reduction="none")
                smoothed_MK[query] = (1 - alpha) * (-cross_entropy_N).exp() + alpha
        weights_MK = dpace_weights(smoothed_MK.view(-1, steps)).flatten()
        return [weights_MK[query] / batch["counts"][0].clamp(min=1) for query in batch["queries"]]

    def drafter(self, draft: Any) -> BlockDrafter:
        """Drafts a block in one forward."""
        return BlockDrafter(draft, self.options.block_size)


def dpace_weights(smoothed_MK: Tensor) -> Tensor:
    """w_j = Σ_{m≥j} Π_{i≤m} q̃_i (D-PACE, arXiv:2605.18810, equation 8): what log q_j adds to a block's expected accepted length.

    q_j is the draft's probability of the label at slot j, q̃ = (1-α) q + α (equation 7).
    """
    return smoothed_MK.cumprod(-1).flip(-1).cumsum(-1).flip(-1)


@hookimpl
def foredraft_algorithms() -> list[type[Any]]:
    """The algorithms of this file."""
    return [DFlash]
