"""Latent-attention drafts on tiny random DeepSeek targets: training, packing, files, decoding, and the balance of experts."""

import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import gradients, tiny_batch, tiny_rows, tiny_signal
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    PretrainedConfig,
)

from foredraft import ForedraftError, Registry, auto_draft, generate
from foredraft.adapters import deepseek_v3
from foredraft.decoding.compatibility import try_out
from foredraft.decoding.families import tiny_model
from foredraft.files.ours import load_draft, save_draft
from foredraft.plugins import eagle3

REGISTRY = Registry(entry_points=[])
REGISTRY.register(eagle3)
REGISTRY.register(deepseek_v3)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def config(cls: Any = DeepseekV3Config, **fields: Any) -> Any:
    """Eight layers, the first three dense; 4 heads of 8 + 4 dimensions; 8 experts in 2 groups."""
    shape: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 8,
        "first_k_dense_replace": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return cls(**{**shape, **fields})


CONFIGS: dict[str, PretrainedConfig] = {
    "V3": config(),
    "V3, yarn": config(rope_parameters=YARN),
    "Kimi-K2": config(n_group=1, topk_group=1, first_k_dense_replace=1, rope_parameters=YARN, rms_norm_eps=1e-5),
    "Moonlight": config(q_lora_rank=None, n_shared_experts=2, n_group=1),
    "V2": config(DeepseekV2Config, topk_method="group_limited_greedy", rope_parameters=YARN),
    "V2-Lite": config(DeepseekV2Config, q_lora_rank=None, n_group=None, topk_group=None),
}


def target(made: PretrainedConfig) -> Any:
    """A random target in evaluation mode; its routers have biases, as trained ones do."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(made).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.5, 0.5)
    return model


def draft_for(model: Any, adapter: str, **options: Any) -> Any:
    """A draft in evaluation mode that started from its target."""
    torch.manual_seed(1)
    draft = auto_draft(model.config, adapter=adapter, registry=REGISTRY, **{"ttt_steps": 3, **options})
    draft.start_from(model)
    return draft.eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_adapter_is_found(name: str) -> None:
    """By model_type, from a config or its dict."""
    for source in (CONFIGS[name], CONFIGS[name].to_dict()):
        draft = auto_draft(source, registry=REGISTRY)
        assert type(draft) is deepseek_v3.DeepseekV3Draft
        assert type(draft.layers[0].mlp).__name__ == "DeepseekV3MLP"


def test_kimi_k25_has_a_deepseek_inside() -> None:
    """Of a target that sees, the text model decides; transformers makes it a DeepseekV3Config that may call itself kimi_k2."""
    text = {**CONFIGS["Kimi-K2"].to_dict(), "model_type": "kimi_k2"}
    eyes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
    made = Kimi_K25Config(text_config=text, vision_config=eyes, projection_hidden_size=64, image_token_id=49)
    assert made.get_text_config().model_type in ("kimi_k2", "deepseek_v3")  # the latter from transformers 5.23 on
    torch.manual_seed(0)
    model: Any = Kimi_K25ForConditionalGeneration(made).eval()
    draft = draft_for(model, "deepseek_v3")
    assert draft.layers[0].self_attn.o_proj.weight.equal(model.get_decoder().layers[-1].self_attn.o_proj.weight)
    ids = torch.tensor([[5, 9, 17, 3]])
    plain = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(generate(model, draft, ids, max_new_tokens=8, pad_token_id=0), plain)


def test_the_config_is_what_engines_read(tmp_path: Path) -> None:
    """Of an `Eagle3DeepseekV2ForCausalLM`; its tensors' names are the kit's to check."""
    draft = draft_for(target(CONFIGS["Kimi-K2"]), "deepseek_v3")
    save_draft(draft, tmp_path / "draft")
    fields = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert fields["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    wanted = {
        "model_type": "deepseek_v2",
        "num_hidden_layers": 1,
        "q_lora_rank": 12,
        "n_routed_experts": 8,
        "rope_interleave": True,
        "rope_theta": 50000.0,
        "num_aux_hidden_states": 3,
    }
    assert {name: fields[name] for name in wanted} == wanted
    assert fields["rope_scaling"]["mscale_all_dim"] == 1.0


def step(model: Any, draft: Any, rows: list[dict[str, Any]], counts: Tensor | None = None) -> Tensor:
    """The loss of a batch; gradients are added up."""
    batch = tiny_batch(draft.algorithm, rows)
    loss: Tensor = draft(batch if counts is None else {**batch, "counts": counts}, tiny_signal(model, draft, batch))["loss"]
    loss.backward()
    return loss


class TestExperts:
    def test_fresh_ones_are_initialised(self) -> None:
        """They are bare parameters, which only the family's own base class knows."""
        draft: Any = auto_draft(config(initializer_range=0.02), adapter="deepseek_v3_moe", registry=REGISTRY)
        mlp = draft.layers[0].mlp
        for p in (mlp.experts.gate_up_proj, mlp.experts.down_proj, mlp.gate.weight):
            assert 0.015 < float(p.detach().std()) < 0.025
        assert not mlp.gate.e_score_correction_bias.any()

    def test_those_chosen_get_gradients(self) -> None:
        """And no other; with one step and one row, every slot that chooses is supervised."""
        model = target(CONFIGS["V3"])
        draft = draft_for(model, "deepseek_v3_moe", ttt_steps=1).train()
        step(model, draft, tiny_rows([["uuaaaa"]]))
        mlp = draft.layers[0].mlp
        assert 2 <= (mlp.gate.load > 0).sum() < 8
        for p in mlp.experts.parameters():
            assert torch.equal(p.grad.abs().sum((1, 2)) > 0, mlp.gate.load > 0)

    def test_half_precision_keeps_the_bias(self, tmp_path: Path) -> None:
        """Loading in bfloat16 leaves the router's bias, whose steps bfloat16 could not hold, in float32."""
        draft = draft_for(target(CONFIGS["V3"]), "deepseek_v3_moe")
        save_draft(draft, tmp_path / "draft")
        half: Any = deepseek_v3.DeepseekV3MoEDraft.from_pretrained(str(tmp_path / "draft"), dtype=torch.bfloat16)
        gate = half.layers[0].mlp.gate
        assert half.lm_head.weight.dtype == torch.bfloat16
        assert (gate.e_score_correction_bias.dtype, gate.load.dtype) == (torch.float32, torch.long)
        assert gate.e_score_correction_bias.equal(draft.layers[0].mlp.gate.e_score_correction_bias)

    def test_balance_by_hand(self) -> None:
        """Busy experts down, idle ones up, those at the mean stay; then the count starts anew."""
        router = deepseek_v3.BalancedRouter(config(n_routed_experts=4, n_group=1))
        router.load += torch.tensor([6, 4, 2, 4])
        router.balance()
        assert router.e_score_correction_bias.tolist() == pytest.approx([-0.001, 0, 0.001, 0])
        assert not router.load.any()

    def test_only_training_counts(self) -> None:
        """In training every choice, K per input; in evaluation none, and nothing moves."""
        model = target(CONFIGS["V3"])
        draft = draft_for(model, "deepseek_v3_moe")
        gate, rows = draft.layers[0].mlp.gate, tiny_rows([["uuaaaaaa"]])
        bias = gate.e_score_correction_bias.clone()
        step(model, draft, rows)
        assert not gate.load.any()
        draft.train()
        step(model, draft, rows)
        slots = tiny_batch(draft.algorithm, rows)["slots"].numel()
        assert int(gate.load.sum()) == 2 * 2 * 3 * slots  # experts per token × TTT steps × slots, all of it computed again
        assert gate.e_score_correction_bias.equal(bias)  # a step is balanced by the one before
        step(model, draft, rows)
        assert not gate.e_score_correction_bias.equal(bias)

    def test_a_collapsed_router_recovers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two of eight experts are given a lead that takes all inputs; after 100 steps the load is spread again."""
        monkeypatch.setattr(deepseek_v3, "BALANCE_SPEED", 0.01)
        torch.manual_seed(0)
        router = deepseek_v3.BalancedRouter(config(n_group=1))
        torch.nn.init.normal_(router.weight, std=0.1)
        router.e_score_correction_bias[:2] = 0.6
        inputs = torch.randn(200, 32)
        spread = []
        for _ in range(100):
            router(inputs)
            share = router.load / router.load.sum()
            spread.append(float(torch.special.entr(share).sum()) / math.log(8))
            router.balance()
        assert spread[0] < 0.4
        assert spread[-1] > 0.98

    def test_resumed_training_goes_on_exactly(self, tmp_path: Path) -> None:
        """The counted load is part of the file: three steps equal two, a save, a load and one."""
        model = target(CONFIGS["V3"])
        draft = draft_for(model, "deepseek_v3_moe").train()
        rows = tiny_rows([["uuaaaaaa", "uaaaa"]])
        for _ in range(2):
            step(model, draft, rows)
        save_draft(draft, tmp_path / "draft")
        resumed = load_draft(tmp_path / "draft", REGISTRY, draft.algorithm).train()
        assert torch.equal(step(model, draft, rows), step(model, resumed, rows))
        assert_close(resumed.state_dict(), draft.state_dict(), rtol=0, atol=0)

    def test_recomputed_forwards_route_alike(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Computing a layer again counts twice, which changes no sign, and finds the biases of the forward, however fast they move."""
        monkeypatch.setattr(deepseek_v3, "BALANCE_SPEED", 0.1)
        model, rows = target(CONFIGS["V3"]), tiny_rows([["uuaaaaaa", "uaaaa"]])
        kept: list[dict[str, Tensor]] = []
        for recompute in (False, True):
            draft = draft_for(model, "deepseek_v3_moe").train()
            mlp = draft.layers[0].mlp
            if recompute:
                mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=False)
            step(model, draft, rows)
            step(model, draft, rows)
            kept.append({**gradients(draft), "bias": mlp.gate.e_score_correction_bias, "load": mlp.gate.load})
        assert_close(kept[1], kept[0], rtol=1e-5, atol=1e-6)

    @pytest.mark.slow
    def test_ranks_balance_by_the_load_of_all(self, tmp_path: Path) -> None:
        """Under DDP, whose broadcast of buffers would leave rank 0's counts alone."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        script = str(Path(__file__).with_name("balance_two_ranks.py"))
        done = subprocess.run([*command, script, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        for rank in (0, 1):  # together 4, 6 and 4 each of the others, with a mean of 4.25; on rank 0 alone it would be -, +, 0
            moved = torch.load(tmp_path / f"{rank}.pt") / deepseek_v3.BALANCE_SPEED
            assert_close(moved, torch.tensor([1.0, -1, 1, 1, 1, 1, 1, 1]), rtol=1e-3, atol=0)

    def test_a_v2_router_is_refused(self) -> None:
        """It scores experts otherwise: copied weights would mean something else."""
        with pytest.raises(ForedraftError, match="the target is a deepseek_v2, which scores its experts otherwise"):
            auto_draft(CONFIGS["V2"], adapter="deepseek_v3_moe", registry=REGISTRY)


@pytest.mark.parametrize(
    ("model_type", "adapter"), [(t, "deepseek_v3") for t in ("deepseek_v32", "glm_moe_dsa", "mistral4")] + [("minicpm3", "generic")]
)
def test_other_families_with_a_latent(model_type: str, adapter: str) -> None:
    """A latent draft where engines serve one, a Llama-shaped one elsewhere, which says so; both are trained and decode."""
    model = tiny_model(CONFIG_MAPPING[model_type])
    draft = try_out(model)
    latent = adapter == "deepseek_v3"
    assert (draft.name, hasattr(draft.layers[0].self_attn, "kv_a_proj_with_mqa")) == (adapter, latent)
    assert any("attention, where the target's is latent" in text for text in draft.assumed(model.config)) is not latent
    if latent:
        theirs = model.model.layers[-1].self_attn
        for name in ("q_b_proj", "kv_b_proj", "o_proj"):
            assert torch.equal(draft.layers[0].self_attn.get_submodule(name).weight, theirs.get_submodule(name).weight), name
