"""Drafts and targets in GGUF files: what is written is what llama.cpp would compute, what is read is what was written."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from in_gguf import write_target
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoConfig, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from foredraft import ForedraftError, Target, auto_draft, save_draft
from foredraft.cli import main
from foredraft.doctor import examine, open_subject
from foredraft.files.ours import record
from foredraft.files.spellings import TARGET_HEAD
from foredraft.formats import export_draft, import_draft, serve_command
from foredraft.formats.gguf import paired
from foredraft.plugins.gguf import GGUF, INSIDE, GGUFOptions
from foredraft.plugins.llamacpp import LlamaCpp
from foredraft.target.gguf import read_gguf
from foredraft.target.loading import load_config, load_target, load_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 30000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500000.0,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 4 for i in range(8)],
        "long_factor": [1.0 + i / 4 for i in range(8)],
        "attention_factor": 1.19,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
}


def words_of(count: int) -> Tensor:
    """The ids of a draft vocabulary: the first ones, then every third."""
    return torch.cat([torch.arange(60), 60 + 3 * torch.arange(count - 60)])


def a_draft(folder: Path, algorithm: str = "eagle3", rope: str = "plain", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A draft with weights of its own, and its target, in `folder`."""
    torch.manual_seed(0)
    words = options.pop("draft_vocab_size", None)
    model = tiny_model(LlamaConfig(**SHAPE, rope_parameters=SCALINGS[rope]))
    model.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    draft = auto_draft(load_config(str(folder / "target")), algorithm, draft_vocab_size=words, **options)
    if words:
        draft.set_draft_vocabulary(words_of(words))
    draft.start_from(Target(model, draft.config.aux_layers))
    for name, parameter in draft.named_parameters():
        if "norm" in name or name == "fc.weight":
            parameter.data += 0.1 * torch.randn_like(parameter)
    save_draft(draft.to(dtype), folder / "draft")
    return draft


@pytest.mark.parametrize(
    ("rope", "dtype", "options"),
    [
        ("plain", torch.float32, {}),
        ("linear", torch.bfloat16, {"norm_before_residual": True}),
        ("yarn", torch.float16, {"draft_vocab_size": 100}),
        ("llama3", torch.float32, {"draft_vocab_size": 100}),
        ("longrope", torch.bfloat16, {}),
        ("yarn", torch.float32, {"algorithm": "dflash", "num_layers": 2, "num_aux": 3, "block_size": 6, "mask_token_id": 7}),
        (
            "plain",
            torch.float32,
            {"algorithm": "dspark", "num_layers": 1, "num_aux": 2, "mask_token_id": 7, "enable_confidence_head": False},
        ),
    ],
)
def test_there_and_back(tmp_path: Path, rope: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Every tensor bit for bit, every field; also without the note by which we know our own spelling of the rotary embedding."""
    draft = a_draft(tmp_path, rope=rope, dtype=dtype, **options)
    file = export_draft(tmp_path / "draft", tmp_path / "draft.gguf", "gguf")
    done = import_draft(file, tmp_path / "again", str(tmp_path / "target"))
    assert (done.form, done.algorithm) == ("gguf", draft.algorithm.name)
    again = auto_draft(tmp_path / "again")
    own = {name: t for name, t in draft.state_dict().items() if not draft.config.spec.target_head or name not in TARGET_HEAD}
    found = again.state_dict()
    for name in own:
        assert_close(found[name], own[name], rtol=0, atol=0)
    kept = ("rope_parameters", "rms_norm_eps", "max_position_embeddings", "mask_token_id", "eagle_aux_hidden_state_layer_ids")
    before, after = draft.config.to_dict(), again.config.to_dict()
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert again.algorithm.max_tokens == draft.algorithm.max_tokens
    assert after.get("norm_before_residual") == before.get("norm_before_residual")

    held = GGUF().open(file)
    for config in (before, held.config):
        words = LlamaCpp().arguments(config, "draft", "target", 3)
        assert ("llamacpp-unsure" in {f.id for f in LlamaCpp().findings(open_subject(file).draft)}) == (draft.algorithm.name == "dspark")
        assert words[words.index("--spec-type") + 1] == f"draft-{draft.algorithm.name}", "it would run a DSpark file as DFlash"
    data = {name: value for name, value in held.config[INSIDE].items() if not name.endswith("rope.scaling.parameters")}
    told = GGUF().flatten({INSIDE: data})["rope_parameters"]
    rotary = type(draft.rotary_emb)(type(draft.config).from_dict({**before, "rope_parameters": told}))
    assert_close(rotary.inv_freq, draft.rotary_emb.inv_freq, rtol=1e-5, atol=0)
    assert rotary.attention_scaling == pytest.approx(draft.rotary_emb.attention_scaling, rel=1e-6)


@pytest.mark.parametrize(("family", "dtype"), [("qwen3_5_text", torch.bfloat16), ("qwen3_next", torch.float32)])
def test_a_multi_token_head_there_and_back(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """Matrices bit for bit, experts too; norms as numbers that compute the same: the file holds what ours add to 1."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    config = AutoConfig.for_model(family, **{**SHAPE, "num_hidden_layers": 4}, **linear, **(experts if family == "qwen3_next" else {}))
    tiny_model(config).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    draft = auto_draft(load_config(str(tmp_path / "target")), "mtp")
    for parameter in draft.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    save_draft(draft.to(dtype), tmp_path / "draft")
    file = export_draft(tmp_path / "draft", tmp_path / "draft.gguf", "gguf")
    done = import_draft(file, tmp_path / "again", str(tmp_path / "target"))
    again = auto_draft(done.path)
    assert (done.form, done.algorithm, again.dtype) == ("gguf", "mtp", dtype)
    found, own = again.state_dict(), {n: t for n, t in draft.state_dict().items() if n not in TARGET_HEAD}
    for name, tensor in own.items():
        added = float(name.endswith("norm.weight"))
        assert_close(added + found[name].float(), added + tensor.float(), rtol=0, atol=0, msg=name)
    held = read_gguf(file)
    assert {name for name in held.tensors if not name.startswith("blk.4.")} == {"token_embd.weight", "output.weight", "output_norm.weight"}
    for given in (draft.config.to_dict(), (read := open_subject(file).draft).config):
        words = LlamaCpp().arguments(given, "draft", "target", 3)
        assert words[words.index("--spec-type") + 1] == "draft-mtp"
    assert LlamaCpp().findings(read) == []


def test_rows_are_those_of_adjacent_pairs() -> None:
    """llama.cpp turns neighbours against each other: on rows in its order the scores are those of ours."""
    torch.manual_seed(0)
    heads, dim, tokens = 2, 8, 5
    x, weights = torch.randn(tokens, 12), torch.randn(2, heads * dim, 12)
    angles = torch.arange(tokens)[:, None] * 100.0 ** -(torch.arange(0, dim, 2) / dim)

    def split(weight: Tensor) -> Tensor:
        return (x @ weight.T).unflatten(-1, (heads, dim)).transpose(0, 1)[None]

    turned = torch.cat([angles, angles], -1)[None]
    ours = apply_rotary_pos_emb(*map(split, weights), turned.cos(), turned.sin())

    def neighbours(weight: Tensor) -> Tensor:
        a, b = split(paired(weight, dim)).unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).flatten(-2)

    theirs = [neighbours(weight) for weight in weights]
    assert_close(theirs[0] @ theirs[1].mT, ours[0] @ ours[1].mT)


def test_what_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command line: ids, layers, tokens and types as llama.cpp's loader wants them; what cannot be packed is said."""
    draft = a_draft(tmp_path, draft_vocab_size=100)
    target = write_target(load_target(str(tmp_path / "target"), "float32"), tiny_tokenizer(), tmp_path / "target.gguf")

    def export(*words: str) -> Any:
        monkeypatch.setattr("sys.argv", ["foredraft", "export", str(tmp_path / "draft"), *words, "--format", "gguf"])
        return main()

    with pytest.raises(SystemExit, match="0"):
        export(str(tmp_path / "packed.gguf"), "--outtype=q8_0", "--target", str(target))
    held = read_gguf(tmp_path / "packed.gguf")
    assert held.packed == ("Q8_0",)
    assert torch.equal(held.load("d2t"), words_of(100))
    assert held.load("d2t").dtype == torch.int64
    assert held.fields["eagle3.target_layers"] == list(draft.config.aux_layers)
    assert held.fields["tokenizer.ggml.pre"] == "gpt-2", "the target's own"
    assert held.fields["tokenizer.ggml.tokens"] == 320
    read = import_draft(tmp_path / "packed.gguf", tmp_path / "again", str(target))
    assert "Q8_0" in read.notes[0]
    assert_close(auto_draft(tmp_path / "again").fc.weight, draft.fc.weight, rtol=0, atol=0.05)
    capsys.readouterr()
    for words, text in (
        (("x.gguf", "--outype", "f16"), "unknown option 'outype'; did you mean 'outtype'?"),
        (("x.gguf", "--outtype", "q9"), "outtype='q9'"),
        (("x.gguf", "--target", str(tmp_path / "nothing")), "no such directory"),
        (("x", "--outtype", "f16"), "ends in .gguf"),
        (("x.gguf", "stray"), "'stray': options of a format are given as --name value"),
    ):
        with pytest.raises(SystemExit, match="1"):
            export(*words)
        assert text in capsys.readouterr().err
    wide = GGUF(GGUFOptions(outtype="q4_0"))
    with pytest.raises(ForedraftError, match=r"packs rows by 32, no divisor of those of fc.weight of 40"):
        wide.save(tmp_path / "x.gguf", {INSIDE: {"general.architecture": "eagle3"}}, {"fc.weight": torch.zeros(4, 40)})


REFUSED: list[tuple[str, dict[str, Any], str, tuple[str, ...]]] = [
    ("eagle3", {"num_layers": 2, "num_aux": 2, "qk_norm": True}, "llama", ("num_hidden_layers: 2", "2 aux layers", "norms on queries")),
    ("eagle31", {}, "qwen2", ("one norm per aux state", "fed back", "model_type qwen2")),
    ("peagle", {}, "llama", ("P-EAGLE",)),
    ("dspark", {"markov_head_type": "rnn", "confidence_head_with_markov": False}, "llama", ("vanilla", "reads the token before")),
    ("domino", {}, "llama", ("projector_type",)),
    ("medusa", {}, "llama", ("no architecture",)),
    ("mtp", {}, "llama", ("no head there",)),
    ("mtp", {}, "deepseek_v3", ("latent attention", "not written yet")),
    ("eagle3", {}, "deepseek_v3", ("latent attention",)),
]


@pytest.mark.parametrize(("algorithm", "options", "family", "reasons"), REFUSED)
def test_refusals(algorithm: str, options: dict[str, Any], family: str, reasons: tuple[str, ...]) -> None:
    """All at once, by format and engine, with the build they were found in."""
    from test_conformance import TestDeepseekV3

    target = TestDeepseekV3.config if family == "deepseek_v3" else AutoConfig.for_model(family, **SHAPE)
    with torch.device("meta"):
        config = auto_draft(target, algorithm, **options).config.to_dict()
    found = GGUF().refuses(config)
    for reason in reasons:
        assert any(reason in text and "11434" in text for text in found), (reason, found)
    assert LlamaCpp().refuses(config) == "; ".join(found)


def test_doctor_and_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound file has no findings but notes; what is wrong in one is told, and how a server is started."""
    a_draft(tmp_path, draft_vocab_size=100)
    target = write_target(load_target(str(tmp_path / "target"), "float32"), tiny_tokenizer(), tmp_path / "target.gguf")
    file = export_draft(tmp_path / "draft", tmp_path / "draft.gguf", "gguf", target=str(target))
    assert [f for f in examine(file, target) if f.severity != "note"] == []
    engine = LlamaCpp()
    command = f"llama-server -m {target} --metrics -md {file} --spec-type draft-eagle3 --spec-draft-n-max"
    alone = "--no-spec-draft-backend-sampling"
    monkeypatch.setattr("foredraft.plugins.llamacpp._has_amx", lambda: True)
    assert serve_command(engine, file, str(target)) == f"{command} 4 {alone}"
    assert serve_command(engine, tmp_path / "draft", str(target), 2) == f"{command} 2 {alone}", "its file is there"
    os.utime(file, (0, 0))
    both = serve_command(engine, tmp_path / "draft", str(target), 2).splitlines()
    costs = tmp_path / "costs.json"
    for told, chosen in (
        ({"1": 1.3, "2": 1.4, "4": 2.4}, 2),
        ({"1": 1.1, "3": 2.0}, 1),
        ({"4": 1.0}, 4),
        ({"2": 1.9}, "no number of drafted"),
    ):
        costs.write_text(json.dumps({"costs": told}))
        record(
            tmp_path / "draft",
            {"a": {"tau": 1.6, "acceptance": [0.5, 0.3, 0.1, 0.1]}, "b": {"tau": 1.2, "acceptance": [0.3, 0.2, 0.1, 0.1]}},
        )
        with nullcontext() if isinstance(chosen, int) else pytest.raises(ForedraftError, match=chosen):
            assert serve_command(engine, tmp_path / "draft", str(target), costs=costs).endswith(f"-max {chosen} {alone}")
    for where, wrong, text in ((file, "{}", "is not recorded"), (tmp_path / "draft", '{"costs": [1]}', "expected JSON such as")):
        costs.write_text(wrong)
        with pytest.raises(ForedraftError, match=text):
            serve_command(engine, where, str(target), costs=costs)
    assert both == [f"foredraft export {tmp_path / 'draft'} {file} --format gguf --target {target}", f"{command} 2 {alone}"]
    with pytest.raises(ForedraftError, match="loads GGUF files"):
        serve_command(engine, file, str(tmp_path / "target"))

    held = GGUF().open(file)
    data = {**dict(held.config[INSIDE]), "tokenizer.ggml.tokens": [f"<{i}>" for i in range(320)]}
    raw = read_gguf(file)
    tensors = {name: raw.load(name) for name in raw.tensors}
    spoilt: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "llamacpp-d2t": ({}, {"d2t": tensors["d2t"] - torch.arange(100)}),
        "llamacpp-missing": ({}, {"blk.0.ffn_up.weight": None}),
        "llamacpp-unexpected": ({}, {"blk.0.attn_q_norm.weight": torch.ones(16)}),
        "llamacpp-refuses": ({"eagle3.target_layers": [1, 2]}, {}),
        "llamacpp-rope-base": ({"eagle3.rope.freq_base": None}, {}),
        "llamacpp-heads": ({"eagle3.attention.value_length": 8}, {}),
        "llamacpp-target-width": ({"eagle3.target_hidden_size": None}, {}),
        "llamacpp-d2t-dtype": ({}, {"d2t": tensors["d2t"].int()}),
        "llamacpp-vocabulary": ({"tokenizer.ggml.tokens": ["<0>"] * 100}, {}),
        "llamacpp-block": (dflash := {"general.architecture": "dflash"}, {}),
        "llamacpp-mask": (dflash | {"dflash.block_size": 4}, {}),
    }
    for id, (fields, other) in spoilt.items():
        changed = {name: v for name, v in {**data, **fields}.items() if v is not None and name not in ("d2t", "rope_freqs", "packed")}
        changed = {name.replace("eagle3.", f"{changed['general.architecture']}."): value for name, value in changed.items()}
        GGUF().save(tmp_path / "spoilt.gguf", {INSIDE: changed}, {n: t for n, t in {**tensors, **other}.items() if t is not None})
        subject = open_subject(tmp_path / "spoilt.gguf")
        assert id in {f.id for f in engine.findings(subject.draft)}
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:1000])
    assert [f.id for f in open_subject(tmp_path / "cut.gguf").draft.findings] == ["weights-damaged"]
    with pytest.raises(ForedraftError, match="could not be read as gguf"):
        import_draft(tmp_path / "cut.gguf", tmp_path / "x", str(target))


@pytest.mark.parametrize(("family", "rope", "tied"), [("llama", "plain", True), ("llama", "llama3", False), ("qwen3", "yarn", False)])
def test_targets(tmp_path: Path, family: str, rope: str, tied: bool) -> None:
    """A file is the model that it was written from, its rotary embedding too; a draft in one is no target."""
    cls, plain = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family], {"beta_fast": 32.0} if rope == "yarn" else {}
    model = tiny_model(cls(**{**SHAPE, "tie_word_embeddings": tied}, rope_parameters={**SCALINGS[rope], **plain}))
    file = write_target(model, tiny_tokenizer(), tmp_path / "target.gguf")
    again = load_target(str(file), "float32").eval()
    ids = torch.arange(200)[None] % 300
    with torch.no_grad():
        assert_close(again(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert again.config.name_or_path == str(file)
    text = "the user asks, the assistant answers"
    assert load_tokenizer(str(file))(text).input_ids == tiny_tokenizer()(text).input_ids
    draft = auto_draft(load_config(str(file)))
    assert draft.config.foredraft["target"]["name"] == str(file)
    GGUF().save(tmp_path / "draft.gguf", {INSIDE: {"general.architecture": "eagle3"}}, {"fc.weight": torch.zeros(2, 6)})
    with pytest.raises(ForedraftError, match=r"is a draft \(eagle3\)"):
        load_config(str(tmp_path / "draft.gguf"))
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:500])
    with pytest.raises(ForedraftError, match="cannot be read as GGUF"):
        load_config(str(tmp_path / "cut.gguf"))
