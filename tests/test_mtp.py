"""MTP: against recorded steps of speculators (see golden/README.md), started from what a target ships, written back under its names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import Recorded
from safetensors.torch import load_file, save_file
from test_conformance import LATENT, TINY
from test_doctor import AUX, Break, rewritten, serious, setting
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import AutoConfig, Qwen3Config

from foredraft import auto_draft, generate, save_draft
from foredraft.contracts import Layout, Plan, Signal
from foredraft.doctor import examine
from foredraft.draft.attention import Causal
from foredraft.files.spellings import TARGET_HEAD
from foredraft.formats import export_draft, import_draft
from foredraft.testing.tiny import tiny_batch, tiny_model, tiny_rows, tiny_signal

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 128, "num_hidden_layers": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
TARGETS = {
    "speculators_mtp": Qwen3Config(**SMALL),
    "speculators_mtp_qwen3_5": AutoConfig.for_model("qwen3_5_text", **SMALL, rope_parameters=ROPE),
}
THEIRS = {"input_proj": "fc", "token_layernorm": "embedding_norm", "hidden_layernorm": "state_norm", "final_layernorm": "norm"}


def ours(name: str) -> str:
    """Our name of a tensor of speculators'."""
    own = name.removeprefix("mtp_layers.0.")
    part = own.split(".")[0]
    return own.replace(part, THEIRS[part]) if part in THEIRS else f"layers.0.{own}" if own != name else own


@pytest.mark.parametrize("name", TARGETS)
def test_states_loss_and_gradients(name: str) -> None:
    """Its steps look at their own keys alone, at the rotary positions of the first, which serving does not: so they are run here."""
    tensors, golden = Recorded(name).tensors, Recorded(name)
    config, steps = TARGETS[name], 3
    draft: Any = auto_draft(config, "mtp", layers_of=config.model_type, head="qwen", loss="text")
    draft.load_state_dict({ours(n): t for n, t in golden.ours("weights").items()}, strict=True)
    losses = []
    for b, (ids_L, mask_L) in enumerate(zip(tensors["inputs.input_ids"], tensors["inputs.loss_mask"].bool(), strict=True)):
        count = len(ids_L) - steps - 1
        fed_1ND, states, slots_N = tensors["inputs.target_pre"][b : b + 1, :count], [], torch.arange(count)
        for k in range(steps):
            embeds = draft.embed_input_ids(ids_L[None, 1 + k : 1 + k + count])
            fed_1ND = draft.backbone(embeds, fed_1ND, Layout(slots_N[None], Causal()))
            states.append(fed_1ND[0])
            assert_close(states[k], tensors[f"row{b}.step{k}.hidden"], rtol=1e-5, atol=1e-5)
            assert_close(draft.compute_logits(states[k]), tensors[f"row{b}.step{k}.logits"], rtol=1e-5, atol=1e-5)
        queries = [slots_N[mask_L[k + 2 : k + 2 + count]] for k in range(steps)]
        batch = Plan.taught(queries, [q + 1 + k for k, q in enumerate(queries)]).joined({"input_ids": ids_L[None]})
        signal = Signal(fed_1ND[..., :0], tensors["inputs.target_pre"][b : b + 1], lambda h: F.linear(h, draft.lm_head.weight))
        taught = [state[query] for state, query in zip(states, queries, strict=True)]
        losses.append(draft.algorithm.supervised(draft, taught, batch, signal).loss)
    loss = torch.stack(losses).sum()
    assert_close(loss, tensors["loss"], rtol=1e-5, atol=1e-5)
    loss.backward()
    theirs = {ours(n): t for n, t in golden.ours("grads").items()}
    gradients = {n: p.grad for n, p in draft.named_parameters() if p.requires_grad}
    assert gradients.keys() == theirs.keys()
    for n, gradient in gradients.items():
        assert_close(gradient, theirs[n], rtol=1e-4, atol=1e-6, msg=lambda m, n=n: f"gradient of {n}: {m}")


LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**LINEAR, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16, "head_dim": 8},
    "qwen3_5_text": {**LINEAR, "head_dim": 8},
    "deepseek_v3": {**LATENT, **EXPERTS, "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "qwen2": {"architectures": ["MiMoForCausalLM"]},
}
SIGN = {"qwen3_next": "mtp.fc", "qwen3_5_text": "mtp.fc", "deepseek_v3": "model.layers.4.eh_proj", "qwen2": "model.mtp_layers.0.input_proj"}


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow if "qwen3" in f else ()) for f in FAMILIES])
def test_the_head_of_a_family(family: str, tmp_path: Path) -> None:
    """Trained, drafted with, written under the target's names, read back bit for bit; a target that ships with it starts from it."""
    config = AutoConfig.for_model(family, **{**TINY, "num_hidden_layers": 4, **FAMILIES[family]})
    model = tiny_model(config)
    draft: Any = auto_draft(config, "mtp")
    assert "layer tensors" in draft.start_from(model)
    batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaaaaa", "uubbbb"]], high=49))
    draft(batch, tiny_signal(model, draft, batch))["loss"].backward()
    assert all(bool(p.grad.any()) for p in draft.parameters() if p.requires_grad)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(generate(model, draft.eval(), ids, max_new_tokens=12), model.generate(ids, max_new_tokens=12, do_sample=False))

    written = export_draft(save_draft(draft, tmp_path / "draft"), tmp_path / "head", "mtp")
    head, mine = (
        load_file(written / "model.safetensors"),
        {n: t for n, t in draft.state_dict().items() if n not in TARGET_HEAD},
    )
    assert f"{SIGN[family]}.weight" in head
    assert examine(written) == []
    model.save_pretrained(tmp_path / "target")
    config.architectures = FAMILIES[family].get("architectures")  # saving names transformers' own class
    said = json.loads((tmp_path / "target/config.json").read_text())
    (tmp_path / "target/config.json").write_text(json.dumps({**said, **FAMILIES[family]}))
    done = import_draft(written, tmp_path / "again", str(tmp_path / "target"))
    assert done.form == done.algorithm == "mtp"
    again = auto_draft(done.path)
    assert again.algorithm.options.head == draft.algorithm.options.head
    assert all(torch.equal(again.state_dict()[n], t) for n, t in mine.items())

    save_file(head, tmp_path / "target/mtp.safetensors")  # as checkpoints bring it: transformers drops it on loading
    model.config._name_or_path = str(tmp_path / "target")
    fresh: Any = auto_draft(config, "mtp")
    assert "the head in its own files" in fresh.start_from(model)
    assert all(torch.equal(fresh.state_dict()[n], t) for n, t in mine.items())
    save_file({n: t for n, t in head.items() if "post_attention" not in n}, tmp_path / "target/mtp.safetensors")
    assert "not the head in its own files, of which layers.0.post_attention_layernorm.weight is not there" in fresh.start_from(model)


def halves(config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    """The two halves of what fc reads in the other order."""
    state["fc.weight"] = state["fc.weight"].roll(32, dims=1)


PLANTED: list[tuple[str, str, Break]] = [
    ("draft", "mtp-state", lambda c, s: c.update({AUX: [4] if c[AUX] == [-1] else [-1]})),
    ("draft", "mtp-head", setting("foredraft", "options", "head", value="qwen")),  # the embedding counts at position 0
    ("draft", "fc-order", halves),
    ("head", "mtp-count", lambda c, s: c.update(num_nextn_predict_layers=0, mtp_num_hidden_layers=0)),
    ("head", "mtp-tensors", lambda c, s: [s.pop(name) for name in list(s) if name.endswith(("hnorm.weight", "hidden_layernorm.weight"))]),
]


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_what_is_wrong_with_a_head_is_named(family: str, tmp_path: Path) -> None:
    """And nothing where nothing is, though MiMo's fc reads the state first."""
    config = AutoConfig.for_model(family, **{**TINY, "num_hidden_layers": 4, **FAMILIES[family]})
    model, target = tiny_model(config), tmp_path / "target"
    draft: Any = auto_draft(config, "mtp")
    draft.start_from(model)
    made = {"draft": save_draft(draft, tmp_path / "draft")}
    made["head"] = export_draft(made["draft"], tmp_path / "head", "mtp")
    model.save_pretrained(target)
    assert [examine(path, target) for path in made.values()] == [[], []]
    for number, (kind, id, change) in enumerate(PLANTED):
        broken = rewritten(made[kind], tmp_path / f"broken{number}", change)
        assert id in serious(examine(broken, target)), id
