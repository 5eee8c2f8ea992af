"""Drafts in other projects' formats: what is imported computes what it computed there, and what cannot be is refused."""

import json
import os
import pickle
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_golden_dflash
import test_golden_eagle3
import test_golden_peagle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_vllm import IN_VLLM, RunningVLLM, running_vllm
from recorded import CONFIG, GOLDEN
from safetensors.torch import load_file, save_file
from tiny import tiny_draft, tiny_model
from torch import Tensor
from torch.testing import assert_close
from transformers import DeepseekV3Config, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from foredraft import ForedraftError, FormatBase, GroupedQueryDraft, Registry, auto_draft, default_registry, hookimpl, save_draft
from foredraft.cli import main
from foredraft.contracts.finding import Finding, warning
from foredraft.doctor import examine
from foredraft.files.ours import WEIGHTS
from foredraft.files.reading import read_config
from foredraft.formats import Imported, export_draft, import_draft, open_draft
from foredraft.formats.fields import DraftFields

MODEL: LlamaForCausalLM = tiny_model(CONFIG)  # type: ignore[assignment]
LAYERS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "vocab_size": 256,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
FOUR = {**LAYERS, "rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "float32"}
"""As transformers 4 wrote it."""
FIVE = {**LAYERS, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "dtype": "float32"}
AUX = [1, 3, 6]
"""Layer outputs counted from 0; hidden_states indices are one more."""


def speculators(kind: str, layers: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A config as speculators 0.9 writes it."""
    return {
        "architectures": ["DraftModel"],
        "auto_map": {"": "config.SpeculatorConfig"},
        "dtype": "float32",
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
        **fields,
    }


EAGLE_IDS = {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in AUX]}
NOT_OURS = {"norm_before_fc": False, "norm_before_residual": False}
QWEN = {**FIVE, "model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "use_sliding_window": False}
Z_LAB = {**FOUR, **QWEN, "architectures": ["DFlashDraftModel"], "block_size": 4, "num_target_layers": 8}
PEERS: dict[str, dict[str, Any]] = {
    "nemo_eagle3": {**FIVE, "draft_vocab_size": 128, "num_aux_hidden_states": 3, "fc_norm": False, "norm_output": False},
    "nemo_eagle31": {**FIVE, "draft_vocab_size": 128, "num_aux_hidden_states": 3, "fc_norm": True, "norm_output": True},
    "specforge_eagle3": {**FOUR, "draft_vocab_size": 128, "pretraining_tp": 1, "eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX}},
    "specforge_eagle3_fcnorm": {**FOUR, "draft_vocab_size": 128, "fc_norm": True, "norm_output": True},
    "speculators_eagle3": speculators(
        "eagle3", FIVE, draft_vocab_size=128, fc_norm=False, norm_output=False, embed_requires_grad=False, **NOT_OURS, **EAGLE_IDS
    ),
    "speculators_eagle31": speculators("eagle3", FIVE, draft_vocab_size=128, fc_norm=True, norm_output=True, **NOT_OURS, **EAGLE_IDS),
    "nemo_peagle": {**FIVE, "draft_vocab_size": 128, "parallel_drafting": True, "mask_token_id": 255, "num_depths": 4},
    "specforge_peagle": {**FOUR, "architectures": ["PEagleDraftModel"], "draft_vocab_size": 128, "mask_token_id": 255},
    "speculators_peagle": speculators("peagle", FIVE, draft_vocab_size=128, mask_token_id=255, norm_output=False, **EAGLE_IDS),
    "nemo_dflash": {**Z_LAB, "dflash_config": {"mask_token_id": 255, "target_layer_ids": AUX}},
    "specforge_dflash": {**Z_LAB, "dflash_config": {"mask_token_id": 255, "target_layer_ids": AUX}},
    "speculators_dflash": speculators(
        "dflash",
        QWEN,
        draft_vocab_size=256,
        block_size=4,
        mask_token_id=255,
        sample_from_anchor=False,
        sliding_window_non_causal=False,
        aux_hidden_state_layer_ids=[i + 1 for i in AUX],
    ),
}
"""The config that goes with each of the golden files' weights, as its framework writes it."""


load_once = cache(load_file)


def golden(name: str) -> dict[str, Tensor]:
    """The tensors of a golden file that the peer's checkpoint would hold, under the peer's names."""
    tensors = load_once(GOLDEN / f"{name}.safetensors")
    return {n.removeprefix("weights."): t for n, t in tensors.items() if n.startswith("weights.")}


def write(folder: Path, config: Any, tensors: dict[str, Tensor] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    MODEL.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def peer(tmp_path: Path, target: str) -> Callable[..., Imported]:
    """Import a checkpoint made of a golden one, with other fields (None: without) and other tensors."""

    def run(name: str, tensors: dict[str, Tensor | None] | None = None, **fields: Any) -> Imported:
        kept = {n: t for n, t in {**golden(name), **(tensors or {})}.items() if t is not None}
        config = {n: v for n, v in {**PEERS[name], **fields}.items() if v is not None}
        if name == "speculators_dflash":  # its training holds the target's embedding and head, its files do not
            kept = {n: t for n, t in kept.items() if n in (tensors or {}) or not n.startswith(("embed_tokens.", "lm_head."))}
        return import_draft(write(tmp_path / "theirs", config, kept), tmp_path / "ours", target)

    return run


class TestGolden:
    """What was recorded in the peers' own frameworks."""

    @pytest.mark.parametrize("name", test_golden_eagle3.FILES)
    def test_eagle3(self, name: str, peer: Callable[..., Imported]) -> None:
        there = test_golden_eagle3.Golden(name, *test_golden_eagle3.FILES[name])
        there.draft = auto_draft(peer(name).path, ttt_steps=3)
        for step in range(3):
            slots, logits = there.slots(step), there.draft.compute_logits(there.states[step])
            assert_close(logits.flatten(0, 1)[slots], there.tensors[f"step{step}.logits"].flatten(0, 1)[slots], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("name", ["nemo", "specforge", "speculators"])
    def test_peagle(self, name: str, peer: Callable[..., Imported]) -> None:
        there = test_golden_peagle.Golden(name)
        there.draft = auto_draft(peer(f"{name}_peagle").path, num_depths=4)
        logits_NW = torch.cat([logits.flatten(0, -2) for logits in there.recorded("logits")])
        for states_ND, theirs in zip(there.states, there.theirs, strict=True):
            assert_close(there.draft.compute_logits(states_ND), logits_NW[theirs], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("name", ["nemo", "specforge", "speculators"])
    def test_dflash(self, name: str, peer: Callable[..., Imported]) -> None:
        there = test_golden_dflash.Golden(name)
        draft = auto_draft(peer(f"{name}_dflash").path)
        head = {"lm_head.weight": there.tensors["inputs.target_head"]}
        draft.load_state_dict(head | (there.ours("weights_frozen") or golden("speculators_dflash")), strict=False)  # their target's own
        draft.complete = True
        there.draft = draft
        theirs = there.tensors["logits"].unflatten(0, (1, -1) if name == "speculators" else (-1,))[:, :, 1:]
        assert_close(draft.compute_logits(there.states), theirs.flatten(0, 2), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("name", PEERS)
    def test_every_tensor(self, name: str, peer: Callable[..., Imported]) -> None:
        ours = load_file(peer(name).path / WEIGHTS)
        theirs = {n.removeprefix("model.").replace("midlayer.", "layers.0."): t for n, t in golden(name).items()}
        assert {"fc.weight", "layers.0.mlp.up_proj.weight"} <= ours.keys() <= theirs.keys()
        assert not [n for n, t in ours.items() if not torch.equal(t, theirs[n])]


class TestConventions:
    @pytest.mark.parametrize("name", ["specforge_eagle3", "speculators_eagle3", "speculators_peagle", "nemo_dflash", "speculators_dflash"])
    def test_aux_layers(self, name: str, peer: Callable[..., Imported]) -> None:
        assert auto_draft(peer(name).path).config.aux_layers == tuple(i + 1 for i in AUX)

    @pytest.mark.parametrize("name", ["nemo_eagle3", "specforge_eagle3_fcnorm"])
    def test_aux_layers_left_out(self, name: str, peer: Callable[..., Imported]) -> None:
        done = peer(name)
        assert auto_draft(done.path).config.aux_layers == (2, 4, 5)
        assert "names no aux layers" in done.notes[0] + done.notes[-1]

    def test_aux_layers_at_the_top_level(self, peer: Callable[..., Imported]) -> None:
        done = peer("nemo_dflash", dflash_config={"mask_token_id": 255}, target_layer_ids=[0, 2, 5])
        assert auto_draft(done.path).config.aux_layers == (1, 3, 6)

    def test_norm_output_of_specforge(self, peer: Callable[..., Imported]) -> None:
        done = peer("specforge_eagle3_fcnorm")
        assert not auto_draft(done.path).config.norm_output
        assert any("norm before the head" in note for note in done.notes)

    def test_speculators_norm_the_residual_unless_they_say_no(self, peer: Callable[..., Imported]) -> None:
        assert auto_draft(peer("speculators_eagle3", norm_before_residual=None).path).config.norm_before_residual

    def test_d2t_of_ids(self, peer: Callable[..., Imported]) -> None:
        theirs = golden("specforge_eagle3")
        done = peer("specforge_eagle3", {"d2t": theirs["d2t"] + torch.arange(128)})
        assert torch.equal(load_file(done.path / WEIGHTS)["d2t"], theirs["d2t"])
        assert any("turned into offsets" in note for note in done.notes)

    def test_d2t_as_int32_and_t2d_left_out(self, peer: Callable[..., Imported]) -> None:
        theirs = golden("specforge_eagle3")
        ours = load_file(peer("specforge_eagle3", {"d2t": theirs["d2t"].int(), "t2d": None}).path / WEIGHTS)
        assert torch.equal(ours["d2t"], theirs["d2t"])
        assert torch.equal(ours["t2d"], theirs["t2d"])

    def test_d2t_left_out(self, peer: Callable[..., Imported]) -> None:
        done = peer("specforge_eagle3", {"d2t": None})
        assert torch.equal(load_file(done.path / WEIGHTS)["d2t"], golden("specforge_eagle3")["d2t"])

    def test_embedding_and_head_left_out(self, peer: Callable[..., Imported]) -> None:
        """SpecForge writes no embedding; a head is left out by some."""
        done = peer("specforge_eagle3", {"embed_tokens.weight": None, "lm_head.weight": None})
        draft = auto_draft(done.path)
        assert torch.equal(draft.embed_tokens.weight, MODEL.model.embed_tokens.weight)
        assert torch.equal(draft.lm_head.weight, MODEL.lm_head.weight[draft.draft_ids])
        assert [n for n in done.notes if "taken from" in n]

    def test_head_of_the_target_in_the_file(self, peer: Callable[..., Imported]) -> None:
        own = {"lm_head.weight": MODEL.lm_head.weight.detach(), "embed_tokens.weight": MODEL.model.embed_tokens.weight.detach()}
        done = peer("speculators_dflash", own)
        assert not {"lm_head.weight", "embed_tokens.weight"} & load_file(done.path / WEIGHTS).keys()
        assert len([n for n in done.notes if "left out" in n]) == 2

    @pytest.mark.parametrize("shape", [(192,), (1, 192), (1, 1, 192)])
    def test_shapes_of_mask_hidden(self, shape: tuple[int, ...], peer: Callable[..., Imported]) -> None:
        theirs = golden("nemo_peagle")["mask_hidden"]
        ours = load_file(peer("nemo_peagle", {"mask_hidden": theirs.view(shape)}).path / WEIGHTS)
        assert torch.equal(ours["mask_hidden"], theirs)

    @pytest.mark.parametrize("name", ["mask_token_id", "pard_token", "ptd_token_id"])
    def test_names_of_the_mask_token(self, name: str, peer: Callable[..., Imported]) -> None:
        done = peer("specforge_peagle", **{"mask_token_id": None, name: 7})
        assert auto_draft(done.path).config.mask_token_id == 7

    def test_rope_of_transformers_4(self, peer: Callable[..., Imported]) -> None:
        scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        config = auto_draft(peer("specforge_eagle3", rope_theta=5e5, rope_scaling=scaling).path).config
        del scaling["type"]
        assert config.rope_parameters == {**scaling, "rope_type": "llama3", "rope_theta": 5e5}

    def test_the_draft_s_own_settings(self, peer: Callable[..., Imported]) -> None:
        """Not the target's."""
        own = {"rms_norm_eps": 1e-3, "max_position_embeddings": 2048}
        assert own.items() <= read_config(peer("specforge_eagle3", **own).path).items()

    def test_the_target_s_layer_count(self, peer: Callable[..., Imported]) -> None:
        done = peer("specforge_eagle3", num_hidden_layers=8)
        assert auto_draft(done.path).config.num_hidden_layers == 1
        assert any("says 8 layers, the file holds 1" in note for note in done.notes)

    def test_layers_above_the_first(self, peer: Callable[..., Imported]) -> None:
        """Some files hold their norm twice."""
        second = second_layer()
        draft = auto_draft(peer("specforge_peagle", second, num_hidden_layers=2).path)
        assert torch.equal(draft.layers[1].input_layernorm.weight, second["layers.1.hidden_norm.weight"])

    def test_layers_above_the_first_with_two_norms(self, peer: Callable[..., Imported]) -> None:
        """Nothing tells which counts."""
        with pytest.raises(ForedraftError, match="one norm, whose value is not clear"):
            peer("specforge_peagle", {**second_layer(), "layers.1.hidden_norm.weight": torch.ones(64)}, num_hidden_layers=2)

    def test_half_precision(self, peer: Callable[..., Imported]) -> None:
        theirs = {n: t.bfloat16() for n, t in golden("nemo_eagle3").items() if t.is_floating_point()}
        draft = auto_draft(peer("nemo_eagle3", theirs).path)
        assert draft.dtype == torch.bfloat16
        assert torch.equal(draft.fc.weight, theirs["model.fc.weight"])

    def test_mixed_precision(self, peer: Callable[..., Imported]) -> None:
        """The widest holds all of it."""
        theirs = golden("nemo_eagle3")["model.fc.weight"].bfloat16()
        draft = auto_draft(peer("nemo_eagle3", {"model.fc.weight": theirs}).path)
        assert draft.dtype == torch.float32
        assert torch.equal(draft.fc.weight, theirs.float())

    def test_target_of_another_family(self, peer: Callable[..., Imported], tmp_path: Path, target: str) -> None:
        """The draft is Llama-shaped whatever the target is."""
        config = DeepseekV3Config(
            vocab_size=256, hidden_size=64, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4
        )
        config.save_pretrained(tmp_path / "deepseek")
        theirs = write(tmp_path / "theirs", PEERS["specforge_eagle3"], golden("specforge_eagle3"))
        import_draft(theirs, tmp_path / "ours", str(tmp_path / "deepseek"))
        assert auto_draft(tmp_path / "ours").config.foredraft["adapter"] == "llama"


def second_layer() -> dict[str, Tensor]:
    """A layer above the first: its attention reads one state, and its norm has two names."""
    theirs = golden("specforge_peagle")
    second = {n.replace("layers.0.", "layers.1."): t.clone() for n, t in theirs.items() if n.startswith("layers.0.")}
    for name in "qkv":
        second[f"layers.1.self_attn.{name}_proj.weight"] = theirs[f"layers.0.self_attn.{name}_proj.weight"][:, :64].contiguous()
    second["layers.1.hidden_norm.weight"] = second["layers.1.input_layernorm.weight"].clone()
    return second


class TestRefused:
    """All that is wrong is a `ForedraftError`, and nothing is written."""

    @pytest.fixture(autouse=True)
    def nothing_written(self, tmp_path: Path) -> Any:
        yield
        assert not (tmp_path / "ours").exists()
        assert not list(tmp_path.glob(".ours*"))

    @pytest.mark.parametrize(
        ("name", "fields", "message"),
        [
            ("speculators_eagle3", {"speculators_model_type": "mtp"}, "'mtp': foredraft reads dflash, dflash2, dspark, peagle, eagle3"),
            ("speculators_eagle3", {"speculators_model_type": ["eagle3"]}, "foredraft reads"),
            ("speculators_eagle3", {"speculators_model_type": "peagle"}, "but the tensors are those of eagle3"),
            ("speculators_eagle3", {"transformer_layer_config": None}, "needs the object transformer_layer_config"),
            ("speculators_eagle3", {"norm_before_fc": True}, "norm_before_fc: one norm over all aux states"),
            ("speculators_dflash", {"sample_from_anchor": True}, "sample_from_anchor"),
            ("nemo_dflash", {"is_causal": True}, "is_causal"),
            ("nemo_dflash", {"dflash_config": {"causal": True, "use_swa": True}}, "(?s)causal: the slots.*use_swa"),
            ("nemo_dflash", {"layer_types": ["sliding_attention", "full_attention"]}, "sliding window"),
            ("nemo_eagle3", {"use_sliding_window": True, "sliding_window": 64}, "sliding window"),
            ("nemo_eagle3", {"logit_scale": 0.5}, "logit_scale=0.5"),
            ("nemo_eagle3", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
            ("nemo_eagle3", {"num_attention_heads": None}, "names no num_attention_heads"),
            ("nemo_eagle3", {"num_attention_heads": 4}, "4 heads of 32"),
            ("nemo_eagle3", {"num_key_value_heads": 2}, r"k_proj.weight \(32, 128\), \(64, 128\)"),
            ("nemo_eagle3", {"num_attention_heads": "2"}, "num_attention_heads='2'"),
            ("nemo_eagle3", {"draft_vocab_size": 100}, r"lm_head.weight \(128, 64\), \(100, 64\)"),
            ("nemo_eagle3", {"draft_vocab_size": 10**15}, "draft_vocab_size"),
            ("nemo_eagle3", {"fc_norm": True}, r"missing: fc_norm\.0\.weight"),
            ("nemo_eagle31", {"fc_norm": False}, r"unexpected: fc_norm\.0\.weight"),
            ("nemo_eagle3", {"attention_bias": True}, r"missing: .*k_proj\.bias"),
            ("nemo_eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 4]}, "2 layers, but num_aux=3"),
            ("nemo_eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "lie outside 1..7"),
            ("nemo_eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1"),
            ("nemo_eagle3", {"use_aux_hidden_state": False}, "EAGLE-1"),
            ("nemo_eagle3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
            ("nemo_eagle3", {"rope_parameters": {"rope_type": "linear"}}, "needs factor"),
            ("nemo_eagle3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "the whole head"),
            ("nemo_eagle3", {"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section"),
            ("nemo_eagle3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "switch"),
            (
                "nemo_eagle3",
                {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
                "has 1 factors",
            ),
            ("specforge_peagle", {"mask_token_id": 256}, "no token of the target"),
            ("specforge_peagle", {"mask_token_id": None}, "names no mask_token_id"),
            ("specforge_peagle", {"pard_token": 7}, "mask token twice"),
            ("nemo_dflash", {"block_size": None}, "names no block_size"),
            ("speculators_dflash", {"draft_vocab_size": 64}, "uses its target's own head"),
            ("specforge_eagle3", {"eagle_aux_hidden_state_layer_ids": AUX}, r"not alike.*\(1, 3, 6\).*\(2, 4, 7\)"),
            ("specforge_eagle3", {"norm_output": False}, "before the norm"),
            ("speculators_peagle", {"norm_before_residual": True}, "its first layer adds to the normed state, ours of peagle"),
        ],
    )
    def test_config(self, name: str, fields: dict[str, Any], message: str, peer: Callable[..., Imported]) -> None:
        with pytest.raises(ForedraftError, match=message):
            peer(name, **fields)

    @pytest.mark.parametrize(
        ("name", "tensors", "message"),
        [
            ("nemo_eagle3", {"model.fc.weight": None}, "as nemo writes them, but not a draft's"),
            ("nemo_eagle3", {"fc.weight": torch.zeros(64, 192)}, "two formats in one checkpoint: fc.weight and model.fc.weight"),
            ("nemo_eagle3", {"midlayer.fc.weight": torch.zeros(2)}, "two formats claim this checkpoint: nemo .* and safeailab"),
            ("nemo_eagle3", {"model.fc.weight": torch.zeros(64, 100)}, "fc reads 100 features, no multiple of the 64"),
            ("nemo_eagle3", {"model.fc.weight": torch.zeros(64)}, "needed with 2 dimensions"),
            ("nemo_eagle3", {"model.norm.weight": None}, "missing: norm.weight"),
            ("nemo_eagle3", {"model.norm.weight": torch.full((64,), torch.nan)}, "not finite"),
            ("nemo_eagle3", {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, "dtype int8"),
            ("nemo_eagle3", {"model.embed_tokens.weight": torch.zeros(300, 64)}, "mis-shaped .* embed_tokens"),
            ("nemo_peagle", {"mask_hidden": torch.zeros(3)}, r"mask_hidden \(3,\), \(1, 1, 192\)"),
            ("speculators_peagle", {"mask_hidden": None}, "but the tensors are those of eagle3"),
            ("nemo_dflash", {"markov_head.markov_w1.weight": torch.zeros(256, 4)}, "unexpected: markov_head"),
            ("nemo_dflash", {"layers.0.self_attn.q_norm.weight": None}, "missing: layers.0.self_attn.q_norm"),
            ("nemo_eagle3", {"model.layers.99999999999999999999.x": torch.zeros(1)}, "unexpected"),
            ("nemo_eagle3", {f"model.layers.{i}.x": torch.zeros(1) for i in range(1000)}, "1000 layers: no draft has so many"),
            ("speculators_dflash", {"lm_head.weight": torch.randn(256, 64)}, "uses the target's own"),
            ("specforge_eagle3", {"d2t": None, "t2d": None}, "neither d2t nor a t2d"),
            ("specforge_eagle3", {"d2t": torch.zeros(128, dtype=torch.long)}, "nor with the 128 tokens of t2d"),
            ("specforge_eagle3", {"d2t": torch.full((128,), 2**62), "t2d": None}, "fits neither"),
            ("specforge_eagle3", {"d2t": torch.zeros(12, dtype=torch.long)}, "has 12 entries, expected 128"),
            ("specforge_eagle3", {"d2t": torch.zeros(128)}, "torch.float32"),
            ("specforge_eagle3", {"t2d": torch.zeros(8, dtype=torch.bool)}, "has 8 entries, expected 256"),
        ],
    )
    def test_tensors(self, name: str, tensors: dict[str, Any], message: str, peer: Callable[..., Imported]) -> None:
        with pytest.raises(ForedraftError, match=message):
            peer(name, tensors)

    def test_what_nobody_wrote(self, tmp_path: Path, target: str) -> None:
        """A model of another kind, and no draft at all."""
        for name, message in (("model.w", r"nemo writes them, but.*eagle3: fc\.weight, "), ("w", "no draft in a format.*midlayer")):
            theirs = write(tmp_path / name, {"model_type": "llama"}, {name: torch.zeros(64, 128), "layers.0.x": torch.zeros(1)})
            with pytest.raises(ForedraftError, match=rf"(?s){message}.*seen: tensors .*layers\.0\.x.*model_type"):
                import_draft(theirs, tmp_path / "ours", target)

    def test_ours(self, tmp_path: Path, target: str) -> None:
        save_draft(tiny_draft(MODEL), tmp_path / "draft")
        with pytest.raises(ForedraftError, match="foredraft's already"):
            import_draft(tmp_path / "draft", tmp_path / "ours", target)

    def test_target(self, tmp_path: Path) -> None:
        theirs = write(tmp_path / "theirs", PEERS["nemo_eagle3"], golden("nemo_eagle3"))
        other = write(tmp_path / "other", {**LAYERS, "num_hidden_layers": 8, "hidden_size": 80})
        for target, message in ((tmp_path / "none", "no target or draft at"), (other, r"no multiple of the 80 .* is it its draft\?")):
            with pytest.raises(ForedraftError, match=message):
                import_draft(theirs, tmp_path / "ours", str(target))

    def test_side_file(self, tmp_path: Path, target: str) -> None:
        theirs = write(tmp_path / "theirs", PEERS["nemo_dflash"], golden("nemo_dflash"))
        (theirs / "mask_embedding.pt").touch()
        with pytest.raises(ForedraftError, match="its mask token has an embedding of its own"):
            import_draft(theirs, tmp_path / "ours", target)

    @pytest.mark.parametrize("content", ["", "[]", "{", '"text"', '{"a": ' * 100_000, "\x00", '{"n": ' + "9" * 5000 + "}"])
    def test_no_json(self, content: str, tmp_path: Path, target: str) -> None:
        theirs = write(tmp_path / "theirs", {}, golden("nemo_eagle3"))
        (theirs / "config.json").write_text(content)
        with pytest.raises(ForedraftError, match=r"config\.json"):
            import_draft(theirs, tmp_path / "ours", target)

    @pytest.mark.parametrize("kept", [0, 5, 100, 20_000])
    def test_cut_off(self, kept: int, tmp_path: Path, target: str) -> None:
        theirs = write(tmp_path / "theirs", PEERS["nemo_eagle3"], golden("nemo_eagle3"))
        os.truncate(theirs / WEIGHTS, kept)
        with pytest.raises(ForedraftError, match="cut off"):
            import_draft(theirs, tmp_path / "ours", target)

    @pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "lost.safetensors", 3, None])
    def test_index_that_leads_elsewhere(self, file: Any, tmp_path: Path, target: str) -> None:
        write(tmp_path / "secret", {}, golden("nemo_eagle3"))
        (tmp_path / "secret" / WEIGHTS).rename(tmp_path / "secret.safetensors")
        theirs = write(tmp_path / "theirs", PEERS["nemo_eagle3"])
        (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(golden("nemo_eagle3"), file)}))
        with pytest.raises(ForedraftError, match="cannot be read"):
            import_draft(theirs, tmp_path / "ours", target)

    def test_pickle_with_code(self, tmp_path: Path, target: str) -> None:
        class Code:
            def __reduce__(self) -> Any:
                return os.mkdir, (str(tmp_path / "ran"),)

        theirs = write(tmp_path / "theirs", PEERS["nemo_eagle3"])
        for content in (pickle.dumps({"model.fc.weight": Code()}), b"", b"no pickle"):
            (theirs / "pytorch_model.bin").write_bytes(content)
            with pytest.raises(ForedraftError, match="cannot be read"):
                import_draft(theirs, tmp_path / "ours", target)
        torch.save({"model.fc.weight": Code()}, theirs / "pytorch_model.bin")
        with pytest.raises(ForedraftError, match="cannot be read"):
            import_draft(theirs, tmp_path / "ours", target)
        assert not (tmp_path / "ran").exists()

    def test_pickle_that_claims_terabytes(self, tmp_path: Path, target: str) -> None:
        theirs = write(tmp_path / "theirs", PEERS["nemo_eagle3"])
        torch.save({**golden("nemo_eagle3"), "model.norm.weight": torch.ones(1).expand(2**40)}, theirs / "pytorch_model.bin")
        with pytest.raises(ForedraftError, match=r"missing: norm\.weight"):
            import_draft(theirs, tmp_path / "ours", target)


def test_place_that_is_taken(tmp_path: Path, target: str) -> None:
    write(tmp_path / "theirs", PEERS["nemo_eagle3"], golden("nemo_eagle3"))
    save_draft(tiny_draft(MODEL), tmp_path / "draft")
    with pytest.raises(ForedraftError, match="there already"):
        import_draft(tmp_path / "theirs", tmp_path / "draft", target)
    with pytest.raises(ForedraftError, match="there already"):
        export_draft(tmp_path / "draft", tmp_path / "theirs", "speculators")


def test_sharded_and_pickled(tmp_path: Path, target: str, peer: Callable[..., Imported]) -> None:
    """The same tensors, however they lie on disk."""
    single = load_file(peer("nemo_eagle3").path / WEIGHTS)
    theirs, names = golden("nemo_eagle3"), sorted(golden("nemo_eagle3"))
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    sharded = write(tmp_path / "sharded", PEERS["nemo_eagle3"])
    for file, held in shards.items():
        save_file({n: theirs[n] for n in held}, sharded / file)
    index = {"weight_map": {n: file for file, held in shards.items() for n in held}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    pickled = write(tmp_path / "pickled", PEERS["nemo_eagle3"])
    torch.save(theirs, pickled / "pytorch_model.bin")
    for source in (sharded, pickled):
        ours = load_file(import_draft(source, tmp_path / f"ours-{source.name}", target).path / WEIGHTS)
        assert ours.keys() == single.keys()
        assert not [n for n, t in single.items() if not torch.equal(t, ours[n])]


DRAFTS: dict[str, dict[str, Any]] = {
    "eagle3": {"algorithm": "eagle3", "draft_vocab_size": 128},
    "eagle3_full": {"algorithm": "eagle3", "aux_layers": (1, 3, 4, 6), "num_aux": 4, "num_layers": 2},
    "eagle3_qwen": {"algorithm": "eagle3", "qk_norm": True, "draft_vocab_size": 128},
    "eagle31": {"algorithm": "eagle31", "draft_vocab_size": 128},
    "eagle3_residual": {"algorithm": "eagle3", "norm_before_residual": True, "draft_vocab_size": 128},
    "peagle": {"algorithm": "peagle", "num_layers": 2, "num_depths": 6, "mask_token_id": 9, "fc_norm": True, "draft_vocab_size": 128},
    "dflash": {"algorithm": "dflash", "num_layers": 2, "num_aux": 3, "block_size": 7, "mask_token_id": 9},
    "dspark": {"algorithm": "dspark", "num_layers": 2, "num_aux": 3, "block_size": 6, "mask_token_id": 9, "markov_rank": 5},
    "dflash2": {"algorithm": "dflash2", "num_aux": 1, "num_layers": 1, "conv_group_size": 8, "selector_top_k": 4, "mask_token_id": 9},
    "dspark_rnn": {"algorithm": "dspark", "num_aux": 1, "markov_head_type": "rnn", "sample_from_anchor": False, "mask_token_id": 9},
}


class TestSpeculators:
    """Written and read again."""

    @pytest.mark.parametrize("name", DRAFTS)
    def test_round_trip(self, name: str, tmp_path: Path, target: str) -> None:
        draft = auto_draft(CONFIG, **DRAFTS[name])
        if draft.config.has_reduced_vocabulary:
            draft.set_draft_vocabulary(torch.arange(128) * 2)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.add_(torch.randn_like(parameter) / 8)
        before = load_file(save_draft(draft, tmp_path / "before") / WEIGHTS)
        export_draft(tmp_path / "before", tmp_path / "exported", "speculators")
        done = import_draft(tmp_path / "exported", tmp_path / "after", target)
        after = load_file(done.path / WEIGHTS)
        assert before.keys() == after.keys()
        assert not [n for n, t in before.items() if not torch.equal(t, after[n]) or t.dtype != after[n].dtype]
        assert not done.notes
        first, second = auto_draft(tmp_path / "before"), auto_draft(done.path)
        told = {"foredraft", "transformers_version", "_name_or_path"}
        ours, again = ({k: v for k, v in d.config.to_dict().items() if k not in told} for d in (first, second))
        assert ours == again
        assert first.config.foredraft["target"]["fingerprint"] == second.config.foredraft["target"]["fingerprint"]
        options, again = (d.config.foredraft["options"] for d in (first, second))
        made = ("num_layers", "num_aux", "fc_norm", "norm_output", "qk_norm", "mask_token_id", "block_size", "num_depths")
        made += ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        made += ("markov_rank", "markov_head_type", "sample_from_anchor", "enable_confidence_head", "confidence_head_with_markov")
        assert {k: options.get(k) for k in made} == {k: again.get(k) for k in made}
        assert again.get("ttt_steps") in (None, 4)  # as many as are stated, not as many as would be trained by default
        aux_1SA = torch.randn(1, 5, 64 * len(draft.config.aux_layers))
        for draft in (first, second):
            if not draft.complete:
                draft.take_head(MODEL)
        one, two = (draft.compute_logits(draft.project_hidden_states(aux_1SA)) for draft in (first, second))
        assert torch.equal(one, two)

    @pytest.mark.parametrize(("name", "peer"), [("eagle3", "eagle3"), ("peagle", "peagle"), ("dflash", "dflash"), ("eagle31", "eagle3")])
    def test_fields_and_names(self, name: str, peer: str, tmp_path: Path) -> None:
        """Those of the peer's own files, but for what only its training reads."""
        save_draft(tiny_draft(MODEL, **DRAFTS[name]), tmp_path / "draft")
        export_draft(tmp_path / "draft", tmp_path / "exported", "speculators")
        config, tensors = read_config(tmp_path / "exported"), load_file(tmp_path / "exported" / WEIGHTS)
        theirs = PEERS[f"speculators_{peer}"]
        assert theirs.keys() - {"auto_map"} <= config.keys()
        assert config["speculators_model_type"] == peer
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == {"peagle": 6, "dflash": 6}.get(name, 4)
        assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
        assert (
            theirs["transformer_layer_config"].keys() - {"layer_types", "use_sliding_window", "dtype"}
            <= config["transformer_layer_config"].keys()
        )
        held = {n for n in golden(f"speculators_{name}") if not n.startswith("verifier_")}
        held -= {"embed_tokens.weight", "lm_head.weight"} if name == "dflash" else set()
        first = {n for n in tensors if not n.startswith(("layers.1.", "fc_norm."))}
        assert first == {n for n in held if not n.startswith(("layers.1.", "fc_norm."))}
        assert not any(n.endswith("hidden_norm.weight") for n in tensors if n.startswith("layers.1."))
        assert config.get("norm_before_residual") in (False, None)
        assert config.get("sliding_window_non_causal", True)  # vLLM takes false for causal attention in layers without a window, too
        assert config.get("norm_output", False) == (name == "eagle31")

    def test_width_of_fc(self, tmp_path: Path) -> None:
        """vLLM sizes fc by this field, which it looks for here only; it assumes three."""
        save_draft(auto_draft(CONFIG, **DRAFTS["eagle3_full"]), tmp_path / "draft")
        export_draft(tmp_path / "draft", tmp_path / "exported", "speculators")
        assert read_config(tmp_path / "exported")["transformer_layer_config"]["num_aux_hidden_states"] == 4

    def test_medusa(self, tmp_path: Path) -> None:
        save_draft(tiny_draft(MODEL, "medusa"), tmp_path / "draft")
        with pytest.raises(ForedraftError, match="no model for this draft, by algorithm 'medusa': it adds heads"):
            export_draft(tmp_path / "draft", tmp_path / "exported", "speculators")

    def test_latent_attention(self, tmp_path: Path) -> None:
        config = DeepseekV3Config(vocab_size=64, hidden_size=32, num_hidden_layers=8, num_attention_heads=2, n_routed_experts=4)
        save_draft(auto_draft(config), tmp_path / "draft")
        with pytest.raises(ForedraftError, match="it is a deepseek_v2 of 1 layers"):
            export_draft(tmp_path / "draft", tmp_path / "exported", "speculators")

    def test_tokens_beyond_the_block(self, tmp_path: Path) -> None:
        save_draft(tiny_draft(MODEL, **DRAFTS["dflash"]), tmp_path / "draft")
        with pytest.raises(ForedraftError, match="this draft makes 6 at once"):
            export_draft(tmp_path / "draft", tmp_path / "exported", "speculators", num_draft_tokens=7)

    def test_no_draft_of_ours(self, tmp_path: Path) -> None:
        write(tmp_path / "theirs", PEERS["nemo_eagle3"], golden("nemo_eagle3"))
        with pytest.raises(ForedraftError, match="no 'foredraft' entry"):
            export_draft(tmp_path / "theirs", tmp_path / "exported", "speculators")


class Backwards(FormatBase):
    """A third party's format: names backwards, beside a tensor that its training needs."""

    name, sign = "backwards", "the field backwards"

    def recognises(self, names: Collection[str], config: Mapping[str, Any]) -> bool:
        return "backwards" in config

    def rename(self, name: str) -> str | None:
        return None if name == "model.state" else name[::-1]

    def flatten(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return dict(config["backwards"])

    def notes(self, config: Mapping[str, Any]) -> list[str]:
        return ["read backwards"]

    def write(self, draft: Any, tensors: Mapping[str, Tensor], algorithm: str | None, num_tokens: int) -> Any:
        assert algorithm == "tilted"
        fields = {**draft.config.to_dict(), "k": num_tokens, "foredraft": None}
        return {"backwards": fields}, {"model.state": torch.ones(1), **{name[::-1]: tensor for name, tensor in tensors.items()}}


class Tilted(default_registry().algorithm("eagle3")):  # type: ignore[misc]
    """A third party's algorithm: EAGLE-3 with a tensor and an option of its own."""

    name, summary = "tilted", "tilted"
    told_by = frozenset({"fc.weight", "tilt"})

    class Options(default_registry().algorithm("eagle3").Options):  # type: ignore[misc]
        angle: int = 1

    @property
    def max_tokens(self) -> int:
        return self.options.angle

    @classmethod
    def findings(cls, draft: Any) -> list[Finding]:
        tilt = draft.tensors.get("tilt")
        wrong = tilt is not None and tilt.shape != (3,)
        return [warning("tilt", f"tilt has {tilt.shape[0]} numbers", "it falls", "use three")] if wrong else []

    def modules(self, config: Any) -> dict[str, Any]:
        return {"tilt": torch.nn.Parameter(torch.full((3,), 0.5))}

    def engine_fields(self, config: Any) -> dict[str, Any]:
        return {**super().engine_fields(config), "angle": self.options.angle}


class Gained(LlamaMLP):
    """A feed-forward with a tensor of its own."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.gain = torch.nn.Parameter(torch.ones(2))


class Tall(GroupedQueryDraft):
    """A third party's architecture."""

    name, summary, model_types, architecture, mlp_class = "tall", "tall", (), "TallForCausalLM", Gained


class TestThirdParty:
    """A format, an algorithm and an architecture that nothing here knows of."""

    @pytest.fixture
    def registry(self) -> Registry:
        return with_plugin(foredraft_formats=[Backwards], foredraft_algorithms=[Tilted], foredraft_adapters=[Tall])

    def test_round_trip(self, registry: Registry, tmp_path: Path, target: str) -> None:
        draft = auto_draft(CONFIG, "tilted", angle=3, norm_output=True, draft_vocab_size=128, registry=registry)
        save_draft(draft, tmp_path / "draft")
        export_draft(tmp_path / "draft", tmp_path / "theirs", "backwards", registry=registry)
        assert read_config(tmp_path / "theirs")["backwards"]["k"] == 3
        with pytest.raises(ForedraftError, match=r"(?s)names as nemo writes them, but.*seen: tensors .*thgiew\.cf"):
            import_draft(tmp_path / "theirs", tmp_path / "again", target)
        done = import_draft(tmp_path / "theirs", tmp_path / "again", target, registry)
        assert (done.form, done.algorithm, done.notes) == ("backwards", "tilted", ("read backwards",))
        ours, again = load_file(tmp_path / "draft" / WEIGHTS), load_file(done.path / WEIGHTS)
        assert ours.keys() == again.keys()
        assert not [name for name, tensor in ours.items() if not torch.equal(tensor, again[name])]
        options = auto_draft(done.path, registry=registry).config.foredraft["options"]
        assert (options["angle"], options["norm_output"]) == (3, True)
        opened = open_draft(tmp_path / "theirs", target, registry=registry)
        assert torch.equal(opened.tilt, draft.tilt)

    @pytest.mark.parametrize("theirs", [False, True])
    def test_examined(self, theirs: bool, registry: Registry, tmp_path: Path, target: str) -> None:
        """By the model that its config describes and by what its plugins say, in our format and in theirs."""
        draft = auto_draft(CONFIG, "tilted", adapter="tall", num_layers=2, registry=registry)
        draft.start_from(MODEL)
        path = save_draft(draft, tmp_path / "draft")
        if theirs:
            path = export_draft(path, tmp_path / "theirs", "backwards", registry=registry)
        assert not [f for f in examine(path, target, registry) if f.severity != "note"]
        sound = load_file(path / WEIGHTS)
        for name, tensor, expected in (
            ("tilt", torch.ones(5), "tilt"),
            ("fc.weight", torch.randn(60, 192), "tensors-shape"),
            ("layers.1.mlp.gain", torch.randn(3), "tensors-shape"),
            ("layers.0.mlp.gain", None, "tensors-missing"),
        ):
            state = {**sound, name[::-1] if theirs else name: tensor}
            save_file({n: t for n, t in state.items() if t is not None}, path / WEIGHTS)
            found = [f for f in examine(path, target, registry) if f.severity != "note"]
            assert {f.id for f in found} == {expected}, found

    def test_which_counts(self, tmp_path: Path, target: str) -> None:
        """A name of its own before the beginning of names; of two equals, and two algorithms that a file tells alike, neither."""
        twin = type("Twin", (Backwards,), {"name": "twin"})
        rival = type(
            "Rival", (default_registry().algorithm("medusa"),), {"name": "rival", "told_by": frozenset({"fc.weight", "norm.weight"})}
        )
        upright = type("Upright", (Backwards,), {"name": "upright", "rename": lambda self, name: name.removeprefix("model.")})
        theirs = write(tmp_path / "theirs", {"backwards": PEERS["nemo_eagle3"]}, golden("nemo_eagle3"))
        assert import_draft(theirs, tmp_path / "ours", target, with_plugin(foredraft_formats=[upright])).form == "upright"
        for plugin, message in (
            ({"foredraft_formats": [Backwards, twin]}, "two formats claim this checkpoint: backwards .* and twin "),
            ({"foredraft_formats": [upright], "foredraft_algorithms": [rival]}, "two algorithms made it, by its tensors: eagle3 and rival"),
        ):
            with pytest.raises(ForedraftError, match=message):
                import_draft(theirs, tmp_path / "none", target, with_plugin(**plugin))

    @pytest.mark.parametrize(("form", "advice"), [("nemo", ""), ("backward", "; did you mean 'backwards'?")])
    def test_one_that_cannot_be_written(self, form: str, advice: str, registry: Registry, tmp_path: Path) -> None:
        with pytest.raises(ForedraftError) as refused:
            export_draft(tmp_path, tmp_path / "out", form, registry=registry)
        known = "backwards, causal_lm, gguf, medusa, mtp, speculators"
        assert str(refused.value) == f"no format '{form}' can be written{advice} (known: {known})"


def with_plugin(**hooks: list[type]) -> Registry:
    """All that is installed, and a plugin with these hooks."""
    registry = Registry()
    registry.register(SimpleNamespace(__name__="theirs", **{name: hookimpl(lambda found=found: found) for name, found in hooks.items()}))
    return registry


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningVLLM]:
    with running_vllm(tmp_path_factory.mktemp("vllm")) as process:
        yield process


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=IN_VLLM) for name, options in DRAFTS.items() if options["algorithm"] not in ("dspark", "dflash2")]
)
def test_in_vllm(name: str, tmp_path: Path, target: str, vllm: RunningVLLM) -> None:
    """Real vLLM on the CPU, whose runner refuses blocks chosen in turn, drafts the same tokens from our directory and from its export."""
    options, drafts = {**DRAFTS[name]}, []
    if parallel := options["algorithm"] == "peagle":
        options["fc_norm"] = False  # vLLM 0.32 looks for it in its own format only
    draft = auto_draft(CONFIG, **options)
    draft.start_from(MODEL)
    save_draft(draft, tmp_path / "ours")
    export_draft(tmp_path / "ours", tmp_path / "exported", "speculators")
    for place in ("ours", "exported"):
        speculative = {"model": str(tmp_path / place), "num_speculative_tokens": 3, "parallel_drafting": parallel}
        speculative["method"] = "dflash" if options["algorithm"] == "dflash" else "eagle3"
        drafts.append(vllm(target, speculative, [[5, 6, 7, 8], [200, 3, 99]], 16, dtype="float32")["drafts"])
    assert drafts[0] == drafts[1]
    assert all(drafts[0])


TEXTS = st.text("aZ_.9 -/{é漢😀\x00\x1b\ud800", max_size=5)  # of all of Unicode, hypothesis makes tables for seconds
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**30), 10**30) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["factor", "rope_type", "target_layer_ids", "x"]), inner),
    max_leaves=6,
)
FIELDS = sorted(
    {name for peer in PEERS.values() for name in {**peer, **peer.get("transformer_layer_config", {})}} | set(DraftFields.model_fields)
)


@given(st.sampled_from(sorted(PEERS)), st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3), st.booleans())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_any_config(target: str, tmp_path_factory: pytest.TempPathFactory, name: str, fields: dict[str, Any], nested: bool) -> None:
    """Whatever the fields hold: a draft, or a `ForedraftError`."""
    folder, config = tmp_path_factory.mktemp("fuzz"), {**PEERS[name]}
    if nested and "transformer_layer_config" in config:
        config["transformer_layer_config"] = {**config["transformer_layer_config"], **fields}
    else:
        config |= fields
    tensors = {n: t for n, t in golden(name).items() if "dflash" not in name or not n.startswith(("embed_tokens.", "lm_head."))}
    with suppress(ForedraftError):
        done = import_draft(write(folder / "theirs", config, tensors), folder / "ours", target)
        assert auto_draft(done.path).fc.weight.shape == (64, 192)


def test_commands(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], peer: Callable[..., Imported]
) -> None:
    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["foredraft", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0)

    theirs = write(tmp_path / "specforge", PEERS["specforge_eagle3"], golden("specforge_eagle3"))
    assert run("import", theirs, tmp_path / "draft", "--target", target) == 0
    assert "a draft by eagle3, in the format safeailab" in capsys.readouterr().out
    assert run("export", tmp_path / "draft", tmp_path / "exported", "--format", "speculators", "-k", 3) == 0
    assert read_config(tmp_path / "exported")["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert run("import", tmp_path / "target", tmp_path / "other", "--target", target) == 1
    assert "error: " in capsys.readouterr().err
