"""What outlives a training: checkpoints that resume under every adapter and RoPE, and after a signal."""

import itertools
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from killed import kill_at_random
from rigged import predictable_target, trainer_of, written_rows
from tiny import tiny_draft, tiny_rows
from train_until_signal import Signals
from transformers import AutoConfig, AutoModelForCausalLM

from foredraft import auto_draft, default_registry
from foredraft.training.progress import TrainingStopped
from foredraft.training.resume import latest_complete

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "phi3": ("phi3", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "generic": ("gemma", {"head_dim": 8}),
    "ernie4_5": ("ernie4_5", {"head_dim": 8}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3_moe": ("deepseek_v3", LATENT),
}
"""A target's model_type and what its config needs beyond `SIZES`, by adapter."""
FAR = {"factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **FAR},
    "yarn": {"mscale": 1.0, "mscale_all_dim": 1.0, **FAR},
    "longrope": {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0], **FAR},
}


def test_every_adapter_is_tried() -> None:
    assert {r.name for r in default_registry().registered if r.kind == "adapter" and r.distribution == "foredraft"} == {*TARGETS, "streams"}


QUICK = {
    *(("llama", "dynamic"), ("phi3", "longrope"), ("qwen3", "llama3"), ("generic", "linear")),
    *(("deepseek_v3", "yarn"), ("deepseek_v3_moe", "yarn")),
}
"""Each adapter and each RoPE in every run; all pairs of them among the slow."""
PAIRS = [
    pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
    for pair in itertools.product(TARGETS, ROPES)
    if pair[0] != "phi3" or pair[1] == "longrope"
]


@pytest.mark.parametrize(("adapter", "rope"), PAIRS)
def test_resumes(tmp_path: Path, adapter: str, rope: str) -> None:
    """Two steps in one go, or one and, from its checkpoint into other weights, another: the same draft, bit for bit."""
    family, fields = TARGETS[adapter]
    config = AutoConfig.for_model(family, **{**SIZES, **fields, "rope_parameters": {"rope_type": rope, "rope_theta": 500.0, **ROPES[rope]}})
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 1}

    def trained(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        draft = auto_draft(config, adapter=adapter, aux_layers=(1, 2), num_aux=2, ttt_steps=1)
        assert draft.config.rope_parameters["rope_type"] in (rope, "default" if rope == "dynamic" else rope)
        draft.start_from(target)
        trainer_of(draft, target, tmp_path, tiny_rows([["uuaaaaaa"]] * 2), **saving).train(resume_from_checkpoint=True)
        return draft.state_dict()

    whole = trained(0)
    shutil.rmtree(tmp_path / "checkpoint-2")
    resumed = trained(1)
    assert not [name for name in whole if not torch.equal(whole[name], resumed[name])]


def test_a_signal_ends_the_training_after_its_step(tmp_path: Path) -> None:
    """With a checkpoint that goes on to what an uninterrupted training gives, and without an evaluation; handlers are as before."""
    target = predictable_target()

    def trained(directory: Path, interrupt: bool = False) -> dict[str, Any]:
        draft, rows = tiny_draft(target, ttt_steps=1), written_rows(target)
        epochs = {"save_strategy": "epoch", "eval_strategy": "epoch", "eval_dataset": rows[:1], "per_device_train_batch_size": 2}
        trainer = trainer_of(draft, target, directory, rows, **epochs)
        if interrupt:
            trainer.add_callback(Signals(signal.SIGINT, 1))
        handler = signal.getsignal(signal.SIGINT)
        try:
            trainer.train(resume_from_checkpoint=True)
        finally:
            assert signal.getsignal(signal.SIGINT) is handler
            assert any("eval_loss" in log for log in trainer.state.log_history) is not interrupt
        return draft.state_dict()

    with pytest.raises(
        TrainingStopped, match=rf"by SIGINT after step 2 of 4; '{tmp_path}/checkpoint-2' is complete(?s:.*)again"
    ) as stopped:
        trained(tmp_path, interrupt=True)
    assert stopped.value.status == 130
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    resumed, again, whole = trained(tmp_path), trained(tmp_path), trained(tmp_path / "whole")
    assert not [name for name in whole if not torch.equal(whole[name], resumed[name]) or not torch.equal(whole[name], again[name])]


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_signals_to_a_process(tmp_path: Path, times: int) -> None:
    """One ends with a checkpoint, two at once."""
    script = Path(__file__).parent / "train_until_signal.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path), str(times)], capture_output=True, text=True, timeout=200)
    assert done.returncode == (143 if times == 1 else -signal.SIGTERM), done.stderr
    assert "SIGTERM: this step is finished, then a checkpoint written; again ends at once" in done.stderr
    assert (tmp_path / "checkpoint-2").exists() is (times == 1)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, 50])
def test_killed_at_any_point_a_training_goes_on(tmp_path: Path, kills: int) -> None:
    """kill -9, while it trains or writes a checkpoint; in the end the weights are those of a training that nobody killed."""
    target = predictable_target()
    rows = written_rows(target)

    def train(out: Path) -> Any:
        draft = tiny_draft(target, ttt_steps=2)
        settings: dict[str, Any] = {"max_steps": 30, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
        trainer_of(draft, target, out, rows, **settings).train(resume_from_checkpoint=True)
        return draft.state_dict()

    killed, resumed = tmp_path / "killed", 0
    for _ in kill_at_random(lambda: train(killed), kills, 12.0):
        newest = latest_complete(killed)
        resumed += newest is not None
        if newest is not None and newest.name == "checkpoint-30":  # done: begin anew
            shutil.rmtree(killed)
    assert resumed, "every kill came before the first checkpoint"
    torch.testing.assert_close(train(killed), train(tmp_path / "whole"), rtol=1e-5, atol=1e-6)
