"""Targets that transformers does not know by itself, or that are to be loaded in a way of their own: in every command."""

import json
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import yaml
from test_cli import Command
from tiny import TOKENS, tiny_batch, tiny_config, tiny_draft, tiny_rows, tiny_target, tiny_tokenizer
from torch.testing import assert_close
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from foredraft import DraftTrainer, DraftTrainingArguments, ForedraftError, Target, generate, registry, save_draft
from foredraft.contracts.loading import Loading
from foredraft.doctor import examine
from foredraft.target.loading import load_target, load_tokenizer
from foredraft.target.pairing import check_pair
from foredraft.target.sample import sample_of
from foredraft.training import CachedTarget

SOURCE = """
from transformers import LlamaConfig, LlamaForCausalLM


class NearConfig(LlamaConfig):
    model_type = "near"


class NearForCausalLM(LlamaForCausalLM):
    config_class = NearConfig
"""
"""A family of a third party's."""


class NearConfig(LlamaConfig):
    """The same, of a package that is installed."""

    model_type = "near"


class NearForCausalLM(LlamaForCausalLM):
    config_class = NearConfig


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A target of a model_type that transformers does not know, and data."""
    model = NearForCausalLM(NearConfig(**tiny_config(vocab=TOKENS, eos_token_id=2, pad_token_id=0).to_diff_dict() | {"model_type": "near"}))
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "the answer is here"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "why?"}) + "\n")
    training = {"max_steps": 1, "per_device_train_batch_size": 1, "use_cpu": True}
    run = {"target": str(tmp_path / "target"), "output_dir": str(tmp_path / "run"), "data": {"train": str(tmp_path / "chat.jsonl")}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**run, "training": training}))
    return tmp_path


def commands(work: Path) -> Iterator[tuple[object, ...]]:
    """Every command that takes a target."""
    target, draft, prompts = ("--target", work / "target"), ("--draft", work / "run" / "draft"), ("--prompts", work / "prompts.jsonl")
    yield "info", work / "target", "--algorithm", "medusa"  # soon counted
    yield "preview", work / "chat.jsonl", *target
    yield "train", work / "run.yaml"
    yield "eval", *target, *draft, *prompts, "--max-new-tokens", 4
    yield "generate", "why?", *target, *draft, "--max-new-tokens", 4
    yield "regenerate", work / "chat.jsonl", *target, "--out", work / "new.jsonl", "--max-new-tokens", 4, "--limit", 1
    yield "doctor", work / "run" / "draft", *target, *prompts


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("foredraft.doctor.dynamic.NEW_TOKENS", 8)
    yield Command(monkeypatch, capsys)
    forget()


def forget() -> None:
    """As in a fresh process: plugins are not loaded, and transformers knows its own model types."""
    registry.default_registry.cache_clear()
    CONFIG_MAPPING._extra_content.pop("near", None)
    for config in [c for c in MODEL_FOR_CAUSAL_LM_MAPPING._extra_content if c.model_type == "near"]:
        MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(config)


def test_targets_that_a_plugin_registers(command: Command, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> ModuleType:
        AutoConfig.register("near", NearConfig)
        AutoModelForCausalLM.register(NearConfig, NearForCausalLM)
        return ModuleType("near_family")

    point = SimpleNamespace(name="near", dist=SimpleNamespace(name="near-family"), load=load)
    installed = metadata.entry_points
    forget()
    assert "no target or draft" in command.fails("info", work / "target")
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: [*installed(group=group), point])
    for arguments in commands(work):
        forget()
        code, out, err = command(*arguments)
        assert code == 0, f"{arguments}: {out}{err}"
        assert "acceptance-unmeasured" not in out, arguments


def test_code_of_the_target_runs_where_it_is_trusted(command: Command, work: Path) -> None:
    (work / "target" / "far.py").write_text(SOURCE)
    fields = json.loads((work / "target" / "config.json").read_text())
    fields["auto_map"] = {"AutoConfig": "far.NearConfig", "AutoModelForCausalLM": "far.NearForCausalLM"}
    (work / "target" / "config.json").write_text(json.dumps(fields))
    for name, *arguments in commands(work):
        forget()
        if name not in ("preview", "doctor"):  # a tokenizer needs no code here, and doctor reads files
            assert "trust_remote_code" in command.fails(name, *arguments)
        forget()
        code, out, err = command(name, *arguments, "trust_remote_code=true" if name == "train" else "--trust-remote-code")
        assert code == 0, f"{name}: {out}{err}"
        assert "acceptance-unmeasured" not in out, name


class TestPlaced:
    """A target whose parts were put somewhere is left there; states and matrices are fetched."""

    PLACES: ClassVar[dict[str, dict[str, int | str]]] = {
        "whole": {"": "cpu"},
        "offloaded": {
            "model.layers": "disk",
            "model.embed_tokens": "cpu",
            "model.norm": "disk",
            "model.rotary_emb": "cpu",
            "lm_head": "disk",
        },
    }

    @pytest.mark.parametrize("place", [*PLACES, "quantised"])
    def test_everything_works_on_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
        tiny_target().save_pretrained(tmp_path)
        plain = load_target(str(tmp_path), "float32")
        placed = load_target(str(tmp_path), "float32", Loading(device_map=self.PLACES.get(place), attn_implementation="eager"))
        if place == "quantised":  # in name
            placed.hf_quantizer = True
        assert placed.lm_head.weight.is_meta is (place == "offloaded")
        assert (placed.config._attn_implementation, plain.config._attn_implementation) == ("eager", "sdpa")
        monkeypatch.setattr(placed, "to", lambda *_: pytest.fail("a target with a device map was moved"))
        drafts, batches = [], tiny_batch(tiny_draft(plain).algorithm, tiny_rows([["uuaaaauaaa"]]))
        targets = [CachedTarget(model, (2, 4, 5), tmp_path / "states" / str(n)) for n, model in enumerate((plain, placed))]
        for target in targets:
            target.fill(tiny_rows([["uuaaaauaaa"]]))
        for name in ("aux_BSA", "hidden_BST"):
            assert_close(*(getattr(t.capture(batches), name) for t in targets), rtol=1e-3, atol=1e-3, equal_nan=True)
        for n, model in enumerate((plain, placed)):
            drafts.append(tiny_draft(model, ttt_steps=2))
            run = DraftTrainingArguments(str(tmp_path / f"run{n}"), max_steps=1, use_cpu=True, save_strategy="no")
            DraftTrainer(drafts[-1], model, run, train_dataset=tiny_rows([["uuaaaauaaa"]])).train()
        assert_close(*(draft.state_dict() for draft in drafts), rtol=1e-3, atol=1e-3)
        if place != "offloaded":
            ids, settings = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
            assert generate(placed, drafts[-1].eval(), ids, **settings).tolist() == plain.generate(ids, **settings).tolist()

    @pytest.mark.gpu
    @pytest.mark.parametrize("where", [{"": 0}, {"model.layers.1": "cpu", "": 0}], ids=["whole", "a layer offloaded"])
    def test_on_another_device_than_the_batch(self, tmp_path: Path, where: dict[str, int | str]) -> None:
        tiny_target().save_pretrained(tmp_path)
        batch = tiny_batch(tiny_draft(tiny_target()).algorithm, tiny_rows([["uuaaaauaaa"]]))
        models = [load_target(str(tmp_path), "float32", Loading(device_map=m)) for m in (where, None)]
        signals = [Target(model, (2, 4, 5)).capture(batch) for model in models]
        for name in ("aux_BSA", "hidden_BST"):
            assert_close(getattr(signals[0], name), getattr(signals[1], name), rtol=1e-3, atol=1e-3)
        assert_close(*(s.head(s.hidden_BST[0]) for s in signals), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_layers_that_stay_on_disk(device: str, tmp_path: Path) -> None:
    """They are fetched where they are asked for. With several ranks the CPU has a number, which safetensors does not know."""
    model = tiny_target()
    model.save_pretrained(tmp_path)
    loaded = load_target(str(tmp_path), "float32", device=device, layers=False)
    assert {p.device.type for p in loaded.model.layers.parameters()} == {"meta"}
    assert sample_of(loaded) == sample_of(model)


def test_wrong_settings_are_told(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path)
    wrong: list[dict[str, Any]] = [{"device_map": "nowhere"}, {"attn_implementation": "magic"}, {"quantization": {"quant_method": "magic"}}]
    for loading in wrong:
        with pytest.raises(ForedraftError, match="could not be loaded"):
            load_target(str(tmp_path), "auto", Loading(**loading))
    with pytest.raises(ForedraftError, match="device_map and tp_plan both"):
        Loading(device_map="auto", tp_plan="auto")


@pytest.mark.parametrize("read", ["info", "train"])
def test_lora_adapters_are_named(command: Command, work: Path, tmp_path: Path, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without peft, which loads them."""
    monkeypatch.setattr("foredraft.target.loading.is_peft_available", lambda: False)
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"}))
    tiny_tokenizer().save_pretrained(lora)
    message = command.fails(*(("info", lora) if read == "info" else ("train", work / "run.yaml", f"target={lora}")))
    assert "it is a LoRA adapter for org/base, no model of its own: pip install peft, or merge them" in message


@pytest.mark.slow
def test_a_target_with_an_adapter(tmp_path: Path) -> None:
    """peft's, by its directory: a draft for it is no draft for its base, nor the other way round; it is one for the merged model."""
    peft = pytest.importorskip("peft")
    tiny_target(vocab=TOKENS).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    base = load_target(str(tmp_path / "base"), "float32")
    wrapped = peft.get_peft_model(
        load_target(str(tmp_path / "base"), "float32"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    wrapped.save_pretrained(tmp_path / "lora")
    adapted = load_target(str(tmp_path / "lora"), "float32")
    assert load_tokenizer(str(tmp_path / "lora")).vocab == tiny_tokenizer().vocab
    drafts = {}
    for name, model in {"base": base, "lora": adapted}.items():
        drafts[name] = tiny_draft(model, ttt_steps=2)
        run = DraftTrainingArguments(str(tmp_path / "run"), max_steps=1, use_cpu=True, save_strategy="no")
        DraftTrainer(drafts[name], model, run, train_dataset=tiny_rows([["uuaaaauaaa"]])).train()
        save_draft(drafts[name].eval(), tmp_path / f"{name} draft")
    ids, settings = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(generate(adapted, drafts["lora"], ids, **settings), adapted.generate(ids, **settings))
    merged = wrapped.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    for model, its in ((base, "base"), (adapted, "lora"), (merged, "lora")):
        for name, draft in drafts.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                check_pair(model, draft)
            assert any("one of the two is fine-tuned" in str(w.message) for w in caught) is (name != its)
    for where, its in (("base", "base"), ("lora", "lora"), ("merged", "lora")):
        for name in drafts:
            found = {f.id for f in examine(tmp_path / f"{name} draft", tmp_path / where)}
            assert ("target-finetuned" in found) is (name != its), (where, name, found)
