"""EAGLE-3 and 3.1 against recorded outputs of NeMo Automodel, SpecForge and speculators (see golden/README.md)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from recorded import CONFIG, Recorded
from torch import Tensor
from torch.testing import assert_close
from transformers import LlamaConfig

from foredraft import auto_draft
from foredraft.loss import Teacher, chunked, objective, reference, step_weights

STEPS, DECAY = 3, 0.8


@dataclass
class Golden(Recorded):
    """One file, and our draft with its weights; slots are the flattened [B·T] positions of the file."""

    fc_norm: bool = False
    norm_output: bool = False
    target = CONFIG

    @cached_property
    def draft(self) -> Any:
        size = len(self.tensors["inputs.selected_token_ids"])
        draft = auto_draft(
            self.target, "eagle3", ttt_steps=STEPS, fc_norm=self.fc_norm, norm_output=self.norm_output, draft_vocab_size=size
        )
        draft.load_state_dict(self.ours("weights"), strict=True)
        draft.embed_tokens.requires_grad_(False)
        return draft

    @cached_property
    def states(self) -> list[Tensor]:
        """Our states after each step, [B, T, D]. Their ids are shifted by one, so ours begin with a token that no slot reads."""
        ids_BT, aux_BTA = self.tensors["inputs.input_ids"], self.tensors["inputs.aux"]
        rows, length = ids_BT.shape
        index_BT = torch.arange(length).expand(rows, -1)
        border = torch.full((rows, 1), -1)
        batch = {
            "input_ids": torch.cat([torch.zeros(rows, 1, dtype=torch.long), ids_BT], dim=1),
            "documents": torch.cat([self.tensors.get("inputs.document_ids", torch.zeros_like(ids_BT)), border], dim=1),
            "positions": torch.cat([self.tensors.get("inputs.position_ids", index_BT), border + 1], dim=1),
            "slots": index_BT,
        }
        aux_BSA = torch.cat([aux_BTA, torch.zeros_like(aux_BTA[:, :1])], dim=1)
        return self.draft.algorithm.unroll(self.draft, batch, aux_BSA)

    @cached_property
    def teacher_logits(self) -> Tensor:
        """Over the target's vocabulary, [R, V]."""
        logits_RV = self.tensors["inputs.target_hidden"].flatten(0, 1) @ self.tensors["inputs.target_head"].T
        if not self.name.startswith("speculators"):
            return logits_RV
        # It has no filter on the draft vocabulary: its teacher's top token is always one of it.
        known_V = torch.isin(torch.arange(logits_RV.shape[1]), self.draft.draft_ids)
        return logits_RV.masked_fill(~known_V, float("-inf"))

    @cached_property
    def teacher(self) -> Teacher:
        return Teacher(self.teacher_logits, torch.clone)

    def slots(self, step: int) -> Tensor:
        """The slots whose token exists at `step`; the teacher's row of slot n is n + step."""
        rows, length = self.tensors["inputs.input_ids"].shape
        return torch.arange(rows * length).view(rows, length)[:, : length - step].flatten()

    def step_loss(self, step: int) -> Tensor:
        """This step's loss as the peer forms it."""
        slots = self.slots(step)
        mask_N = self.tensors["inputs.loss_mask"].flatten()[slots + step].float()
        if self.name.startswith("nemo"):
            nameable_N = torch.isin(self.teacher_logits.argmax(-1)[slots + step], self.draft.draft_ids)
            weights_N = mask_N / (mask_N * nameable_N).sum()
        elif self.name.startswith("specforge"):
            weights_N = mask_N / self.tensors["inputs.loss_mask"].numel()
        else:
            weights_N = mask_N / (mask_N.sum() + 1e-5)
        states = [self.states[step].flatten(0, 1)[slots]]
        loss = reference(self.draft, states, self.teacher, [slots + step], [weights_N]).loss
        if self.name.startswith("speculators"):
            log_p_NW = self.teacher_logits[slots + step][:, self.draft.draft_ids].log_softmax(-1)
            loss = loss + (weights_N[:, None] * log_p_NW.exp() * log_p_NW).sum()  # KL = CE - entropy
        return loss

    @cached_property
    def total_loss(self) -> Tensor:
        shares = step_weights(STEPS, DECAY) if self.name.startswith("nemo") else [DECAY**k for k in range(STEPS)]
        return torch.stack([share * self.step_loss(k) for k, share in enumerate(shares)]).sum()


@dataclass
class WithLK(Golden):
    """NeMo's LK losses. LK-λ has one λ per step, of the step's mean α, and cross-entropy for KL: a weighted sum of ours.

    It takes α over the draft's vocabulary alone.
    """

    target = LlamaConfig(**{**CONFIG.to_dict(), "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16})

    @cached_property
    def teacher_logits(self) -> Tensor:
        """Over the target's vocabulary, of which the draft's is all there is."""
        logits_RV = super().teacher_logits
        return logits_RV.masked_fill(~torch.isin(torch.arange(logits_RV.shape[1]), self.draft.draft_ids), float("-inf"))

    def slots(self, step: int) -> Tensor:
        """Those that have a loss."""
        return self.tensors[f"step{step}.position_mask"].flatten().nonzero()[:, 0]

    def step_loss(self, step: int) -> Tensor:
        """A mean."""
        slots = self.slots(step)
        asked: Any = "nla"

        def found(loss: Any) -> Any:
            states, share = [self.states[step].flatten(0, 1)[slots]], [torch.tensor(1 / len(slots))]
            return chunked(self.draft, states, self.teacher, [slots + step], share, objective(loss))

        if self.name.endswith("lambda"):
            scale = float((-3 * found("tv").acceptance[0].mean()).exp())
            asked = {"ce": scale, "tv": 1 - scale}
        return found(asked).loss  # type: ignore[no-any-return]


FILES = {
    "nemo_eagle3": (False, False),
    "nemo_eagle31": (True, True),
    "specforge_eagle3": (False, False),
    "specforge_eagle3_fcnorm": (True, False),
    "speculators_eagle3": (False, False),
    "speculators_eagle31": (True, True),
}


@pytest.fixture(scope="module", params=FILES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param, *FILES[request.param])


@pytest.mark.parametrize("step", range(STEPS))
def test_states_and_logits(golden: Golden, step: int) -> None:
    slots, state, logits = golden.slots(step), golden.states[step], golden.draft.compute_logits(golden.states[step])
    their_state, their_logits = golden.tensors[f"step{step}.hidden"], golden.tensors[f"step{step}.logits"]
    if golden.name == "speculators_eagle31":  # recorded before the norm, fed back after it
        their_state = golden.draft.norm(their_state)
    for ours, theirs in ((state, their_state), (logits, their_logits)):
        assert_close(ours.flatten(0, 1)[slots], theirs.flatten(0, 1)[slots], rtol=1e-5, atol=1e-5)


def test_teacher(golden: Golden) -> None:
    if "targets" in golden.tensors:  # speculators: over the draft vocabulary
        assert_close(golden.teacher_logits[:, golden.draft.draft_ids], golden.tensors["targets"][0], rtol=1e-5, atol=1e-5)
    else:
        assert_close(golden.teacher_logits, golden.tensors["target_logits"].flatten(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", range(STEPS))
def test_step_loss(golden: Golden, step: int) -> None:
    recorded_with = DECAY**step if golden.name.startswith("speculators") else 1.0
    assert_close(recorded_with * golden.step_loss(step), golden.tensors[f"step{step}.loss"], rtol=1e-5, atol=1e-5)


def test_loss_and_gradients(golden: Golden) -> None:
    golden.check_loss(golden.draft, golden.total_loss)


@pytest.mark.parametrize("kind", ["alpha", "lambda"])
def test_lk(kind: str) -> None:
    """What is taught, every step's loss, and the gradients of all."""
    golden = WithLK(f"nemo_lk_{kind}")
    for step in range(STEPS):
        slots, here = golden.slots(step), f"step{step}"
        logits_NW = golden.draft.compute_logits(golden.states[step]).flatten(0, 1)[slots]
        taught = golden.teacher.at(slots + step, golden.draft.draft_ids)
        assert_close(logits_NW, golden.tensors[f"{here}.logits"].flatten(0, 1)[slots], rtol=1e-5, atol=1e-5)
        assert_close(taught.p_RW, golden.tensors[f"{here}.target_probs"].flatten(0, 1)[slots], rtol=1e-5, atol=1e-6)
        assert_close(golden.step_loss(step), golden.tensors[f"{here}.loss"], rtol=1e-5, atol=1e-6)
    golden.check_loss(golden.draft, golden.total_loss)


def test_draft_vocabulary(golden: Golden) -> None:
    ids_W = golden.tensors["inputs.selected_token_ids"]
    assert_close(golden.draft.draft_ids, ids_W)
    fresh = auto_draft(CONFIG, "eagle3", draft_vocab_size=128)
    fresh.set_draft_vocabulary(ids_W)
    assert_close(fresh.d2t, golden.ours("weights")["d2t"])
    assert_close(fresh.t2d, golden.ours("weights")["t2d"])
