"""On CUDA: all is where it is read, no training step waits for the device, and the numbers are the CPU's."""

import json
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from pretended import There, pretended
from rigged import predictable_target, trainer_of, written_rows
from tiny import TOKENS, chat, gradients, tiny_batch, tiny_draft, tiny_rows, tiny_signal, tiny_target, tiny_tokenizer
from torch import Tensor
from torch.testing import assert_close
from torch.utils._pytree import tree_map
from transformers import CONFIG_MAPPING

from foredraft import DraftCollator, Target, TreeShape, auto_draft, generate
from foredraft.decoding.families import tiny_model
from foredraft.decoding.tree import TreeDrafter
from foredraft.training.run import train
from foredraft.training.settings import RunConfig

STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"ttt_steps": 3, "num_layers": 2}),
    "reduced": ("eagle3", {"ttt_steps": 2, "draft_vocab_size": 30}),
    "longrope": ("eagle3", {"ttt_steps": 2}),
    "eagle31": ("eagle31", {"ttt_steps": 2}),
    "peagle": ("peagle", {"num_depths": 3, "num_layers": 2}),
    "dflash": ("dflash", {"block_size": 4, "num_layers": 2}),
    "dpace": ("dflash", {"block_size": 4, "num_layers": 2, "weighting": "dpace"}),
    "dflash2": ("dflash2", {"block_size": 4, "num_layers": 1}),
    "domino": ("domino", {"block_size": 4, "num_layers": 1}),
    "dspark": ("dspark", {"block_size": 4, "num_layers": 1}),
    "medusa": ("medusa", {"num_heads": 3}),
    "served": ("medusa", {"num_heads": 2, "served": True}),
    "mlp_speculator": ("mlp_speculator", {}),
    "eagle": ("eagle", {"ttt_steps": 2}),
    "mtp": ("mtp", {"head": "mimo"}),
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
FAMILIES = ("deepseek_v3", "gpt_oss", "gemma4_text", "qwen3_next", "nemotron_h", "deepseek_v4", "mamba2", "hy_v4")
TEXT = torch.tensor([[5, 6, 7, 5, 6]])


def rarely(value: Any, always: bool) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else [value]), marks=() if always else pytest.mark.slow)


def moved(device: str, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def test_what_is_pretended() -> None:
    """Values pass; two devices in one operation, and numpy, do not; waiting is counted."""
    with pretended(devices=2) as cuda:
        there, here = torch.arange(3.0, device="cuda"), torch.arange(3.0)
        assert isinstance(there, There)
        assert not isinstance(here, There)
        assert [str(x.device) for x in (there, there * 2, there.new_zeros(2), here.to(there), there.cpu())] == ["cuda:0"] * 4 + ["cpu"]
        assert there[torch.tensor([2])].device == there.device
        for other in (here, here.to("cuda:1")):
            with pytest.raises(RuntimeError, match="same device"):
                there + other
        with pytest.raises(TypeError, match="numpy"):
            np.asarray(there)
        cuda.waits = 0
        assert (there * torch.tensor(3.0)).sum().item() == 9
        assert there.tolist() == there.cpu().tolist()
        assert cuda.waits == 3


@pytest.mark.parametrize(
    ("step", "half"), [rarely((step, half), half or step in ("eagle3", "longrope")) for step in STEPS for half in (False, True)]
)
def test_a_step_is_the_cpus_and_waits_for_nothing(step: str, half: bool) -> None:
    algorithm, options = STEPS[step]
    rope = {"rope_parameters": LONGROPE} if step == "longrope" else {}
    model = tiny_target(hidden=64, **rope)  # heads of 16, the least that FlexAttention takes
    draft = tiny_draft(model, algorithm, **options).train()
    batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaaaaau", "uuaaauubbbbb"]]))
    torch.manual_seed(0)  # some add noise to states
    expected = draft(batch, tiny_signal(model, draft, batch))["loss"].detach()
    with pretended() as cuda:
        model, draft, batch = model.to("cuda"), draft.to("cuda"), tree_map(partial(moved, "cuda"), batch)
        signal = tiny_signal(model, draft, batch)
        cuda.waits = 0
        torch.manual_seed(0)
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            out = draft(batch, signal)
        out["loss"].backward()
        assert cuda.waits == 0
        assert all(isinstance(x, There) for x in (*out["metrics"].values(), *gradients(draft).values()))
        assert_close(out["loss"].detach().cpu(), expected, rtol=0.05 if half else 1e-6, atol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "deepseek_v3"])
def test_a_target_is_run_without_waiting(family: str) -> None:
    """By documents, which half precision is run by: windows, latent attention, experts. transformers' own masks wait for positions."""
    with pretended() as cuda:
        model = deepcopy(tiny_model(CONFIG_MAPPING[family])).to("cuda", torch.bfloat16)
        draft = auto_draft(model.config, "eagle3", ttt_steps=2)
        target = Target(model, draft.config.aux_layers)
        rows = tiny_rows([["uuaaaaaaaau", "uuaaauubbbbb"], ["uuaaau"]])
        batch = tree_map(partial(moved, "cuda"), DraftCollator(draft.algorithm)(rows))
        cuda.waits = 0
        signal = target.capture(batch)
        signal.head(signal.hidden_BST[0])
        assert cuda.waits == 0
        assert isinstance(signal.aux_BSA, There)


@pytest.mark.parametrize(
    "settings", [{"do_sample": False}, {"do_sample": True, "top_k": 1}, {"do_sample": False, "tree": TreeShape(depth=2)}]
)
@pytest.mark.parametrize("step", [rarely(step, step in ("eagle3", "dflash")) for step in STEPS if step not in ("reduced", "dpace")])
def test_decoding_gives_the_targets_own_text(step: str, settings: dict[str, Any]) -> None:
    model = tiny_target(eos_token_id=None)
    expected = model.generate(TEXT, max_new_tokens=8, do_sample=False)
    draft = tiny_draft(model, STEPS[step][0], **STEPS[step][1]).eval()
    if "tree" in settings and not isinstance(draft.algorithm.drafter(draft), TreeDrafter):
        pytest.skip("grows no trees")
    with pretended():
        found = generate(model.to("cuda"), draft.to("cuda"), TEXT.to("cuda"), max_new_tokens=8, **settings)
        assert isinstance(found, There)
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("family", [rarely(name, name == "qwen3_next") for name in FAMILIES])
def test_other_targets(family: str) -> None:
    """Latent attention, experts, sinks, windows, states that are kept and restored."""
    model = deepcopy(tiny_model(CONFIG_MAPPING[family]))
    draft = auto_draft(model.config, "eagle3", ttt_steps=2)
    draft.start_from(Target(model, draft.config.aux_layers))
    expected = generate(model, draft.eval(), TEXT, max_new_tokens=8, do_sample=False)
    with pretended():
        model, draft = model.to("cuda"), draft.to("cuda").train()
        batch = tree_map(partial(moved, "cuda"), tiny_batch(draft.algorithm, tiny_rows([["uuaaaaaaaau"]])))
        draft(batch, tiny_signal(model, draft, batch))["loss"].backward()
        found = generate(model, draft.eval(), TEXT.to("cuda"), max_new_tokens=8, do_sample=False)
        assert torch.equal(found.cpu(), expected)


def test_a_target_over_two_devices() -> None:
    """Its states come from either; the draft stays on its own."""
    model = tiny_target(eos_token_id=None)
    draft = tiny_draft(model, ttt_steps=2)
    expected = model.generate(TEXT, max_new_tokens=8, do_sample=False)
    with pretended(devices=2):
        first, second = "cuda:0", "cuda:1"
        layers = {f"model.layers.{i}": (first, second)[i // 4] for i in range(8)}
        places = {"model.embed_tokens": first, "model.rotary_emb": first, **layers, "model.norm": second, "lm_head": second}
        model = dispatch_model(model, places)
        draft = draft.to("cuda:1").train()
        batch = tree_map(partial(moved, "cuda:1"), tiny_batch(draft.algorithm, tiny_rows([["uuaaaaaaaau"]])))
        draft(batch, tiny_signal(model, draft, batch))["loss"].backward()
        found = generate(model, draft.eval(), TEXT.to("cuda:0"), max_new_tokens=8, do_sample=False)
        assert torch.equal(found.cpu(), expected)


def test_what_is_trained_is_padded_to_the_kernels_rows(tmp_path: Path) -> None:
    """In multiples of 128, so that kernels and compilers see few widths."""
    model = predictable_target()
    rows = written_rows(model)
    with pretended():
        trainer = trainer_of(tiny_draft(model, ttt_steps=2), model, tmp_path, rows, use_cpu=False)
        batch = trainer.data_collator(rows)
    assert batch["slots"].shape[1] == 128


@pytest.mark.parametrize("ways", [["online"], pytest.param(["online", "stored"], marks=pytest.mark.slow)], ids=len)
def test_a_run_from_data_to_draft(ways: list[str], tmp_path: Path) -> None:
    """Trained, evaluated, saved and resumed there, online and from stored states: the same losses."""
    tiny_target(vocab=TOKENS, eos_token_id=2).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    lines = [json.dumps({"messages": chat(f"question {i}", f"the answer is {i}")}) for i in range(8)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    settings = {"save_steps": 2, "save_strategy": "steps", "logging_steps": 1, "disable_tqdm": True, "dataloader_num_workers": 0}
    run = {
        "target": str(tmp_path / "target"),
        "options": {"ttt_steps": 2},
        "data": {"train": str(tmp_path / "chat.jsonl"), "held_out": 2, "max_length": 64},
        "training": {"per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 2, **settings},
    }
    losses = []
    with pretended():
        for way in ways:
            told = {**run, "output_dir": str(tmp_path / way), "hidden_states_cache": str(tmp_path / "states") if way == "stored" else None}
            for steps in (2, 4):
                train(RunConfig.model_validate({**told, "training": {**run["training"], "max_steps": steps}}))
            history = json.loads((tmp_path / way / "training.json").read_text())["history"]
            losses.append([(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry])
    assert all(len(found) == 4 and found == losses[0] for found in losses)
