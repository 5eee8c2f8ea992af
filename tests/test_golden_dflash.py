"""DFlash against recorded outputs of NeMo Automodel, SpecForge and speculators (see golden/README.md)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from recorded import CONFIG, Recorded
from torch import Tensor
from torch.testing import assert_close

from foredraft import auto_draft
from foredraft.loss import Labels, reference

BLOCK, LAYERS, GAMMA, MASK_TOKEN = 4, 2, 7.0, 255


@dataclass
class Golden(Recorded):
    """One file, and our draft with its weights, over the anchors that were recorded."""

    suffix = "_dflash"

    @cached_property
    def draft(self) -> Any:
        options = {"block_size": BLOCK, "num_layers": LAYERS, "num_aux": 3, "gamma": GAMMA, "mask_token_id": MASK_TOKEN}
        draft = auto_draft(CONFIG, "dflash", **options)
        head = {"lm_head.weight": self.tensors["inputs.target_head"]}
        draft.load_state_dict(head | self.ours("weights_frozen") | self.ours("weights"), strict=True)
        return draft

    @cached_property
    def batch(self) -> dict[str, Any]:
        """Their anchors, arranged by us; all of the text is one span here, and the peer's mask is applied in the loss."""
        ids_BS = self.tensors["inputs.input_ids"]
        documents_BS = self.tensors.get("inputs.document_ids", torch.zeros_like(ids_BS))
        positions_BS = self.tensors.get("inputs.position_ids", torch.arange(ids_BS.shape[1]).expand_as(ids_BS))
        batch = {"input_ids": ids_BS, "documents": documents_BS, "positions": positions_BS, "spans": documents_BS}
        anchors = self.tensors["anchors"][None] if self.name == "speculators" else self.tensors["anchor_positions"]
        return self.draft.algorithm.arrange(batch, list(anchors)).joined(batch)

    @cached_property
    def states(self) -> Tensor:
        """[B·M·K, D]."""
        return self.draft.algorithm.states(self.draft, self.batch, self.tensors["inputs.aux"]).flatten(0, 1)  # type: ignore[no-any-return]

    @cached_property
    def loss(self) -> Tensor:
        """The loss as the peer forms it."""
        queries, rows = self.batch["queries"], self.batch["labels"]
        mask_R = self.tensors["inputs.loss_mask"].flatten().float()
        decay = [torch.tensor(-k / GAMMA).exp() for k in range(BLOCK - 1)]
        weights = [d * mask_R[r] for d, r in zip(decay, rows, strict=True)]
        text_R = self.batch["input_ids"].flatten()
        if self.name == "speculators":  # over all slots, and against what the verifier says of a slot's token
            total = sum(mask_R[r].sum() for r in rows) + 1e-5
            verdict = self.tensors["inputs.target_hidden"] @ self.tensors["inputs.target_head"].T
            text_R = verdict.argmax(-1).flatten().roll(1)
        else:
            total = torch.cat(weights).sum() + (1e-6 if self.name == "nemo" else 0)
        shares = [w / total for w in weights]
        states = [self.states[query] for query in queries]
        return reference(self.draft, states, Labels(text_R), rows, shares).loss


@pytest.fixture(scope="module", params=["nemo", "speculators", "specforge"])
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def test_logits(golden: Golden) -> None:
    """Of all slots but the anchors' own, the ones beyond the text included: they are part of the block that the others see."""
    theirs = golden.tensors["logits"].unflatten(0, (1, -1) if golden.name == "speculators" else (-1,))[:, :, 1:]
    assert_close(golden.draft.compute_logits(golden.states), theirs.flatten(0, 2), rtol=1e-5, atol=1e-5)


def test_loss_and_gradients(golden: Golden) -> None:
    golden.check_loss(golden.draft, golden.loss)
