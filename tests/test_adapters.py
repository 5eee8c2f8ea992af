"""Adapters on tiny random targets of transformers: shapes, rotary parameters, where drafts start, and which targets are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_batch, tiny_config, tiny_draft, tiny_rows, tiny_target
from torch import nn
from torch.testing import assert_close
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    Ernie4_5Config,
    Gemma2Config,
    Gemma3Config,
    LlamaConfig,
    LongcatFlashConfig,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from foredraft import ForedraftError, GroupedQueryDraft, Target, auto_draft, default_registry, generate, save_draft
from foredraft.cli.describe import describe
from foredraft.decoding.compatibility import Verdict, _objection, as_markdown, examine, language_models, objection, try_out, verdict
from foredraft.decoding.families import tiny_model
from foredraft.draft.grouped_query import NAMES
from foredraft.target.capture import depth_of
from foredraft.target.pairing import describe_target
from foredraft.target.weights import norm_scale

TABLE = Path(__file__).parents[1] / "docs" / "targets.md"
LISTED = [
    pytest.param(a, t, marks=pytest.mark.slow if i else ())
    for a in ("llama", "phi3", "qwen3")
    for i, t in enumerate(default_registry().adapter(a).model_types)
]
"""The first model type of each adapter in every run, all of them among the slow tests."""
SLOW = {"opt", "falcon", "gemma2", "glm4", "mixtral", "longcat_flash"}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
    "rope_theta": 500.0,
}
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "intermediate_size": 64,
    "pad_token_id": 0,
}


class TestListed:
    @pytest.mark.parametrize(("adapter", "model_type"), LISTED)
    def test_trains_saves_loads_and_decodes(self, tmp_path: Path, adapter: str, model_type: str) -> None:
        model = tiny_model(CONFIG_MAPPING[model_type])
        draft = try_out(model, ttt_steps=3)
        assert draft.config.foredraft["adapter"] == adapter
        save_draft(draft, tmp_path / "draft")
        loaded = auto_draft(tmp_path / "draft")
        assert {**loaded.config.to_dict(), "_name_or_path": ""} == draft.config.to_dict()
        assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), draft.state_dict().values(), strict=True))
        ids = torch.tensor([[5, 9, 7, 5, 9, 7]])
        settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(generate(model, loaded, ids, **settings), model.generate(ids, **settings))

    @pytest.mark.parametrize("model_type", ["llama", "phi3", "qwen3", "gpt2"])
    def test_norms_on_queries_and_keys(self, tmp_path: Path, model_type: str) -> None:
        """Any of them writes a Qwen3-shaped draft then, and reads it."""
        draft = try_out(tiny_model(CONFIG_MAPPING[model_type]), ttt_steps=2, qk_norm=True)
        save_draft(draft, tmp_path / "draft")
        written = AutoConfig.from_pretrained(tmp_path / "draft")
        assert isinstance(written, Qwen3Config)
        assert written.architectures == ["Eagle3Qwen3ForCausalLM"]
        for again in (
            auto_draft(tmp_path / "draft"),
            auto_draft(written),
            auto_draft(json.loads((tmp_path / "draft/config.json").read_text())),
        ):
            assert again.layers[0].self_attn.q_norm.weight.shape == (8,)

    def test_plain_drafts_are_llamas(self, tmp_path: Path) -> None:
        save_draft(tiny_draft(tiny_model(Qwen3Config)), tmp_path / "draft")
        written = AutoConfig.from_pretrained(tmp_path / "draft")
        assert (written.model_type, written.architectures) == ("llama", ["LlamaForCausalLMEagle3"])


class TestShape:
    def test_a_config_without_head_dim(self) -> None:
        config = Qwen2Config(**SIZES, num_hidden_layers=8)
        assert getattr(config, "head_dim", None) is None
        assert auto_draft(config).config.head_dim == 8

    def test_a_head_dim_of_its_own(self) -> None:
        draft = auto_draft(Qwen3Config(**SIZES, num_hidden_layers=8, head_dim=24))
        assert draft.layers[0].self_attn.q_proj.weight.shape == (4 * 24, 2 * 32)

    def test_a_rope_that_no_engine_takes_for_its_target_s(self) -> None:
        """vLLM shares a rotary module among all that ask for the same, and makes ERNIE's one of pairs."""
        target = Ernie4_5Config(**SIZES, num_hidden_layers=8, head_dim=8)
        draft = auto_draft(target).config
        assert draft.foredraft["adapter"] == "ernie4_5"
        assert draft.max_position_embeddings == target.max_position_embeddings + 1

    def test_what_engines_cannot_run_is_left_out(self) -> None:
        config = auto_draft(Gemma2Config(**SIZES, num_hidden_layers=8, head_dim=8)).config
        assert (config.hidden_act, config.attention_bias) == ("silu", False)

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "default", "rope_theta": 77.0},
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0},
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 500.0,
            },
        ],
        ids=lambda rope: rope["rope_type"],
    )
    @pytest.mark.parametrize("qk_norm", [False, True])
    def test_both_spellings_of_rope(self, tmp_path: Path, rope: dict[str, Any], qk_norm: bool) -> None:
        """The draft's frequencies are the target's; a reader of either spelling alone gets them too."""
        model = tiny_target(rope_parameters=dict(rope))
        expected = model.model.rotary_emb
        draft = tiny_draft(model, qk_norm=qk_norm)
        save_draft(draft, tmp_path / "draft")
        fields = json.loads((tmp_path / "draft/config.json").read_text())
        for lacking in ((), ("rope_parameters",), ("rope_theta", "rope_scaling")):
            plain = CONFIG_MAPPING[fields["model_type"]](**{k: v for k, v in fields.items() if k not in lacking})
            found = LlamaRotaryEmbedding(plain)
            assert_close(found.inv_freq, expected.inv_freq)
            assert found.attention_scaling == expected.attention_scaling
        assert torch.equal(auto_draft(tmp_path / "draft").rotary_emb.inv_freq, expected.inv_freq)

    def test_longrope_does_not_switch(self) -> None:
        """A draft keeps the short texts' frequencies, whoever serves it and however long the text; magnitude included."""
        config = Phi3Config(
            **SIZES, num_hidden_layers=8, max_position_embeddings=256, original_max_position_embeddings=64, rope_parameters=LONG
        )
        target = AutoModelForCausalLM.from_config(config).model.rotary_emb
        config = auto_draft(config).config
        again = LlamaConfig(**{k: v for k, v in config.to_dict().items() if k != "rope_parameters"})
        assert again.original_max_position_embeddings == 64
        x = torch.zeros(1)
        for theirs in (LlamaRotaryEmbedding(config), LlamaRotaryEmbedding(again)):
            short = torch.arange(64)[None]
            for mine, other in zip(theirs(x, short), target(x, short), strict=True):
                assert_close(mine, other)
            long = torch.arange(80)[None]
            assert_close(theirs(x, long)[0][:, :64], theirs(x, short)[0])
            assert not torch.allclose(target(x, long)[0][:, :64], target(x, short)[0]), (
                "this target does not switch: the test shows nothing"
            )

    def test_partial_rotation(self) -> None:
        """The whole head turns: factors that are the target's alone have no meaning there."""
        rope = {**LONG, "short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0], "partial_rotary_factor": 0.5}
        config = Phi3Config(**SIZES, num_hidden_layers=8, rope_parameters=rope)
        assert auto_draft(config).config.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}

    @pytest.mark.parametrize("family", [Gemma3Config, Olmo3Config])
    def test_rotary_parameters_by_layer_type(self, family: Any) -> None:
        """Those of the full-attention layers."""
        rope = {
            "full_attention": {"rope_type": "default", "rope_theta": 7e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
        }
        fields = {**SIZES, "num_hidden_layers": 8, "rope_parameters": rope}
        config = family(text_config=fields) if family is Gemma3Config else family(**fields)
        if family is Olmo3Config:
            config.rope_parameters = rope
        assert auto_draft(config).config.rope_parameters == rope["full_attention"]


class TestStart:
    @pytest.mark.parametrize("norm", [LlamaRMSNorm(6), Gemma2RMSNorm(6), nn.LayerNorm(6)], ids=lambda n: type(n).__name__)
    def test_what_a_norm_does(self, norm: nn.Module) -> None:
        values = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, 1.0])
        for p in norm.parameters():
            p.data.copy_(values)
        assert torch.equal(norm_scale(norm), values + isinstance(norm, Gemma2RMSNorm))

    @torch.no_grad()
    def test_gemmas_norms(self) -> None:
        """They keep weights less one, and norm what their sublayers put out: a draft's norms do what their counterparts do."""
        model = AutoModelForCausalLM.from_config(Gemma2Config(**SIZES, num_hidden_layers=8, head_dim=8))
        for name, p in model.named_parameters():
            if "norm" in name:
                p.normal_()
        draft = auto_draft(model.config)
        draft.start_from(model)
        x, layer, last = torch.randn(3, 32), draft.layers[0], model.model.layers[-1]
        for mine, theirs in (
            (draft.norm, model.model.norm),
            (layer.hidden_norm, last.input_layernorm),
            (layer.post_attention_layernorm, last.pre_feedforward_layernorm),
        ):
            assert_close(mine(x), theirs(x))


class TestGeneric:
    @pytest.mark.parametrize(
        "model_type", [*("gpt2", "bloom", "gemma3", "gpt_oss"), *(pytest.param(t, marks=pytest.mark.slow) for t in sorted(SLOW))]
    )
    def test_works(self, model_type: str) -> None:
        """Lists of layers, norms and heads under other names, tied and capped heads, ALiBi, experts, sliding windows."""
        found = verdict(model_type)
        assert (found.adapter, found.problem, found.decoding) == ("generic", None, None)
        assert as_markdown([found]).splitlines()[-1] in TABLE.read_text().splitlines(), "write the table anew: foredraft targets --write"

    @pytest.mark.parametrize(
        ("model_type", "reason"),
        [
            ("bart", "it is an encoder with a decoder"),
            ("bert", "its logits depend on what follows: it is no causal decoder"),
            ("mllama", r"its embedding is \(72, 32\), not its vocabulary by its hidden size"),
            pytest.param("hrm_text", r".* has no list of the 64 decoder layers .* \(its longest holds 8: ", marks=pytest.mark.slow),
            ("git", r"no tiny model of its family can be built to look at: shrunk, it still has [\d,]+ parameters"),
        ],
    )
    def test_refused(self, model_type: str, reason: str) -> None:
        config = CONFIG_MAPPING[model_type]()
        with pytest.raises(ForedraftError, match=f"(?s)no adapter for targets of model_type.*adapter 'generic' cannot take it: {reason}"):
            auto_draft(config)
        assert verdict(model_type).problem == objection(config)

    def test_layers_that_a_config_counts_twice(self) -> None:
        config = LongcatFlashConfig(num_layers=7)
        assert config.num_hidden_layers == 14
        assert depth_of(config) == describe_target(config)["num_hidden_layers"] == 7
        assert GroupedQueryDraft.aux_layers(config, 3) == (2, 3, 4)

    def test_names_of_models_that_bring_their_own_code(self) -> None:
        """A config that spells everything its own way gives the draft that Llama's config gives; what it does not say is told."""
        fields = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-3}
        rope = {"rope_type": "linear", "factor": 2.0}
        plain = LlamaConfig(hidden_size=32, max_position_embeddings=99, rope_parameters={**rope, "rope_theta": 500.0}, **fields)
        fields |= {"max_position_embeddings": 99, "rope_theta": 500.0}
        for i in range(max(map(len, NAMES.values()))):
            shared = {name: getattr(plain, name) for name in ("initializer_range", "bos_token_id", "eos_token_id")}
            own = PretrainedConfig(hidden_size=32, rope_scaling={"type": "linear", "factor": 2.0}, **shared)
            for name, value in fields.items():
                setattr(own, NAMES[name][i % len(NAMES[name])], value)
            assert GroupedQueryDraft.shape(own) == GroupedQueryDraft.shape(plain)
            assert GroupedQueryDraft.assumed(own) == []
        groups = PretrainedConfig(hidden_size=32, n_head=4, num_key_value_groups=2)
        assert GroupedQueryDraft.shape(groups)["num_key_value_heads"] == 2
        assert GroupedQueryDraft.assumed(groups) == [
            f"{name}: the target's config names none" for name in ("rope_theta 10000", "intermediate_size 128", "rms_norm_eps 1e-06")
        ]
        for width, heads in ((768, 12), (96, 3)):  # of a target without attention
            none = PretrainedConfig(hidden_size=width)
            assert GroupedQueryDraft.shape(none)["num_attention_heads"] == GroupedQueryDraft.shape(none)["num_key_value_heads"] == heads
            assert f"num_attention_heads {heads}: the target's config names none" in GroupedQueryDraft.assumed(none)

    def test_a_family_whose_layers_lie(self) -> None:
        """What the hooks see must be what the model calls its hidden states."""
        model = tiny_target()
        examine(model)
        model.model.layers[3].register_forward_hook(lambda module, args, out: out + 1)
        model.model.layers[4].register_forward_pre_hook(lambda module, args: (args[0] - 1, *args[1:]))
        with pytest.raises(ForedraftError, match="what its layers put out is not what it calls its hidden states"):
            examine(model)

    def test_inside_a_multimodal_model(self) -> None:
        """The language model within is what is captured."""
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        }
        text = {**SIZES, "num_hidden_layers": 8, "head_dim": 8, "sliding_window": 8, "initializer_range": 0.3, "eos_token_id": None}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)).eval()
        assert type(model).__name__ == "Gemma3ForConditionalGeneration"
        draft = auto_draft(model.config, ttt_steps=2)
        draft.start_from(model)
        ids = torch.tensor([[5, 9, 7, 5, 9, 7]])
        settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(generate(model, draft, ids, **settings), model.generate(ids, **settings))


class TestTarget:
    @torch.no_grad()
    @pytest.mark.parametrize(
        ("model_type", "packs"), [("llama", True), ("gemma3_text", True), ("gpt2", True), ("bloom", False), ("mpt", False)]
    )
    def test_documents_do_not_see_each_other(self, model_type: str, packs: bool) -> None:
        """Whether a family tells them apart by positions or not."""
        model = tiny_model(CONFIG_MAPPING[model_type])
        draft = auto_draft(model.config)
        target = Target(model, draft.config.aux_layers)
        assert target._packs == packs
        batch = tiny_batch(draft.algorithm, tiny_rows([["uaaaa", "uuaaaaaaaa"], ["uuaaaa"]]))
        signal = target.capture(batch)
        for row, start, end in ((0, 0, 5), (0, 5, 15), (1, 0, 6)):
            alone = target.decoder(batch["input_ids"][row : row + 1, start:end], output_hidden_states=True)
            aux = torch.cat([alone.hidden_states[i] for i in target.aux_layers], dim=-1)
            assert_close(signal.aux_BSA[row : row + 1, start:end], aux, rtol=1e-4, atol=1e-4)
            assert_close(signal.hidden_BST[row : row + 1, start:end], alone.last_hidden_state, rtol=1e-4, atol=1e-4)

    @torch.no_grad()
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
    @pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "granite", "cohere", "phi", "nanochat", "vaultgemma"])
    def test_the_teacher_is_the_target(self, model_type: str, dtype: torch.dtype) -> None:
        """Norms that keep their weight less one, soft caps, scalings, heads with a bias: its word is the model's own logits."""
        config = tiny_model(CONFIG_MAPPING[model_type]).config
        special = {"final_logit_softcapping": 3.0, "logits_scaling": 4.0, "logit_scale": 0.25}
        fields = {**config.to_dict(), **{name: value for name, value in special.items() if hasattr(config, name)}}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**fields)).eval()
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                p.normal_()
        model.to(dtype)
        draft = auto_draft(model.config)
        batch = tiny_batch(draft.algorithm, tiny_rows([["uaaaaaa"]]))
        signal, theirs = Target(model, draft.config.aux_layers).capture(batch), model(batch["input_ids"]).logits
        room = max(1e-4, 2 * torch.finfo(dtype).eps)
        assert_close(signal.head(signal.hidden_BST), theirs.float(), rtol=room, atol=room * max(1.0, float(theirs.abs().max())))


class TestTold:
    @pytest.mark.usefixtures("uncounted")
    @pytest.mark.parametrize(
        ("config", "why"),
        [
            (tiny_config(), "llama: Llama-shaped drafts for Llama targets and their kin (its own model_type llama)"),
            (
                CONFIG_MAPPING["gpt2"](n_layer=8),
                "generic: .*no adapter lists model_type gpt2; a tiny model of the family passed the checks",
            ),
        ],
    )
    def test_which_adapter_and_why(self, tmp_path: Path, config: Any, why: str) -> None:
        config.save_pretrained(tmp_path)
        _objection.cache_clear()
        tiny_model.cache_clear()
        told = describe(str(tmp_path))
        found = told["adapter"]
        assert ("rope_theta 10000: the target's config names none" in told.get("assumed", "")) == (".*" in why)
        assert found == why or (".*" in why and all(part in found for part in why.split(".*")))

    def test_an_unknown_model_type(self) -> None:
        with pytest.raises(ForedraftError, match="transformers knows no model_type 'gpt3'; did you mean"):
            verdict("gpt3")

    def test_a_row_each(self) -> None:
        served = {"one": None, "two": "x | y"}
        found = [
            Verdict("a", "a", "llama", served=served),
            Verdict("b", "c", "generic", decoding="no", served=served),
            Verdict("d", "d", None, "z"),
        ]
        page = as_markdown(found)
        assert page.splitlines()[-5:] == [
            "| model_type | adapter | trains | decodes in transformers | served by one | served by two |",
            "| --- | --- | --- | --- | --- | --- |",
            "| a | llama | yes | yes | yes | x / y |",
            "| b (as c) | generic | yes | no | yes | x / y |",
            "| d |  | z |  |  |  |",
        ]
        assert "Of the 3 model types" in page
        assert "for 2: 1 by an adapter of their own" in page
        assert "1 of these decode with one; served are 2 by one, 0 by two" in page

    @pytest.mark.slow
    def test_the_table_is_up_to_date(self) -> None:
        assert as_markdown([verdict(name) for name in language_models()]) == TABLE.read_text()
