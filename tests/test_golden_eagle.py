"""EAGLE-1 against recorded outputs of NeMo Automodel (see golden/README.md), whose form has two norms that engines' has not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import Recorded
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import LlamaConfig

from foredraft import ForedraftError, auto_draft
from foredraft.contracts import Signal
from foredraft.contracts.algorithm import Plan
from foredraft.draft import Summed
from foredraft.formats import import_draft
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


NORMS = ("layers.0.input_layernorm.weight", "norm.weight")


def test_a_peer_s_file(tmp_path: Path) -> None:
    """As vLLM reads it, under either beginning; what that form has not is refused by name, NeMo's norms and the first drafts' bias."""
    tiny_model(CONFIG).save_pretrained(tmp_path / "target")
    sound = {name: t for name, t in Recorded("nemo_eagle1").ours("weights").items() if name not in (*NORMS, "embed_tokens.weight")}
    fields = {**CONFIG.to_dict(), "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}

    def imported(number: int, tensors: dict[str, torch.Tensor]) -> Any:
        folder = tmp_path / f"theirs{number}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields))
        save_file(tensors, folder / "model.safetensors")
        return import_draft(folder, tmp_path / f"ours{number}", str(tmp_path / "target"))

    for number, beginning in enumerate(("", "model.")):
        done = imported(number, {beginning + name: tensor for name, tensor in sound.items()})
        assert (done.algorithm, done.notes) == ("eagle", ())
        read = load_file(done.path / "model.safetensors")
        assert all(torch.equal(read[name], sound[name]) for name in read)
        assert {"fc.weight", "layers.0.mlp.up_proj.weight"} < read.keys()
        assert auto_draft(done.path).config.aux_layers == (CONFIG.num_hidden_layers,)
    for number, (name, shape) in enumerate([(NORMS[0], 32), (NORMS[1], 32), ("fc.bias", 32)], start=2):
        with pytest.raises(ForedraftError, match=f"unexpected: .*{name}"):
            imported(number, {**sound, name: torch.ones(shape)})
