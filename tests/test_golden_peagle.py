"""P-EAGLE against recorded outputs of NeMo Automodel, SpecForge and speculators (see golden/README.md)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from recorded import CONFIG, Recorded
from torch import Tensor
from torch.testing import assert_close

from foredraft import auto_draft
from foredraft.loss import Teacher, reference

DEPTHS, MASK_TOKEN = 4, 255


@dataclass
class Golden(Recorded):
    """One file, and our draft with its weights, over the elements that were recorded."""

    suffix = "_peagle"

    def recorded(self, name: str) -> list[Tensor]:
        """`anchor_pos`, `depth` or `logits` of each row; NeMo loops over rows, the others pack them into one."""
        return [t for n, t in sorted(self.tensors.items()) if n.split(".")[-1] == name]

    @cached_property
    def draft(self) -> Any:
        draft = auto_draft(CONFIG, "peagle", num_depths=DEPTHS, num_layers=1, mask_token_id=MASK_TOKEN, draft_vocab_size=128)
        draft.load_state_dict(self.ours("weights"), strict=True)
        draft.embed_tokens.requires_grad_(True)  # as theirs is, the mask token's row with it
        return draft

    @cached_property
    def batch(self) -> dict[str, Any]:
        """Their elements, arranged by us. Their ids are shifted by one, so ours begin with a token that no slot reads."""
        ids_BT = self.tensors["inputs.input_ids"]
        rows, length = ids_BT.shape
        index_BT = torch.arange(length).expand(rows, -1)
        border = torch.full((rows, 1), -1)
        batch = {
            "input_ids": torch.cat([border + 1, ids_BT], dim=1),
            "documents": torch.cat([self.tensors.get("inputs.document_ids", torch.zeros_like(ids_BT)), border], dim=1),
            "positions": torch.cat([self.tensors.get("inputs.position_ids", index_BT), border + 1], dim=1),
        }
        drawn = [
            [anchors[depths == d] for d in range(DEPTHS)]
            for anchors, depths in zip(self.recorded("anchor_pos"), self.recorded("depth"), strict=True)
        ]
        return self.draft.algorithm.arrange(batch, drawn).joined(batch)

    @cached_property
    def states(self) -> list[Tensor]:
        """Our states per depth, [N_d, D]."""
        aux_BTA = self.tensors["inputs.aux"]
        aux_BSA = torch.cat([aux_BTA, torch.zeros_like(aux_BTA[:, :1])], dim=1)
        states_ND = self.draft.algorithm.states(self.draft, self.batch, aux_BSA).flatten(0, 1)
        return [states_ND[query] for query in self.batch["queries"]]

    @cached_property
    def theirs(self) -> list[Tensor]:
        """Per depth, their elements [N_d] as indices into all elements of all rows."""
        depths = torch.cat(self.recorded("depth"))
        return [(depths == d).nonzero()[:, 0] for d in range(DEPTHS)]

    @cached_property
    def teacher_logits(self) -> Tensor:
        """Over the target's vocabulary, [R, V]."""
        logits_RV = self.tensors["inputs.target_hidden"].flatten(0, 1) @ self.tensors["inputs.target_head"].T
        if self.name == "specforge":
            return logits_RV
        # Only SpecForge filters by the draft vocabulary; to the others the teacher's top token is always one of it.
        known_V = torch.isin(torch.arange(logits_RV.shape[1]), self.draft.draft_ids)
        return logits_RV.masked_fill(~known_V, float("-inf"))

    @cached_property
    def loss(self) -> Tensor:
        """The loss as the peer forms it: elements count by the mask at anchor + depth."""
        length = self.tensors["inputs.input_ids"].shape[1]
        # Our teacher rows belong to tokens, theirs to slots: one to the left.
        flat_R = self.batch["teacher_rows"]
        flat_R = flat_R // (length + 1) * length + flat_R % (length + 1) - 1
        rows = [flat_R[teachers] for teachers in self.batch["teachers"]]
        masks = [self.tensors["inputs.loss_mask"].flatten()[r].float() for r in rows]
        if self.name == "specforge":
            total = sum(
                (m * torch.isin(self.teacher_logits.argmax(-1)[r], self.draft.draft_ids)).sum() for m, r in zip(masks, rows, strict=True)
            )
        else:
            total = sum(m.sum() for m in masks) + (1e-5 if self.name == "speculators" else 0)
        weights = [m / total for m in masks]
        loss = reference(self.draft, self.states, Teacher(self.teacher_logits, torch.clone), rows, weights).loss
        if self.name == "specforge":
            return loss
        for weights_N, rows_N in zip(weights, rows, strict=True):
            log_p_NW = self.teacher_logits[rows_N][:, self.draft.draft_ids].log_softmax(-1)
            loss = loss + (weights_N[:, None] * log_p_NW.exp() * log_p_NW).sum()  # KL = CE - entropy
        return loss


@pytest.fixture(scope="module", params=["nemo", "speculators", "specforge"])
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


@pytest.mark.parametrize("depth", range(DEPTHS))
def test_logits(golden: Golden, depth: int) -> None:
    theirs = torch.cat(golden.recorded("logits"))[golden.theirs[depth]]
    assert len(theirs) > 0
    assert_close(golden.draft.compute_logits(golden.states[depth]), theirs, rtol=1e-5, atol=1e-5)


def test_loss_and_gradients(golden: Golden) -> None:
    golden.check_loss(golden.draft, golden.loss)


def test_counts_per_depth(golden: Golden) -> None:
    """Ours, from the number of supervised slots alone: they draw as many, from other slots."""
    options = golden.draft.algorithm.options
    for mask, depths in zip(golden.tensors["inputs.loss_mask"], golden.recorded("depth"), strict=True):
        initial = int(mask.sum())
        expected = [int((initial - d) * max(options.ratio**d, options.floor)) for d in range(1, DEPTHS)]
        assert torch.bincount(depths).tolist() == [len(mask), *expected]
