"""DSpark, Domino and DFlash2 against recorded outputs of SpecForge, NeMo Automodel and speculators (see golden/README.md)."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import CONFIG, Recorded
from safetensors.torch import save_file
from torch import Tensor
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import auto_draft
from foredraft.contracts import Signal
from foredraft.decoding import choose_in_turn
from foredraft.draft import blocks
from foredraft.formats import import_draft
from foredraft.loss import Teacher

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
TARGET = LlamaConfig(**{**CONFIG.to_dict(), **SMALL})
SHARED = {"block_size": 4, "num_layers": 2, "num_aux": 3, "mask_token_id": 63, "gamma": 4.0}
DSPARK = {"markov_rank": 8}
DOMINO = {"emb_dim": 10, "gru_hidden_dim": 12}
DFLASH2 = {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": 28}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "specforge_dspark": ("dspark", DSPARK),
    "specforge_dspark_gated": ("dspark", {**DSPARK, "markov_head_type": "gated"}),
    "specforge_dspark_rnn": ("dspark", {**DSPARK, "markov_head_type": "rnn", "confidence_head_with_markov": False}),
    "nemo_dspark": ("dspark", DSPARK),
    "nemo_dspark_rnn": ("dspark", {**DSPARK, "markov_head_type": "rnn"}),
    "speculators_dspark": ("dspark", {**DSPARK, "loss": {"text": 0.1, "tv": 0.9}}),
    "speculators_dspark_fillin": ("dspark", {**DSPARK, "loss": {"text": 0.1, "tv": 0.9}, "sample_from_anchor": False}),
    "speculators_dspark_reduced": ("dspark", {**DSPARK, "loss": "kl", "own_head": True}),
    "specforge_domino": ("domino", DOMINO),
    "specforge_domino_unshifted": ("domino", {**DOMINO, "shift_label": False, "pure_draft_prefix_len": 0}),
    "nemo_domino": ("domino", DOMINO),
    "speculators_dflash2": ("dflash2", DFLASH2),
    "nemo_dflash2": ("dflash2", DFLASH2),
}


class Verdict(Teacher):
    """speculators' labels: the likeliest token of its target, in place of the text's."""

    @classmethod
    def of(cls, signal: Signal, rows_R: Tensor, ids_BS: Tensor | None = None) -> Any:
        hidden_RT = signal.hidden_BST.flatten(0, 1)[rows_R]
        return cls(hidden_RT, signal.head, signal.head(hidden_RT).argmax(-1))


@dataclass
class Golden(Recorded):
    """One file, our draft with its weights, and our loss over the anchors that were recorded."""

    @property
    def packed(self) -> bool:
        """speculators takes one row of two documents."""
        return self.name.startswith("speculators")

    @cached_property
    def draft(self) -> Any:
        algorithm, options = FILES[self.name]
        draft = auto_draft(TARGET, algorithm, **SHARED, **options, draft_vocab_size=40 if self.reduced else None)
        head = {} if self.reduced else {"lm_head.weight": self.tensors["inputs.target_head"]}
        draft.load_state_dict(head | self.ours("weights_frozen") | self.ours("weights"), strict=True)
        draft.lm_head.requires_grad_(False)  # speculators trains none, ours trains one of its own
        return draft

    @property
    def reduced(self) -> bool:
        return self.name.endswith("reduced")

    @cached_property
    def batch(self) -> dict[str, Any]:
        """Their anchors, arranged by us. Where the peer ends a block at a gap of its mask, spans are the mask's; else all is one span."""
        ids_BS, mask_BS = self.tensors["inputs.input_ids"], self.tensors["inputs.loss_mask"].bool()
        documents_BS = self.tensors.get("inputs.document_ids", torch.zeros_like(ids_BS))
        positions_BS = self.tensors.get("inputs.position_ids", torch.arange(ids_BS.shape[1]).expand_as(ids_BS))
        spans_BS = ((~mask_BS).cumsum(-1)).where(mask_BS, -1) if self.ends_at_gaps else torch.zeros_like(ids_BS)
        batch = {"input_ids": ids_BS, "documents": documents_BS, "positions": positions_BS, "spans": spans_BS}
        anchors = self.tensors["anchors"][None] if self.packed else self.tensors["anchor_positions"]
        return self.draft.algorithm.arrange(batch, list(anchors)).joined(batch)

    @property
    def ends_at_gaps(self) -> bool:
        return "dspark" in self.name and not self.packed

    @cached_property
    def signal(self) -> Signal:
        tensors, ids_W = self.tensors, self.draft.draft_ids
        head_WT = tensors["weights.verifier_lm_head.weight" if self.reduced else "inputs.target_head"]
        hidden_BST = tensors.get("inputs.target_hidden", tensors["inputs.aux"][..., :32])
        # A reduced one's target is told of no other words: the likeliest of these is its label.
        return Signal(
            tensors["inputs.aux"], hidden_BST, lambda h: h.new_full((*h.shape[:-1], 64), -torch.inf).index_copy(-1, ids_W, h @ head_WT.T)
        )

    def shares(self, batch: dict[str, Any]) -> list[Tensor]:
        """What a row weighs where that is not ours: by the mask at its label; speculators' DSpark: one before it, over Σ mask."""
        mask_R, before = self.tensors["inputs.loss_mask"].flatten().float(), self.packed * self.draft.algorithm.shift
        masks = [mask_R[label - before] for label in batch["labels"]]
        decay = [torch.tensor(-k / 4.0).exp() for k in range(len(masks))]
        weights = [d * mask for d, mask in zip(decay, masks, strict=True)]
        total = torch.cat(masks if self.packed else weights).sum() + (1e-5 if self.packed else 1e-6)
        return [w / total for w in weights]

    @cached_property
    def loss(self) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            if not self.ends_at_gaps:
                patch.setattr(self.draft.algorithm, "shares", self.shares)
            if self.packed:
                patch.setattr(blocks, "Teacher", Verdict)
                likeliest_R = self.signal.head(self.signal.hidden_BST).argmax(-1).flatten()
                patch.setattr(self.draft.algorithm, "texts", lambda batch: likeliest_R.roll(1))
            return self.draft.algorithm.loss(self.draft, {**self.batch, "progress": 0.7}, self.signal).loss  # type: ignore[no-any-return]

    def drafting(self, name: str) -> Tensor:
        """What was recorded of the slots that draft, [M, K, ..]."""
        recorded = self.tensors[name]
        shape = recorded.shape[-1:] if recorded.numel() > 32 else ()
        return recorded.reshape(8, 4, *shape)[:, 1 - self.draft.algorithm.shift :]


@pytest.fixture(scope="module", params=[name for name in FILES if name != "nemo_dflash2"])
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def test_logits(golden: Golden) -> None:
    """Of all slots that draft, the ones beyond the text included: they are part of the block that the others see."""
    draft, algorithm = golden.draft, golden.draft.algorithm
    states_ND = algorithm.states(draft, golden.batch, golden.signal.aux_BSA).flatten(0, 1)
    hidden_MKD, before_MK = draft.norm(states_ND).unflatten(0, (8, -1)), algorithm.tokens_before(golden.batch).flatten(0, 1)
    assert_close(hidden_MKD, golden.drafting("hidden"), rtol=1e-5, atol=1e-5)
    if algorithm.name == "dspark":
        carried_MKr = draft.markov_head.unrolled(before_MK, hidden_MKD)
        sure_N = algorithm.confidence(draft, draft.norm(states_ND), before_MK.flatten())
        assert_close(sure_N, golden.drafting("confidence_logits").flatten(), rtol=1e-5, atol=1e-5)
    elif algorithm.name == "domino":
        heard_MKG = draft.prefix_gru(draft.embed_input_ids(before_MK))[0]
        corrected_K1 = (torch.arange(hidden_MKD.shape[1]) >= algorithm.options.pure_draft_prefix_len)[:, None]
        carried_MKr = algorithm.correction(draft, hidden_MKD, heard_MKG) * corrected_K1
    else:
        carried_MKr = hidden_MKD[..., :0]
    logits_NW = draft.compute_logits(torch.cat([states_ND, carried_MKr.flatten(0, 1)], dim=-1))
    assert_close(logits_NW, golden.drafting("logits").flatten(0, 1), rtol=1e-5, atol=1e-5)


def test_candidates() -> None:
    """NeMo's, what they score and the path through them. Its selector's loss is over the slots whose label is among them, whose number
    no other rank knows: ours is speculators', where the label takes the last one's place."""
    golden = Golden("nemo_dflash2")
    draft, algorithm = golden.draft, golden.draft.algorithm
    states_ND = algorithm.states(draft, golden.batch, golden.signal.aux_BSA).flatten(0, 1)
    ids_Nk, before_N = golden.tensors["candidate_ids"].flatten(0, 2), algorithm.tokens_before(golden.batch).flatten()
    scores_Nk = algorithm._scores(draft, states_ND, before_N, ids_Nk)
    assert_close(scores_Nk, golden.tensors["candidate_scores"].flatten(0, 2), rtol=1e-5, atol=1e-5)
    newest_M = golden.batch["input_ids"].gather(1, golden.batch["anchors"]).flatten().tolist()

    def likeliest(logits_W: Tensor, drafted: list[int]) -> tuple[int, None]:
        assert int(logits_W.isfinite().sum()) == 28
        return int(logits_W.argmax()), None

    paths = [
        choose_in_turn(algorithm._in_turn(draft, own_KD, newest), likeliest)[0]
        for own_KD, newest in zip(states_ND.unflatten(0, (8, -1)), newest_M, strict=True)
    ]
    assert paths == golden.tensors["greedy_path"].flatten(0, 1).tolist()


def test_loss_and_gradients(golden: Golden) -> None:
    golden.check_loss(golden.draft, golden.loss, atol=1e-5)


QWEN = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
QWEN |= {"num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": 64, "block_size": 4, "is_causal": False, "rope_theta": 10000.0}
INSIDE = {"mask_token_id": 63, "target_layer_ids": [0, 2, 5]}
MARKOV = {"markov_rank": 8, "enable_confidence_head": True, "confidence_head_with_markov": True, "num_anchors": 512}
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 28, "block_size": 4}
CORRECTED = {"projector_type": "domino", "emb_dim": 10, "gru_hidden_dim": 12, "pure_draft_prefix_len": 1, "shift_label": True}
PEERS: dict[str, dict[str, Any]] = {
    "nemo_dspark_rnn": {"architectures": ["Qwen3DSparkModel"], **INSIDE, **MARKOV, "markov_head_type": "rnn"},
    "specforge_dspark_gated": {"architectures": ["DSparkDraftModel"], "dflash_config": {**INSIDE, **MARKOV, "markov_head_type": "gated"}},
    "speculators_dspark_reduced": {"architectures": ["Qwen3DSparkModel"], **INSIDE, **MARKOV, "draft_vocab_size": 40},
    "specforge_domino": {"architectures": ["DominoDraftModel"], "dflash_config": {**INSIDE, **CORRECTED}},
    "nemo_dflash2": {"architectures": ["DFlash2DraftModel"], "dflash_config": {**INSIDE, **CONVOLVED}},
}
"""The config that goes with a file's weights, as its framework writes it."""


@pytest.mark.parametrize("name", PEERS)
def test_import(name: str, tmp_path: Path) -> None:
    """Their files become drafts of ours with the same weights, options and logits; and are told apart by their tensors."""
    golden = Golden(name)
    state = golden.ours("weights")
    model = LlamaForCausalLM(TARGET)
    with torch.no_grad():
        model.lm_head.weight.copy_(golden.tensors["inputs.target_head"])
        model.get_input_embeddings().weight.copy_(
            golden.ours("weights_frozen").get("embed_tokens.weight", state.get("embed_tokens.weight"))
        )
    model.save_pretrained(tmp_path / "target")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.json").write_text(json.dumps({**QWEN, **PEERS[name]}))
    save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / "theirs/model.safetensors")
    done = import_draft(tmp_path / "theirs", tmp_path / "ours", str(tmp_path / "target"))
    draft = auto_draft(done.path)
    draft.take_head(model)
    assert done.algorithm == draft.algorithm.name == FILES[name][0]
    said = {**QWEN, **PEERS[name], **PEERS[name].get("dflash_config", {})}
    told = draft.algorithm.options.model_dump()
    assert {n: v for n, v in told.items() if n in said} == {n: said[n] for n in told if n in said}
    assert all(torch.equal(tensor, golden.draft.state_dict()[n]) for n, tensor in draft.state_dict().items())
    assert draft.config.aux_layers == (1, 3, 6)
