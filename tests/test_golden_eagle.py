"""EAGLE-1 against recorded outputs of NeMo Automodel (see golden/README.md), whose form has two norms that engines' has not."""

from typing import Any

import pytest
import torch
from recorded import Recorded
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import LlamaConfig

from foredraft import auto_draft
from foredraft.contracts import Signal
from foredraft.contracts.algorithm import Plan
from foredraft.draft import Summed
from foredraft.plugins.eagle import Eagle

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=128,
)


def test_states_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = Recorded("nemo_eagle1")
    tensors = golden.tensors
    monkeypatch.setattr(Eagle, "wiring", Summed(first_norm=True, final_norm=True))
    draft: Any = auto_draft(CONFIG, "eagle", noise=0)
    draft.load_state_dict({**golden.ours("weights"), "lm_head.weight": tensors["inputs.target_head"]}, strict=True)
    ids_BS, hidden_BST = tensors["inputs.input_ids"], tensors["inputs.target_hidden"]
    (rows, length), slots_BS = ids_BS.shape, torch.arange(ids_BS.numel()).view(ids_BS.shape)
    index_BS = torch.arange(length).expand(rows, -1)
    # Slot t counts where x_{t+1} does, and is held against what the target says there; of slots that read filler no one is asked.
    supervised_N = slots_BS[:, :-1][tensors["inputs.loss_mask"][:, 1:].bool()]
    plan = Plan.taught([supervised_N], [supervised_N + 1], slots=index_BS)
    batch = plan.joined({"input_ids": ids_BS, "documents": torch.zeros_like(ids_BS), "positions": index_BS})
    signal = Signal(hidden_BST, hidden_BST, lambda hidden_NT: F.linear(hidden_NT, tensors["inputs.target_head"]))

    every = {**batch, "queries": [slots_BS[:, :-1].flatten()]}
    (states_ND,) = draft.algorithm.states(draft, every, hidden_BST)
    for ours, theirs in ((states_ND, tensors["hidden"]), (draft.compute_logits(states_ND), tensors["logits"])):
        assert_close(ours, theirs[:, :-1].flatten(0, 1), rtol=1e-5, atol=1e-5)
    step = draft.algorithm.loss(draft, batch, signal)
    assert_close(step.loss, tensors["loss"], rtol=1e-5, atol=1e-5)
    assert_close(step.metrics["cross_entropy"][0] / len(supervised_N), tensors["token_loss"], rtol=1e-5, atol=1e-5)
    step.loss.backward()
    gradients = {name: p.grad for name, p in draft.named_parameters() if p.requires_grad}
    theirs = golden.ours("grads")
    assert gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"gradient of {name}: {m}")
