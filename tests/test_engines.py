"""What engines serve, and why not the rest; the commands they are started with; what their loaders stumble over."""

import ast
import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_draft, tiny_target
from torch import Tensor
from transformers import DeepseekV3Config
from typer.testing import CliRunner

from foredraft import EngineBase, ForedraftError, Registry, auto_draft, default_registry, hookimpl, save_draft
from foredraft.cli import app
from foredraft.cli.describe import describe
from foredraft.files.raw import Checkpoint
from foredraft.formats.serving import serve_command

ENGINES = {name: cls() for name, cls in default_registry().engines().items()}
SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4}
MOE = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
DEEPSEEK = {**SIZES, **LATENT, **MOE}


def config_of(algorithm: str, latent: bool = False, adapter: str | None = None, **options: Any) -> dict[str, Any]:
    target: Any = DeepseekV3Config(**DEEPSEEK) if latent else tiny_config()
    with torch.device("meta"):
        return json.loads(auto_draft(target, algorithm, adapter=adapter, **options).config.to_json_string(use_diff=False))  # type: ignore[no-any-return]


SERVED: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": "eagle3"}, "hf llamacpp sglang vllm"),
    ({"algorithm": "eagle3", "num_layers": 2, "draft_vocab_size": 20}, "hf sglang vllm"),
    ({"algorithm": "eagle31"}, "hf sglang vllm"),
    ({"algorithm": "eagle3", "qk_norm": True}, "hf vllm"),
    ({"algorithm": "eagle3", "num_aux": 1, "aux_layers": (4,)}, "hf vllm"),
    ({"algorithm": "peagle"}, "hf vllm"),
    ({"algorithm": "peagle", "qk_norm": True}, "hf vllm"),
    ({"algorithm": "dflash"}, "hf llamacpp sglang vllm"),
    ({"algorithm": "dspark"}, "hf llamacpp sglang vllm"),
    ({"algorithm": "dspark", "markov_head_type": "gated"}, "hf sglang"),
    ({"algorithm": "dspark", "own_head": True, "draft_vocab_size": 20}, "hf vllm"),
    ({"algorithm": "dflash2"}, "hf sglang vllm"),
    ({"algorithm": "domino"}, "hf sglang"),
    ({"algorithm": "domino", "pure_draft_prefix_len": 0}, "hf"),
    ({"algorithm": "medusa"}, "hf"),
    ({"algorithm": "mlp_speculator"}, "hf"),
    ({"algorithm": "eagle"}, "hf vllm"),
    ({"algorithm": "eagle", "latent": True}, "hf"),
    ({"algorithm": "mtp"}, "hf"),
    ({"algorithm": "medusa", "served": True}, "hf vllm"),
    ({"algorithm": "medusa", "served": True, "draft_vocab_size": 20}, "hf"),
    ({"algorithm": "mtp", "latent": True}, "hf vllm"),
    ({"algorithm": "eagle3", "latent": True}, "hf sglang vllm"),
    ({"algorithm": "eagle3", "latent": True, "num_layers": 2}, "hf vllm"),
    ({"algorithm": "peagle", "latent": True}, "hf"),
    ({"algorithm": "dflash", "latent": True}, "hf"),
    ({"algorithm": "eagle3", "latent": True, "adapter": "deepseek_v3_moe"}, "hf"),
]


@pytest.mark.parametrize(("draft", "served"), SERVED, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())))
def test_who_serves_what(draft: dict[str, Any], served: str) -> None:
    config = config_of(**draft)
    reasons = {name: engine.refuses(config) for name, engine in ENGINES.items()}
    assert " ".join(sorted(name for name, reason in reasons.items() if reason is None)) == served
    assert all(len(reason) > 20 for reason in reasons.values() if reason is not None)


@pytest.mark.parametrize(
    ("engine", "changes", "reason"),
    [
        ("vllm", {"architectures": ["LlamaForCausalLM2"]}, "no draft architecture 'LlamaForCausalLM2'; it takes LlamaForCausalLMEagle3"),
        ("vllm", {"architectures": []}, "none is named"),
        ("vllm", {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3"}, "multi-token prediction"),
        ("vllm", {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "q_lora_rank": None}, "an integer q_lora_rank"),
        ("vllm", {"hidden_act": "gelu"}, "gelu"),
        ("vllm", {"speculators_model_type": "medusa"}, "speculators_model_type 'medusa'"),
        ("vllm", {"speculators_model_type": ["eagle3"]}, "speculators_model_type"),
        ("sglang", {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "q_lora_rank": None}, "an integer q_lora_rank"),
        ("sglang", {"norm_before_residual": True}, "adds to the state before the norm"),
        ("sglang", {"attention_bias": True}, "biases"),
        ("sglang", {"hidden_act": "gelu"}, "gelu"),
        ("sglang", {"ptd_token_id": 3}, "P-EAGLE"),
        ("sglang", {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash"}, "speculators format"),
        ("hf", {"foredraft": None}, "foredraft import"),
    ],
)
def test_why_not(engine: str, changes: dict[str, Any], reason: str) -> None:
    config = {**config_of("eagle3"), **changes}
    if config["foredraft"] is None:
        del config["foredraft"]
    assert reason in (ENGINES[engine].refuses(config) or "")


@pytest.mark.parametrize(("content", "message"), [("", "is no JSON"), ('{"a": ' * 100_000, "is no JSON"), (None, "is no regular file")])
def test_a_config_that_cannot_be_read(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.mkdir() if content is None else file.write_text(content)
    with pytest.raises(ForedraftError, match=message):
        serve_command(ENGINES["vllm"], tmp_path, "target")


def test_a_file_is_no_draft(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ForedraftError, match=r"is no directory: name the one that holds the draft's config\.json"):
        serve_command(ENGINES["vllm"], tmp_path / "model.safetensors", "target")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return save_draft(tiny_draft(tiny_target()), tmp_path / "a draft")


BLOCKS = {"dflash": "dflash", "dflash2": "dflash", "dspark": "dspark"}


class TestCommands:
    def test_vllm(self, draft: Path) -> None:
        words = shlex.split(serve_command(ENGINES["vllm"], draft, "my/target", 3))
        assert words[:4] == ["vllm", "serve", "my/target", "--speculative-config"]
        assert json.loads(words[4]) == {"model": str(draft), "method": "eagle3", "num_speculative_tokens": 3}

    @pytest.mark.parametrize(
        ("algorithm", "method", "tokens", "parallel"),
        [("eagle31", "eagle3", 4, False), ("peagle", "eagle3", 8, True), ("dflash", "dflash", 7, False), ("dspark", "dspark", 8, False)],
    )
    def test_vllm_by_algorithm(self, algorithm: str, method: str, tokens: int, parallel: bool, tmp_path: Path) -> None:
        options = {"block_size": 8} if algorithm in ("dflash", "dspark") else {}
        path = save_draft(tiny_draft(tiny_target(), algorithm, **options), tmp_path / "draft")
        fields = json.loads(shlex.split(serve_command(ENGINES["vllm"], path, "t"))[-1])
        assert (fields["method"], fields["num_speculative_tokens"]) == (method, tokens)
        assert fields.get("parallel_drafting", False) is parallel

    @pytest.mark.parametrize(
        ("kind", "method", "parallel"),
        [
            ("eagle3", "eagle3", None),
            ("peagle", "eagle3", True),
            ("dflash", "dflash", None),
            ("dflash2", "dflash", None),
            ("dspark", "dspark", None),
        ],
    )
    def test_vllm_by_speculators_type(self, kind: str, method: str, parallel: bool | None) -> None:
        config = {"speculators_model_type": kind, "architectures": ["SpeculatorModel"]}
        assert ENGINES["vllm"].refuses(config) is None
        fields = ENGINES["vllm"].speculative_config(config, "d", 4)
        assert (fields["method"], fields.get("parallel_drafting")) == (method, parallel)

    def test_sglang(self, draft: Path, tmp_path: Path) -> None:
        words = shlex.split(serve_command(ENGINES["sglang"], draft, "my/target", 3))
        flags = dict(zip(words[3::2], words[4::2], strict=True))
        assert flags["--speculative-algorithm"] == "EAGLE3"
        assert (flags["--speculative-num-steps"], flags["--speculative-num-draft-tokens"]) == ("3", "4")
        block = save_draft(tiny_draft(tiny_target(), "dflash", block_size=8), tmp_path / "block")
        words = shlex.split(serve_command(ENGINES["sglang"], block, "my/target"))
        flags = dict(zip(words[3::2], words[4::2], strict=True))
        assert (flags["--speculative-algorithm"], flags["--speculative-num-draft-tokens"]) == ("DFLASH", "8")
        spark = save_draft(tiny_draft(tiny_target(), "dspark", block_size=8), tmp_path / "spark")
        words = shlex.split(serve_command(ENGINES["sglang"], spark, "my/target", 5))
        flags = dict(zip(words[3::2], words[4::2], strict=True))
        assert [flags[f"--speculative-{name}"] for name in ("algorithm", "dspark-block-size", "num-draft-tokens")] == ["DSPARK", "5", "6"]

    def test_hf_is_a_command_of_ours(self, draft: Path) -> None:
        words = shlex.split(serve_command(ENGINES["hf"], draft, "t", 3))
        assert words[0] == "foredraft"
        assert CliRunner().invoke(app, [*words[1:], "--help"]).exit_code == 0

    def test_more_than_a_block_is_refused(self, tmp_path: Path) -> None:
        path = save_draft(tiny_draft(tiny_target(), "dflash", block_size=8), tmp_path / "draft")
        with pytest.raises(ForedraftError, match="8 tokens were asked for; this draft makes 7 at once"):
            serve_command(ENGINES["vllm"], path, "t", 8)

    def test_on_the_command_line(self, draft: Path, tmp_path: Path) -> None:
        out = CliRunner().invoke(app, ["serve-command", str(draft), "--target", "t", "--engine", "vllm", "-k", "5"])
        assert out.stdout.strip() == serve_command(ENGINES["vllm"], draft, "t", 5)
        other = save_draft(tiny_draft(tiny_target(), "medusa"), tmp_path / "medusa")
        refused = CliRunner().invoke(app, ["serve-command", str(other), "--target", "t", "--engine", "sglang"])
        assert re.search("sglang does not serve .*no draft architecture 'MedusaDraftModel'", str(refused.exception))

    @pytest.mark.usefixtures("uncounted")
    def test_info_says_who_serves_it(self, tmp_path: Path) -> None:
        path = save_draft(tiny_draft(tiny_target(), "peagle"), tmp_path / "draft")
        lines = describe(str(path))
        assert lines["served by"] == "hf, vllm"
        assert [line.split(":")[0] for line in lines["not served by"].splitlines()] == ["llamacpp", "sglang"]
        assert "sglang: it does not draft in parallel" in lines["not served by"]


class TestPlugins:
    def test_what_is_lacking_is_named(self) -> None:
        empty = type("Empty", (EngineBase,), {})
        for cls, text in (
            (empty, r"name: .*\n(.*\n)*.*def refuses"),
            (object, "subclass of foredraft.EngineBase"),
        ):
            with pytest.raises(ForedraftError, match=text):
                Registry(entry_points=[]).register(SimpleNamespace(foredraft_engines=hookimpl(lambda cls=cls: [cls])))


class TestFindings:
    def of(self, path: Path, engine: str) -> list[str]:
        return [finding.id for finding in ENGINES[engine].findings(Checkpoint.open(path))]

    def edit(self, path: Path, **fields: Any) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **fields}))

    def rename(self, path: Path, old: str, new: str) -> None:
        tensors = load_file(path / "model.safetensors")
        save_file({re.sub(old, new, name): t for name, t in tensors.items() if new or not re.search(old, name)}, path / "model.safetensors")

    @pytest.mark.parametrize("options", [{}, {"num_layers": 2, "draft_vocab_size": 20}])
    def test_sound_drafts_have_none(self, options: dict[str, Any], tmp_path: Path) -> None:
        path = save_draft(tiny_draft(tiny_target(), **options), tmp_path / "draft")
        refused = {"llamacpp": ["llamacpp-refuses"]} if options else {}  # it runs one layer
        assert {engine: self.of(path, engine) for engine in ENGINES} == {engine: [] for engine in ENGINES} | refused

    def test_a_prefix_that_vllm_writes_itself(self, draft: Path) -> None:
        self.rename(draft, "^(?!lm_head)", "model.")
        assert self.of(draft, "vllm") == ["vllm-prefix"]
        assert self.of(draft, "sglang") == []

    @pytest.mark.parametrize(("norm", "engine"), [("input_layernorm", "vllm"), ("hidden_norm", "sglang")])
    def test_upper_layers_without_the_norm_that_the_engine_reads(self, norm: str, engine: str, tmp_path: Path) -> None:
        path = save_draft(tiny_draft(tiny_target(), num_layers=2), tmp_path / "draft")
        self.rename(path, rf"^layers\.1\.{norm}", "")
        found = {name: self.of(path, name) for name in ENGINES if name != "llamacpp"}
        assert found == {"hf": [], "sglang": [], "vllm": [], engine: [f"{engine}-upper-norm"]}

    def test_a_map_of_the_whole_vocabulary(self, draft: Path) -> None:
        tensors = load_file(draft / "model.safetensors")
        save_file({**tensors, "d2t": torch.zeros(50, dtype=torch.long)}, draft / "model.safetensors")
        assert self.of(draft, "vllm") == ["vllm-d2t"]

    def test_a_rank_where_vllm_does_not_look(self, tmp_path: Path) -> None:
        path = save_draft(tiny_draft(tiny_target(), "dspark"), tmp_path / "draft")
        assert self.of(path, "vllm") == []
        self.edit(path, markov_rank=None, dflash_config={"markov_rank": 256})
        assert self.of(path, "vllm") == ["vllm-markov-rank"]

    @pytest.mark.parametrize("lacked", ["fc.bias", "norm.weight", "layers.0.input_layernorm.weight"])
    def test_what_vllm_s_eagle_knows_nothing_of(self, lacked: str, tmp_path: Path) -> None:
        path = save_draft(tiny_draft(tiny_target(), "eagle", num_layers=2), tmp_path / "draft")
        assert self.of(path, "vllm") == []
        save_file({**load_file(path / "model.safetensors"), lacked: torch.ones(32)}, path / "model.safetensors")
        assert self.of(path, "vllm") == ["vllm-eagle1"]

    def test_aux_layers_where_sglang_does_not_look(self, draft: Path) -> None:
        self.edit(draft, eagle_config=None)
        assert self.of(draft, "sglang") == ["sglang-aux"]

    def test_no_head(self, draft: Path) -> None:
        self.rename(draft, "lm_head", "")
        assert self.of(draft, "sglang") == ["sglang-head"]
        assert self.of(draft, "vllm") == []


def sglang_parameters(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The parameters that SGLang 0.5.23 allocates for a draft, by its own names (llama_eagle3.py, kimi_k25_eagle3.py, dflash.py)."""
    D, inner, W = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    heads, aux = config["num_attention_heads"], config["num_aux_hidden_states"] * config["target_hidden_size"]
    rank, latent = config.get("markov_rank"), "kv_lora_rank" in config
    dflash = "dflash_config" in config or rank is not None
    top = "" if dflash else "model."
    made: dict[str, tuple[int, ...]] = {f"{top}fc": (D, aux), f"{top}norm": (D,)}
    made |= {"hidden_norm": (D,)} if dflash else {"model.embed_tokens": (config["vocab_size"], D), "lm_head": (W, D)}
    if config.get("fc_norm"):
        made |= {f"model.fc_norm.{i}": (config["target_hidden_size"],) for i in range(config["num_aux_hidden_states"])}
    for i in range(config["num_hidden_layers"]):
        layer, width = f"{top}layers.{i}" if not latent else "model.midlayer", 2 * D if i == 0 and not dflash else D
        made |= {f"{layer}.{n}": (D,) for n in ("input_layernorm", "post_attention_layernorm")}
        made |= {f"{layer}.mlp.gate_up_proj": (2 * inner, D), f"{layer}.mlp.down_proj": (D, inner)}
        made |= {} if dflash else {f"{layer}.hidden_norm": (D,)}
        attention = f"{layer}.self_attn"
        if latent:
            q, kv, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
            nope, v = config["qk_nope_head_dim"], config["v_head_dim"]
            made |= {f"{attention}.fused_qkv_a_proj_with_mqa": (q + kv + rope, width), f"{attention}.q_b_proj": (heads * (nope + rope), q)}
            made |= {f"{attention}.q_a_layernorm": (q,), f"{attention}.kv_a_layernorm": (kv,)}
            made |= {f"{attention}.kv_b_proj": (heads * (nope + v), kv), f"{attention}.o_proj": (D, heads * v)}
        else:
            d = config["head_dim"]
            made |= {
                f"{attention}.qkv_proj": ((heads + 2 * config["num_key_value_heads"]) * d, width),
                f"{attention}.o_proj": (D, heads * d),
            }
            made |= {f"{attention}.{n}_norm": (d,) for n in "qk"} if dflash else {}
    others: dict[str, tuple[int, ...]] = {}
    if rank is not None:
        made |= {f"markov_head.markov_w{i}": (config["vocab_size"], rank) for i in (1, 2)}
        reads = D + rank * config["confidence_head_with_markov"]
        linear = {"confidence_head.proj": (1, reads)} if config["enable_confidence_head"] else {}
        linear |= {"markov_head.gate_proj": (rank, D + rank)} if config["markov_head_type"] == "gated" else {}
        made, others = made | linear, {f"{name}.bias": shape[:1] for name, shape in linear.items()}
    own = config.get("dflash_config") or {}
    if own.get("projector_type") == "domino":
        G, E = own["gru_hidden_dim"], own["emb_dim"]
        made |= {"embed_proj.0": (E, D + G), "embed_proj.2": (W, E)}
        others = {"prefix_gru.weight_ih_l0": (3 * G, D), "prefix_gru.weight_hh_l0": (3 * G, G)}
    if taps := own.get("conv_kernel_size"):
        convolutions = [f"layers.{i}.{name}_conv" for i in range(config["num_hidden_layers"]) for name in ("attention", "mlp")]
        made |= {f"{name}.kernel_projection": (2 * taps * D // own["conv_group_size"], D) for name in convolutions}
        made |= {"candidate_selector.hidden_projection": (own["selector_rank"], D)}
        others = {f"{name}.base_kernel": (2, taps, D) for name in convolutions}
        others |= {f"candidate_selector.{n}_codebook": (W, own["selector_rank"]) for n in ("predecessor", "successor")}
    return {f"{name}.weight": shape for name, shape in made.items()} | others


FUSED = {"qkv_proj": "[qkv]_proj", "gate_up_proj": "(gate|up)_proj", "fused_qkv_a_proj_with_mqa": "(q_a_proj|kv_a_proj_with_mqa)"}


def sglang_name(name: str, parameters: Iterable[str], latent: bool) -> str | None:
    """Where SGLang's loaders put a tensor; None: nowhere, without a word."""
    if name in parameters:
        return name
    name = re.sub(r"^layers\.0\." if latent else "^midlayer", "midlayer." if latent else "layers.0", name)
    for fused, parts in FUSED.items():
        name = re.sub(rf"\.{parts}\.", f".{fused}.", name) if latent or "mqa" not in fused else name
    return next((n for n in (name, f"model.{name}") if n in parameters), None)


SGLANG_DRAFTS = [d for d, engines in SERVED if "sglang" in engines]
SGLANG_FILES = {"LlamaForCausalLMEagle3": "llama_eagle3", "Eagle3DeepseekV2ForCausalLM": "kimi_k25_eagle3", "DFlashDraftModel": "dflash"}
SGLANG_FILES |= {"Qwen3DSparkModel": "dspark", "DFlash2DraftModel": "dflash"}


def saved(draft: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    target: Any = DeepseekV3Config(**DEEPSEEK) if draft.get("latent") else tiny_config()
    made = auto_draft(target, **{name: value for name, value in draft.items() if name != "latent"})
    path = save_draft(made, folder / "draft")
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


@pytest.mark.parametrize("draft", SGLANG_DRAFTS, ids=lambda v: "-".join(map(str, v.values())))
class TestSGLangLoader:
    def test_every_parameter_is_filled_and_no_tensor_is_lost(self, draft: dict[str, Any], tmp_path: Path) -> None:
        config, tensors = saved(draft, tmp_path)
        parameters = sglang_parameters(config)
        rows: dict[str, int] = {}
        for name, tensor in tensors.items():
            if name in ("d2t", "t2d"):
                continue
            place = sglang_name(name, parameters, "kv_lora_rank" in config)
            assert place is not None, f"SGLang skips {name}"
            assert tensor.shape[1:] == parameters[place][1:], name
            rows[place] = rows.get(place, 0) + len(tensor)
        assert rows == {name: shape[0] for name, shape in parameters.items()}

    @pytest.mark.skipif("FOREDRAFT_SGLANG" not in os.environ, reason="FOREDRAFT_SGLANG names no folder of the package sglang")
    def test_by_its_own_code(self, draft: dict[str, Any], tmp_path: Path) -> None:
        """Its `load_weights`, taken out of the file: the package itself does not import without a GPU."""
        config, tensors = saved(draft, tmp_path)
        filled: dict[str, int] = {}

        class Parameter:
            def __init__(self, name: str, shape: tuple[int, ...]):
                self.name, self.shape = name, shape

            def weight_loader(self, param: Any, tensor: Tensor, *shard: Any) -> None:
                filled[self.name] = filled.get(self.name, 0) + len(tensor)

        parameters = {name: Parameter(name, shape) for name, shape in sglang_parameters(config).items()}
        source = Path(os.environ["FOREDRAFT_SGLANG"]) / f"srt/models/{SGLANG_FILES[config['architectures'][0]]}.py"
        methods = [n for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.FunctionDef) and n.name == "load_weights"]
        tree = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), methods[0]], [])
        scope: dict[str, Any] = {"torch": torch, "re": re, "default_weight_loader": None, "logger": SimpleNamespace(warning=pytest.fail)}
        exec(compile(ast.fix_missing_locations(tree), str(source), "exec"), scope)
        model = SimpleNamespace(
            named_parameters=lambda: parameters.items(),
            post_load_weights=lambda: None,
            config=SimpleNamespace(**config),
            hot_token_id=None,
            projector_type=None,
            is_nemotron_35_draft=False,
        )
        scope["load_weights"](model, tensors.items())
        assert filled == {name: p.shape[0] for name, p in parameters.items()}
        if "d2t" in tensors:
            assert torch.equal(model.hot_token_id, tensors["d2t"] + torch.arange(len(tensors["d2t"])))
