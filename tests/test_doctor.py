"""Doctor names each way in which drafts fail without a word, finds nothing in sound ones, and survives any file."""

import copy
import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import TOKENS, tiny_draft, tiny_rows, tiny_target, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from foredraft import DraftCollator, ForedraftError, Target, auto_draft, save_draft
from foredraft.cli import app
from foredraft.contracts.engine import EngineBase
from foredraft.contracts.finding import Finding, note, warning
from foredraft.decoding import AutoregressiveDrafter
from foredraft.decoding.replay import answers
from foredraft.doctor import Runner, Subject, ask_engines, dynamic, examine, mend, open_subject, suspects
from foredraft.doctor.bench import Bench, Forced
from foredraft.doctor.mends import MENDS
from foredraft.doctor.static import CHECKS
from foredraft.doctor.suspects import Variant
from foredraft.files.raw import Checkpoint

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "phi3": SHAPE,
    "qwen3": {**SHAPE, "head_dim": 16},
    "deepseek_v3": {**SHAPE, **LATENT, **EXPERTS, "first_k_dense_replace": 4},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "eagle3": {"num_layers": 2},
    "eagle31": {},
    "peagle": {"num_layers": 2},
    "dflash": {"num_layers": 2, "block_size": 4},
    "medusa": {},
    "dspark": {"num_layers": 1, "block_size": 4, "markov_rank": 6},
    "domino": {"num_layers": 1, "block_size": 4, "emb_dim": 6, "gru_hidden_dim": 5},
    "dflash2": {"num_layers": 1, "block_size": 4, "selector_rank": 6},
    "eagle": {"num_layers": 2},
}
HEADLESS = {"dflash", "dspark", "domino", "dflash2", "eagle"}
"""Their vocabulary is the target's."""
AUX = "eagle_aux_hidden_state_layer_ids"
REDUCED = 24
"""Tokens of a reduced draft vocabulary: not evenly spread, as in life."""
Config, Tensors = dict[str, Any], dict[str, torch.Tensor]
Break = Callable[[Config, Tensors], None]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def target(home: Path) -> Callable[[str], Path]:
    """The directory of a tiny target of a family."""

    def get(family: str) -> Path:
        path = home / family
        if not path.exists():
            torch.manual_seed(0)
            rope = {"rope_type": "default", "rope_theta": 50000.0}
            config = AutoConfig.for_model(family, **TARGETS[family], rope_parameters=rope)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
        return path

    return get


@pytest.fixture(scope="module")
def sound(home: Path, target: Callable[[str], Path]) -> Callable[..., Path]:
    """The directory of a sound draft, as save_draft writes it; `reduced` is its vocabulary."""

    def get(algorithm: str = "eagle3", family: str = "llama", reduced: bool = False) -> Path:
        path = home / f"{algorithm}-{family}-{reduced}"
        if not path.exists():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_pretrained(target(family), dtype=torch.float32)
            draft = auto_draft(model.config, algorithm, draft_vocab_size=REDUCED if reduced else None, **ALGORITHMS[algorithm])
            draft.set_draft_vocabulary(torch.cat([torch.arange(12), torch.arange(20, 44, 2)]))
            draft.start_from(model)
            save_draft(draft, path)
        return path

    return get


def rewritten(source: Path, out: Path, change: Break) -> Path:
    """A copy of a draft with its config and tensors changed."""
    config, state = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    change(config, state)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    save_file(state, out / "model.safetensors")
    return out


def serious(findings: list[Finding]) -> set[str]:
    return {f.id for f in findings if f.severity != "note"}


# Sound drafts.


QUICK = {(algorithm, [*TARGETS][i % len(TARGETS)]) for i, algorithm in enumerate(ALGORITHMS)}
"""Each algorithm and each family once in every run; all pairs of them among the slow tests."""


@pytest.mark.parametrize(
    ("algorithm", "family"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in itertools.product(ALGORITHMS, TARGETS)],
)
def test_a_sound_draft_has_no_findings(algorithm: str, family: str, sound: Callable[..., Path], target: Callable[[str], Path]) -> None:
    for reduced in (False, True) if algorithm not in HEADLESS else (False,):
        draft = sound(algorithm, family, reduced)
        assert serious(examine(draft)) == set()
        assert examine(draft, target(family)) == []
        assert open_subject(draft).built is not None, "shapes must come from the model itself"


def plain(config: Config) -> None:
    """Leave nothing of ours in a config."""
    for name in ("foredraft", "rope_parameters", "eagle_config", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"):
        config.pop(name, None)
    for name in ("fc_norm", "norm_output"):
        if not config.get(name):
            config.pop(name, None)


def safe_ai_lab(config: Config, state: Tensors) -> None:
    plain(config)
    for name in list(state):
        if name.startswith("layers.0."):
            state[name.replace("layers.0.", "midlayer.")] = state.pop(name)


def spec_forge(config: Config, state: Tensors) -> None:
    safe_ai_lab(config, state)
    config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}


def nemo(config: Config, state: Tensors) -> None:
    ids = config["eagle_config"]
    plain(config)
    config["eagle_config"] = ids
    for name in list(state):
        if name not in ("lm_head.weight", "d2t", "t2d"):
            state[f"model.{name}"] = state.pop(name)


def speculators(config: Config, state: Tensors) -> None:
    inner, flags = dict(config), ("draft_vocab_size", "target_hidden_size", "fc_norm", "norm_output", "eagle_aux_hidden_state_layer_ids")
    outer = {name: inner.pop(name) for name in flags}
    plain(inner)
    methods = {"algorithm": "eagle3", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]}
    outer |= {"speculators_model_type": "eagle3", "speculators_config": methods, "transformer_layer_config": inner}
    inner.pop("architectures")
    config.clear()
    config.update(outer)


def z_lab(config: Config, state: Tensors) -> None:
    plain(config)
    config.pop("mask_token_id")
    config["num_target_layers"] = 8


PEERS: list[tuple[Break, str]] = [
    (safe_ai_lab, "eagle3"),
    (spec_forge, "eagle31"),
    (nemo, "eagle3"),
    (speculators, "eagle31"),
    (z_lab, "dflash"),
]


@pytest.mark.parametrize(("form", "algorithm"), PEERS)
def test_a_sound_draft_of_a_peer_has_no_findings(
    form: Break, algorithm: str, sound: Callable[..., Path], target: Callable[[str], Path], tmp_path: Path
) -> None:
    draft = rewritten(sound(algorithm, reduced=algorithm != "dflash"), tmp_path / "draft", form)
    assert serious(examine(draft)) == set()
    assert serious(examine(draft, target("llama"))) == set()


@pytest.mark.parametrize(
    "change",
    [
        lambda c, s: c.pop("speculators_config"),
        lambda c, s: c["speculators_config"].clear(),
        lambda c, s: c["transformer_layer_config"].pop("model_type"),
        lambda c, s: c.update(model_type="eagle3"),
        lambda c, s: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=0),
    ],
)
def test_a_broken_speculators_config_is_named(change: Break, sound: Callable[..., Path], tmp_path: Path) -> None:
    def both(config: Config, state: Tensors) -> None:
        speculators(config, state)
        change(config, state)

    assert serious(examine(rewritten(sound("eagle31", reduced=True), tmp_path / "draft", both))) == {"speculators-config"}


def test_pickled_weights_are_read_like_others(sound: Callable[..., Path], tmp_path: Path) -> None:
    draft = rewritten(sound(reduced=True), tmp_path / "draft", safe_ai_lab)
    state = load_file(draft / "model.safetensors")
    torch.save(state, draft / "pytorch_model.bin")
    by_header = Checkpoint.open(draft)
    (draft / "model.safetensors").unlink()
    pickled = Checkpoint.open(draft)
    assert {n: t.shape for n, t in pickled.tensors.items()} == {n: t.shape for n, t in by_header.tensors.items()}
    assert {n: t.dtype for n, t in pickled.tensors.items()} == {n: t.dtype for n, t in by_header.tensors.items()}
    assert serious(examine(draft)) == set()


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.1] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    },
]


UNTIED = ("llama", "gpt_neox")
"""Families whose own table for the head is looked at in every run: the others tie it there."""


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param(*pair, marks=pytest.mark.slow if pair[1] == (pair[0] in UNTIED) else ())
        for pair in itertools.product((*TARGETS, "gpt_neox"), (False, True))
    ],
)
def test_no_draft_of_ours_gives_a_false_alarm(family: str, tied: bool, tmp_path: Path) -> None:
    """Every algorithm and RoPE scaling, whole and reduced vocabularies, a mask token chosen from data, with the weights moved a little."""
    ropes = {"llama": ROPES, "qwen3": ROPES[:-1], "phi3": ROPES[:1] + ROPES[-1:]}.get(family, ROPES[:1])[-1 if tied else 0 :]
    for number, rope in enumerate(ropes):
        torch.manual_seed(number)
        shape = {**SHAPE, **TARGETS.get(family, {}), "tie_word_embeddings": tied, "rope_parameters": rope, "initializer_range": 0.3}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape), dtype=torch.float32).eval()
        model.save_pretrained(tmp_path / f"target{number}")
        for algorithm, options in list(ALGORITHMS.items())[number % 2 :: 2] if len(ropes) > 2 else ALGORITHMS.items():
            reduced = REDUCED if algorithm not in HEADLESS and number % 2 == 0 else None
            draft = auto_draft(model.config, algorithm, draft_vocab_size=reduced, **options)
            draft.start_from(model, tiny_rows(["uuaaaaaaaa"]))
            with torch.no_grad():
                for p in draft.parameters():
                    if p.requires_grad:
                        p.add_(0.2 * p.abs().mean() * torch.randn(p.shape))
            save_draft(draft, tmp_path / f"{algorithm}{number}")
            found = examine(tmp_path / f"{algorithm}{number}", tmp_path / f"target{number}")
            assert serious(found) == set(), (algorithm, rope, found)


def test_a_head_that_was_not_the_target_s_is_no_alarm(sound: Callable[..., Path], target: Callable[[str], Path], tmp_path: Path) -> None:
    """Trained from random numbers, with a direction that all rows share, as language models have; a target's head of another name."""
    rows = torch.randn(REDUCED, 32, generator=torch.Generator().manual_seed(3)) * torch.linspace(0.5, 2, REDUCED)[:, None]
    shared = load_file(target("llama") / "model.safetensors")["lm_head.weight"].mean(0)
    for strength in (0.0, 1.0, 30.0):
        other = filling("lm_head.weight", lambda t, s=strength: rows + s * shared)
        draft = rewritten(sound(reduced=True), tmp_path / f"draft{strength}", other)
        assert serious(examine(draft, target("llama"))) == set()
    renamed = rewritten(target("llama"), tmp_path / "target", lambda c, s: s.update({"output.weight": s.pop("lm_head.weight")}))
    assert serious(examine(sound(reduced=True), renamed)) == set()
    broken = rewritten(sound(reduced=True), tmp_path / "broken", filling("lm_head.weight", noisy))
    assert "head-random" in serious(examine(broken, renamed))


# Broken drafts: each in one way.


def setting(*path: str, value: Any) -> Break:
    """Set a field of the config."""

    def change(config: Config, state: Tensors) -> None:
        for name in path[:-1]:
            config = config[name]
        config[path[-1]] = value

    return change


def dropping(*names: str) -> Break:
    """Leave tensors out."""

    def change(config: Config, state: Tensors) -> None:
        for name in names:
            del state[name]

    return change


def filling(name: str, fill: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    """Replace a tensor."""

    def change(config: Config, state: Tensors) -> None:
        state[name] = fill(state[name]).contiguous().clone()

    return change


def aux_moved(config: Config, state: Tensors) -> None:
    """One layer early, by every field."""
    config[AUX] = config["eagle_config"][AUX] = [1, 3, 4]
    config["eagle_config"] = {**config["eagle_config"], AUX: [0, 2, 3]}


def other_theta(config: Config, state: Tensors) -> None:
    config["rope_theta"] = 10000.0
    config["rope_parameters"]["rope_theta"] = 10000.0


def scaling(**fields: Any) -> Break:
    """Another scaling of the rotary embedding, in both spellings."""

    def change(config: Config, state: Tensors) -> None:
        config |= {"rope_parameters": {"rope_theta": 50000.0, **fields}, "rope_scaling": fields}

    return change


def absolute(config: Config, state: Tensors) -> None:
    state["d2t"] += torch.arange(REDUCED)


def absolute_alone(config: Config, state: Tensors) -> None:
    absolute(config, state)
    del state["t2d"]


def target_layers(config: Config, state: Tensors) -> None:
    config["num_hidden_layers"] = 8


def unrecorded(change: Break) -> Break:
    """As in a draft of an earlier version, which did not keep the fields that no tensor tells."""

    def both(config: Config, state: Tensors) -> None:
        change(config, state)
        del config["foredraft"]["fields"]

    return both


def other_record(config: Config, state: Tensors) -> None:
    config["norm_output"] = False


def unflagged(config: Config, state: Tensors) -> None:
    config["fc_norm"] = False
    plain(config)


def without_scaling(config: Config, state: Tensors) -> None:
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 50000.0}
    config["rope_scaling"] = None


def named(state: Tensors, ids: torch.Tensor) -> None:
    """Another vocabulary, d2t and t2d in agreement."""
    state["d2t"] = ids - torch.arange(len(ids))
    state["t2d"] = torch.zeros(50, dtype=torch.bool).index_fill(0, ids, True)


def other_vocabulary(config: Config, state: Tensors) -> None:
    named(state, torch.cat([torch.arange(13, 25), torch.arange(26, 50, 2)]))


def swapping(one: str, other: str) -> Break:
    """Two tensors under each other's names; of doubled inputs, as of others."""

    def change(config: Config, state: Tensors) -> None:
        state[one], state[other] = state[other], state[one]

    return change


def biases(*projections: str) -> Tensors:
    """Biases of the feed-forwards of two layers."""
    return {f"layers.{i}.mlp.{x}_proj.bias": torch.ones(32 if x == "down" else 64) for i in (0, 1) for x in projections}


def by_pairs(t: torch.Tensor) -> torch.Tensor:
    """Rows of queries or keys, heads of 8, as layouts that turn neighbours have them."""
    return t.view(-1, 2, 4, t.shape[1]).transpose(1, 2).reshape(t.shape)


def noisy(t: torch.Tensor) -> torch.Tensor:
    return torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) * 0.02


BROKEN: list[tuple[str, str, bool, Break]] = [
    # id, algorithm, reduced vocabulary, what breaks it
    ("aux-looks-zero-based", "eagle3", False, unrecorded(lambda c, s: [setting(AUX, value=[1, 3, 4])(c, s), c.pop("eagle_config")])),
    ("aux-other", "eagle3", False, lambda c, s: [setting(AUX, value=[1, 3, 4])(c, s), c.pop("eagle_config")]),
    ("aux-other", "eagle3", False, aux_moved),
    ("aux-disagree", "eagle3", False, setting("eagle_config", AUX, value=[2, 4, 5])),
    ("aux-range", "eagle3", False, lambda c, s: [setting(AUX, value=[2, 4, 8])(c, s), c.pop("eagle_config")]),
    ("aux-range", "eagle3", False, lambda c, s: [setting(AUX, value=[5, 4, 2])(c, s), c.pop("eagle_config")]),
    ("aux-range", "eagle3", False, lambda c, s: [setting(AUX, value=[2, 2, 5])(c, s), c.pop("eagle_config")]),
    ("aux-range", "eagle3", False, setting(AUX, value=["2", None, 5])),
    ("aux-count", "eagle3", False, lambda c, s: [setting(AUX, value=[2, 4])(c, s), c.pop("eagle_config")]),
    ("aux-count", "eagle3", False, setting("num_aux_hidden_states", value=4)),
    ("draft-layers", "eagle3", False, target_layers),
    ("draft-layers", "dflash", False, target_layers),
    ("tensors-missing", "eagle3", False, lambda c, s: [s.pop(n) for n in list(s) if n.startswith("layers.1.")]),
    ("record-disagrees", "eagle31", False, other_record),
    ("fc-norm-flag", "eagle31", True, unflagged),
    ("fc-norm-tensors", "eagle31", True, dropping("fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight")),
    ("norm-before-fc-flag", "eagle3", False, lambda c, s: s.update({"input_norm.weight": torch.ones(96)})),
    ("eagle1-flag", "eagle3", False, setting("eagle_config", "use_aux_hidden_state", value=False)),
    ("eagle1-flag", "eagle3", False, setting("architectures", value=["EagleLlamaForCausalLM"])),
    ("d2t-missing", "eagle3", True, dropping("d2t")),
    ("d2t-absolute", "eagle3", True, absolute),
    ("d2t-absolute", "eagle3", True, absolute_alone),
    ("d2t-range", "eagle3", True, filling("d2t", lambda t: t - 1)),
    ("d2t-duplicates", "eagle3", True, filling("d2t", lambda t: torch.cat([t[:1] + 1, t[1:]]))),
    ("d2t-t2d", "eagle3", True, filling("t2d", lambda t: t.flip(0))),
    ("d2t-zero", "eagle3", True, filling("d2t", torch.zeros_like)),
    ("d2t-dtype", "eagle3", True, filling("d2t", lambda t: t.float())),
    ("d2t-shape", "eagle3", True, filling("d2t", lambda t: t[:-1])),
    ("d2t-full", "eagle3", False, lambda c, s: s.update(d2t=torch.zeros(50, dtype=torch.long))),
    ("t2d-shape", "eagle3", True, filling("t2d", lambda t: t[:-1])),
    ("lm-head-missing", "eagle3", True, dropping("lm_head.weight")),
    ("draft-vocab-size", "eagle3", True, lambda c, s: c.pop("draft_vocab_size")),
    ("vocab-size", "eagle3", False, setting("vocab_size", value=60)),
    ("vocab-size", "eagle3", True, setting("vocab_size", value=REDUCED)),
    ("target-vocab", "dflash", False, lambda c, s: c.update(vocab_size=60, draft_vocab_size=60)),
    ("target-hidden", "eagle3", False, setting("target_hidden_size", value=48)),
    ("target-layers", "eagle3", False, setting("foredraft", "target", "num_hidden_layers", value=12)),
    ("embedding-random", "eagle3", False, filling("embed_tokens.weight", noisy)),
    ("head-random", "eagle3", True, filling("lm_head.weight", noisy)),
    ("tied-embeddings", "eagle3", True, setting("tie_word_embeddings", value=True)),
    ("rope-spellings", "eagle3", False, setting("rope_theta", value=10000.0)),
    ("rope-spellings", "eagle3", False, setting("rope_scaling", value={"rope_type": "linear", "factor": 4.0})),
    ("rope-target", "eagle3", False, unrecorded(other_theta)),
    ("rope-other", "eagle3", False, other_theta),
    ("rope-fields", "eagle3", False, scaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=64)),
    ("rope-original", "eagle3", False, scaling(rope_type="yarn", factor=4.0)),
    ("rope-mrope", "eagle3", False, setting("rope_parameters", "mrope_section", value=[2, 1, 1])),
    ("rope-mrope", "eagle3", False, unrecorded(setting("rope_scaling", value={"rope_type": "default", "mrope_section": [2, 1, 1]}))),
    ("rope-missing", "eagle3", False, unrecorded(lambda c, s: [c.pop(n) for n in ("rope_theta", "rope_parameters")])),
    ("rope-theta", "eagle3", False, setting("rope_theta", value="much")),
    ("mask-token-missing", "peagle", False, lambda c, s: [c.pop(n) for n in ("mask_token_id", "ptd_token_id", "pard_token")]),
    ("mask-token-range", "peagle", False, setting("mask_token_id", value=50)),
    ("mask-token-disagree", "peagle", False, setting("ptd_token_id", value=7)),
    ("mask-token-disagree", "dflash", False, setting("dflash_config", "mask_token_id", value=7)),
    ("mask-hidden-missing", "peagle", False, dropping("mask_hidden")),
    ("mask-hidden-shape", "peagle", False, filling("mask_hidden", lambda t: t[..., :32])),
    ("sliding-window", "dflash", False, setting("layer_types", value=["sliding_attention", "full_attention"])),
    ("sliding-window", "dflash", False, setting("dflash_config", "use_swa", value=True)),
    ("layer-types", "dflash", False, setting("layer_types", value=["full_attention"])),
    ("norm-twin-differs", "eagle3", False, filling("layers.1.hidden_norm.weight", lambda t: t + 1)),
    ("tensors-missing", "eagle3", False, dropping("fc.weight")),
    ("tensors-missing", "eagle3", False, dropping("layers.0.hidden_norm.weight")),
    ("tensors-missing", "dflash", False, dropping("layers.1.self_attn.k_norm.weight")),
    ("tensors-unexpected", "eagle3", False, lambda c, s: s.update({"extra.weight": torch.ones(3)})),
    ("tensors-shape", "eagle3", False, filling("layers.0.self_attn.q_proj.weight", lambda t: t[:, :32])),
    ("tensors-shape", "eagle3", False, setting("intermediate_size", value=128)),
    ("tensors-twice", "eagle3", False, lambda c, s: s.update({"model.fc.weight": s["fc.weight"].clone()})),
    ("tensor-nan", "eagle3", False, filling("fc.weight", lambda t: t.index_fill(0, torch.tensor([3]), torch.nan))),
    ("tensor-zero", "eagle3", False, filling("norm.weight", torch.zeros_like)),
    ("rows-equal", "eagle3", True, filling("lm_head.weight", lambda t: t[:1].expand_as(t))),
    ("dtype", "eagle3", False, filling("fc.weight", lambda t: t.double())),
    ("config-types", "eagle3", False, setting("hidden_size", value="32")),
    ("config-types", "eagle3", False, setting("num_hidden_layers", value=10**30)),
    ("config-fields", "eagle3", False, lambda c, s: c.pop("num_attention_heads")),
    ("config-types", "eagle3", False, setting("architectures", value="LlamaForCausalLMEagle3")),
    ("config-types", "eagle3", False, setting("dtype", value="float12")),
    ("config-types", "eagle3", False, setting("head_dim", value=0)),
    ("config-foreign", "eagle3", False, setting("logit_scale", value=2.0)),
    ("config-foreign", "dflash", False, setting("dflash_config", "causal", value=True)),
    ("sliding-window", "eagle3", False, lambda c, s: c.update(sliding_window=64, use_sliding_window=True)),
    ("sliding-window", "dflash", False, lambda c, s: c.update(sliding_window=64, layer_types=["sliding_attention"] * 2)),
    ("d2t-other", "eagle3", True, filling("d2t", lambda t: t + 1)),
    ("d2t-other", "eagle3", True, other_vocabulary),
    ("d2t-other", "eagle3", True, lambda c, s: [named(s, torch.arange(50)[::2].flip(0)[:REDUCED].flip(0)), s.pop("t2d")]),
    ("head-order", "eagle3", False, filling("lm_head.weight", lambda t: t.roll(1, dims=0))),
    ("tensors-swapped", "eagle3", False, swapping("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight")),
    ("tensors-swapped", "dflash", False, swapping("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight")),
    ("tensors-swapped", "eagle3", False, swapping("layers.0.mlp.down_proj.weight", "layers.1.mlp.down_proj.weight")),
    ("rows-order", "eagle3", False, filling("layers.0.self_attn.q_proj.weight", by_pairs)),
    ("rows-order", "dflash", False, filling("layers.1.self_attn.k_proj.weight", by_pairs)),
    ("rows-order", "eagle3", False, filling("layers.0.self_attn.v_proj.weight", lambda t: t.roll(32, dims=1))),
    ("tensor-random", "eagle3", False, filling("layers.0.self_attn.o_proj.weight", noisy)),
    ("fc-random", "eagle3", False, filling("fc.weight", noisy)),
    ("fc-order", "eagle3", False, filling("fc.weight", lambda t: t.roll(32, dims=1))),
    ("bias-tensors", "eagle3", False, setting("attention_bias", value=True)),
    ("bias-lost", "eagle3", False, setting("foredraft", "fields", "mlp_bias", value=True)),
    ("bias-tensors", "dflash", False, setting("mlp_bias", value=True)),
    ("bias-flag", "eagle3", False, lambda c, s: s.update(biases("gate", "up", "down"))),
    ("bias-tensors", "eagle3", False, lambda c, s: [c.update(mlp_bias=True), s.update(biases("gate"))]),
    ("qk-norm-architecture", "eagle3", False, lambda c, s: s.update({f"layers.0.self_attn.{x}_norm.weight": torch.ones(8) for x in "qk"})),
    ("quantised", "eagle3", False, filling("layers.0.mlp.up_proj.weight", lambda t: (t * 100).to(torch.int8))),
    ("quantised", "eagle3", False, setting("quantization_config", value={"quant_method": "fp8"})),
    ("record-disagrees", "eagle3", False, lambda c, s: c.update(num_attention_heads=2, num_key_value_heads=1, head_dim=16)),
    ("record-disagrees", "eagle3", False, setting("rms_norm_eps", value=0.1)),
    ("record-disagrees", "eagle3", False, setting("architectures", value=["LlamaForCausalLM"])),
    ("record-disagrees", "dflash", False, setting("block_size", value=8)),
    ("record-disagrees", "eagle3", False, setting("norm_before_residual", value=True)),
    ("heads-target", "eagle3", False, unrecorded(lambda c, s: c.update(num_attention_heads=2, num_key_value_heads=1, head_dim=16))),
    ("epsilon-target", "eagle3", False, unrecorded(setting("rms_norm_eps", value=0.1))),
    ("dspark-rank", "dspark", False, setting("markov_rank", value=9)),
    ("dspark-head-type", "dspark", False, setting("markov_head_type", value="gated")),
    ("dspark-confidence", "dspark", False, dropping("confidence_head.proj.weight")),
    ("dspark-confidence-width", "dspark", False, setting("confidence_head_with_markov", value=False)),
    ("domino-size", "domino", False, setting("dflash_config", "emb_dim", value=9)),
    ("domino-projector", "domino", False, setting("dflash_config", "projector_type", value=None)),
    ("dflash2-size", "dflash2", False, setting("dflash_config", "selector_rank", value=9)),
    ("mask-token-other", "peagle", False, lambda c, s: c.update(mask_token_id=7, ptd_token_id=7, pard_token=7)),
]


@pytest.mark.parametrize(("id", "algorithm", "reduced", "change"), BROKEN, ids=[f"{b[0]}-{i}" for i, b in enumerate(BROKEN)])
def test_a_broken_draft_is_named(
    id: str, algorithm: str, reduced: bool, change: Break, sound: Callable[..., Path], target: Callable[[str], Path], tmp_path: Path
) -> None:
    found = examine(rewritten(sound(algorithm, reduced=reduced), tmp_path / "draft", change), target("llama"))
    assert id in serious(found)
    assert all(f.found and f.breaks and f.mend for f in found)


def test_a_dropped_scaling_is_named(home: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny_target(rope_parameters={**rope, "original_max_position_embeddings": 64})
    model.save_pretrained(tmp_path / "target")
    save_draft(tiny_draft(model), tmp_path / "sound")
    assert serious(examine(tmp_path / "sound", tmp_path / "target")) == set()
    broken = rewritten(tmp_path / "sound", tmp_path / "broken", without_scaling)
    assert serious(examine(broken, tmp_path / "target")) == {"rope-other"}
    older = rewritten(tmp_path / "sound", tmp_path / "older", unrecorded(without_scaling))
    assert "rope-scaling" in serious(examine(older, tmp_path / "target"))


def test_the_tokenizer_is_looked_at(sound: Callable[..., Path], target: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(target("llama"), tmp_path / "target")
    tiny_tokenizer(template=None).save_pretrained(tmp_path / "target")
    found = examine(sound(), tmp_path / "target")
    assert "tokenizer-vocab" in serious(found), f"{TOKENS} tokens do not fit 50 rows"
    assert "chat-template" in {f.id for f in found}


# Mending.

CERTAIN = [
    "d2t-absolute",
    "d2t-missing",
    "t2d-shape",
    "d2t-full",
    "d2t-dtype",
    "draft-layers",
    "record-disagrees",
    "fc-norm-flag",
    "norm-before-fc-flag",
    "eagle1-flag",
    "rope-spellings",
    "embedding-random",
    "tied-embeddings",
    "draft-vocab-size",
    "vocab-size",
    "d2t-t2d",
    "d2t-range",
    "aux-other",
    "aux-disagree",
    "rope-other",
    "rope-original",
    "mask-token-other",
    "mask-token-disagree",
    "mask-token-missing",
    "bias-flag",
]


@pytest.mark.parametrize("id", CERTAIN)
def test_what_is_certain_is_mended(id: str, sound: Callable[..., Path], target: Callable[[str], Path], tmp_path: Path) -> None:
    for i, (_, algorithm, reduced, change) in enumerate(b for b in BROKEN if b[0] == id):
        whole = sound(algorithm, reduced=reduced)
        broken = rewritten(whole, tmp_path / f"broken{i}", change)
        found = examine(broken, target("llama"))
        assert mend(open_subject(broken, target("llama")), found, tmp_path / f"mended{i}")
        assert id not in serious(examine(tmp_path / f"mended{i}", target("llama")))
        mended, wanted = (load_file(path / "model.safetensors") for path in (tmp_path / f"mended{i}", whole))
        for name in set(mended) & set(wanted):
            torch.testing.assert_close(mended[name], wanted[name], rtol=0, atol=0)


def test_each_mend_is_judged_alone(sound: Callable[..., Path], target: Callable[[str], Path], tmp_path: Path) -> None:
    """One that does no good, by the files or by what is accepted, is dropped, and the others are kept."""

    def change(config: Config, state: Tensors) -> None:
        config |= {"vocab_size": REDUCED, "rope_theta": 1.0, "tie_word_embeddings": True}

    whole = sound(reduced=True)
    broken = rewritten(whole, tmp_path / "broken", change)
    subject = open_subject(broken, target("llama"))
    before = copy.deepcopy(dict(subject.draft.config))
    assert {line.split(":")[0] for line in mend(subject, examine(broken), tmp_path / "all")} == {
        "vocab-size",
        "rope-spellings",
        "tied-embeddings",
    }
    assert subject.draft.config == before
    mended, wanted = (load_file(path / "model.safetensors") for path in (tmp_path / "all", whole))
    assert mended.keys() == wanted.keys(), "d2t and t2d are right, whatever vocab_size says"
    assert json.loads((tmp_path / "all" / "config.json").read_text()) == json.loads((whole / "config.json").read_text())

    def accepted(measured: Subject) -> float | None:
        assert measured.target is subject.target
        return 2.0 - (json.loads((measured.draft.path / "config.json").read_text())["vocab_size"] == 50)

    done = mend(subject, examine(broken), tmp_path / "some", accepted)
    assert {line.split(":")[0] for line in done} == {"rope-spellings", "tied-embeddings"}


@pytest.mark.parametrize("tuned", ["whole", "merged", "adapter", "quantised"])
def test_a_draft_for_the_base_under_a_fine_tuned_target_is_named(
    tuned: str, sound: Callable[..., Path], target: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whose embedding and head are the base's own; also one that lies as an adapter beside its base. Packed weights tell nothing."""
    other, name = tmp_path / "tuned", "layers.7.self_attn.v_proj"
    if tuned == "adapter":
        other.mkdir()
        (other / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(target("llama"))}))
        lora = {f"base_model.model.model.{name}.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
        save_file(lora, other / "adapter_model.safetensors")
    else:
        model = AutoModelForCausalLM.from_pretrained(target("llama"), dtype=torch.float32)
        model.model.get_submodule(name).weight.data *= 1.01 if tuned == "merged" else 1.1
        model.to(torch.bfloat16).save_pretrained(other)
        if tuned == "quantised":
            state = load_file(other / "model.safetensors")
            tables = ("model.embed_tokens.weight", "lm_head.weight")
            save_file(state | {n: torch.randint(-9, 9, state[n].shape).to(torch.int8) for n in tables}, other / "model.safetensors")
            fields = json.loads((other / "config.json").read_text())
            (other / "config.json").write_text(json.dumps({**fields, "quantization_config": {"quant_method": "bitsandbytes"}}))
    found = examine(sound(), other)
    assert serious(found) == (set() if tuned == "quantised" else {"target-finetuned"}), found


def test_a_draft_that_reads_every_stream_is_named(sound: Callable[..., Path], target: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(target("llama"), tmp_path / "target")
    fields = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(json.dumps({**fields, "hc_mult": 4}))
    assert "aux-streams" not in serious(examine(sound(), tmp_path / "target"))
    broken = rewritten(sound(), tmp_path / "draft", filling("fc.weight", lambda t: t.repeat(1, 4)))
    assert "aux-streams" in serious(examine(broken, tmp_path / "target"))


def test_a_target_whose_config_has_names_of_its_own(sound: Callable[..., Path], target: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(target("llama"), tmp_path / "target")
    fields = json.loads((tmp_path / "target" / "config.json").read_text())
    for layers, said in ((fields["num_hidden_layers"], set[str]()), (3, {"target-layers"})):
        sizes = {name: fields[name] for name in ("hidden_size", "vocab_size")}
        gpt = {"model_type": "gpt2", "n_layer": layers, "n_embd": sizes["hidden_size"], "vocab_size": sizes["vocab_size"]}
        for config in (gpt, {"model_type": "longcat_flash", "num_layers": layers, **sizes}):
            (tmp_path / "target" / "config.json").write_text(json.dumps(config))
            assert {f.id for f in examine(sound(), tmp_path / "target") if f.id.startswith("target-")} == said


def test_no_embedding_is_taken_from_another_target(sound: Callable[..., Path], tmp_path: Path) -> None:
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE), dtype=torch.float32).save_pretrained(tmp_path / "other")
    found = examine(sound(), tmp_path / "other")
    assert {"embedding-random", "target-other"} <= serious(found)
    older = rewritten(sound(), tmp_path / "older", lambda c, s: c["foredraft"]["target"].pop("sample"))
    assert "target-other" in serious(examine(older, tmp_path / "other")), "told by its tables, where nothing is recorded"
    with pytest.raises(ForedraftError, match="certainty"):
        mend(open_subject(sound(), tmp_path / "other"), found, tmp_path / "mended")


def test_all_mends_are_for_findings_that_exist() -> None:
    tested = {b[0] for b in BROKEN} | {"norm-twin", "aux-one-convention"}
    assert set(MENDS) <= tested


@pytest.mark.parametrize("twin", ["hidden_norm", "input_layernorm"])
def test_a_missing_twin_is_copied(twin: str, sound: Callable[..., Path], tmp_path: Path) -> None:
    def change(config: Config, state: Tensors) -> None:
        plain(config)
        del state[f"layers.1.{twin}.weight"]

    broken = rewritten(sound(), tmp_path / "broken", change)
    mend(open_subject(broken), examine(broken), tmp_path / "mended")
    state = load_file(tmp_path / "mended" / "model.safetensors")
    assert torch.equal(state["layers.1.hidden_norm.weight"], state["layers.1.input_layernorm.weight"])


def test_aux_layers_are_taken_from_the_other_convention(sound: Callable[..., Path], tmp_path: Path) -> None:
    broken = rewritten(sound(), tmp_path / "broken", lambda c, s: c.pop(AUX))
    mend(open_subject(broken), examine(broken), tmp_path / "mended")
    config = json.loads((tmp_path / "mended" / "config.json").read_text())
    assert config[AUX] == [2, 4, 5]
    assert config["eagle_config"][AUX] == [1, 3, 4]


def test_mended_aux_layers_are_the_same_by_every_field(sound: Callable[..., Path], tmp_path: Path) -> None:
    def change(config: Config, state: Tensors) -> None:
        config |= {"aux_hidden_state_layer_ids": [2, 4, 9], "target_layer_ids": [1, 3, 9]}
        config["eagle_config"][AUX] = [1, 3, 9]

    broken = rewritten(sound(), tmp_path / "broken", change)
    (broken / "mask_embedding.pt").write_bytes(b"as it was")
    assert "aux-disagree" in serious(examine(broken))
    mend(open_subject(broken), examine(broken), tmp_path / "mended")
    subject = open_subject(tmp_path / "mended")
    assert list(subject.aux_layers.values()) == [[2, 4, 5]] * 4
    assert (tmp_path / "mended" / "mask_embedding.pt").read_bytes() == b"as it was", "it is no copy of what is in the file"


def test_a_record_is_no_reason_to_count_layers_that_are_not_there(sound: Callable[..., Path], tmp_path: Path) -> None:
    def lose_a_layer(config: Config, state: Tensors) -> None:
        config["num_hidden_layers"] = 1
        for name in [n for n in state if n.startswith("layers.1.")]:
            del state[name]

    broken = rewritten(sound(), tmp_path / "broken", lose_a_layer)
    assert "record-disagrees" in serious(examine(broken))
    with pytest.raises(ForedraftError, match="certainty"):
        mend(open_subject(broken), examine(broken), tmp_path / "mended")


def test_mending_overwrites_nothing_and_guesses_nothing(sound: Callable[..., Path], tmp_path: Path) -> None:
    def lose_a_layer(config: Config, state: Tensors) -> None:
        for name in [n for n in state if n.startswith("layers.1.")]:
            del state[name]

    broken = rewritten(sound(), tmp_path / "broken", lose_a_layer)
    assert serious(examine(broken)) == {"tensors-missing"}, "the layer is missing, the count is right"
    with pytest.raises(ForedraftError, match="certainty"):
        mend(open_subject(broken), examine(broken), tmp_path / "mended")
    assert not (tmp_path / "mended").exists()
    with pytest.raises(ForedraftError, match="already"):
        mend(open_subject(broken), examine(broken), broken)


# Running the draft.

Pair = tuple[Bench, Any]
NEW = 16


OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_steps": 3, "norm_before_residual": True},
    "eagle31": {"ttt_steps": 2, "draft_vocab_size": 46},
    "dflash": {"num_layers": 1, "block_size": 4},
    "medusa": {"num_heads": 3},
}


@pytest.fixture(scope="module")
def pair() -> Callable[[str], Pair]:
    """A random target's answers, on which drafts are measured, and a draft that has learned them."""
    model = tiny_target(eos_token_id=None)
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)  # as trained norms are: applied twice, they differ
    prompts = list(torch.randint(0, 48, (4, 6), generator=torch.Generator().manual_seed(1)))
    texts = answers(model, prompts, NEW)
    rows = [
        {"input_ids": ids.tolist(), "documents": [0] * len(ids), "spans": [-1] * 6 + [0] * NEW, "row": i}
        for i, (ids, _) in enumerate(texts)
    ]
    made: dict[str, Any] = {}

    def get(algorithm: str) -> Pair:
        if algorithm not in made:
            draft = tiny_draft(model, algorithm, **OPTIONS[algorithm])
            batch = DraftCollator(draft.algorithm)(rows)
            signal = Target(model, draft.config.aux_layers).capture(batch)
            optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=2e-2)
            for _ in range(100 if algorithm == "eagle3" else 60):  # two norms that are exchanged show late
                draft(batch, signal)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
            made[algorithm] = draft.eval(), Bench(model, draft, texts)
        draft, bench = made[algorithm]
        return bench, copy.deepcopy(draft)

    return get


@pytest.mark.parametrize("algorithm", [pytest.param(name, marks=[pytest.mark.slow] * (name == "eagle3")) for name in OPTIONS])
def test_a_trained_draft_has_no_suspects(algorithm: str, pair: Callable[[str], Pair]) -> None:
    assert [f.id for f in dynamic.run(*pair(algorithm))] == ["acceptance"]


def flipped(draft: Any, name: str) -> Variant:
    return Variant("", {name: not getattr(draft.config, name)})


def shifted(draft: Any, by: int) -> Variant:
    return Variant("", {"eagle_aux_hidden_state_layer_ids": [i + by for i in draft.config.aux_layers]})


def target_ids(draft: Any) -> Variant:
    return Variant("", state={"d2t": draft.d2t + torch.arange(len(draft.d2t))})


def noise(draft: Any, *names: str) -> Variant:
    return Variant("", state={name: noisy(draft.state_dict()[name]) for name in names})


def in_place_of(draft: Any, one: str, other: str) -> Variant:
    state = draft.state_dict()
    return Variant("", state={one: state[other], other: state[one]})


def features_first(draft: Any) -> Variant:
    state, width = draft.state_dict(), draft.config.hidden_size
    return Variant("", state={n: state[n].roll(width, 1) for n in (f"layers.0.self_attn.{x}_proj.weight" for x in "qkv")})


def reordered(draft: Any, *order: int) -> Variant:
    chunks = draft.fc.weight.chunk(len(order), dim=1)
    return Variant("", state={"fc.weight": torch.cat([chunks[i] for i in order], dim=1)})


def by_pairs(draft: Any) -> Variant:
    state, size = draft.state_dict(), draft.config.head_dim
    names = ["layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"]
    return Variant("", state={n: state[n].unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2) for n in names})


SUSPECTED: list[tuple[str, str, Callable[[Any], Variant]]] = [
    ("aux", "medusa", lambda d: shifted(d, 1)),
    ("aux", "medusa", lambda d: shifted(d, -1)),
    ("norms", "eagle31", lambda d: flipped(d, "norm_output")),
    ("norms", "eagle3", lambda d: flipped(d, "norm_before_residual")),
    ("norms", "eagle3", lambda d: Variant("", state={n: t - 1 for n, t in d.state_dict().items() if n.endswith("norm.weight")})),
    ("norms", "eagle3", lambda d: in_place_of(d, "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight")),
    ("d2t", "eagle31", target_ids),
    ("rope", "eagle31", lambda d: Variant("", {"rope_parameters": {"rope_type": "default", "rope_theta": 2.0}})),
    ("layout", "eagle31", by_pairs),
    ("shape", "eagle31", lambda d: Variant("", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16})),
    ("shape", "eagle3", lambda d: Variant("", {"rms_norm_eps": 1.0})),
    ("swapped", "eagle31", lambda d: in_place_of(d, *(f"layers.0.self_attn.{x}_proj.weight" for x in "kv"))),
    ("swapped", "eagle3", lambda d: in_place_of(d, *(f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up")))),
    ("order", "eagle31", features_first),
    ("order", "medusa", lambda d: reordered(d, 1, 2, 0)),
    ("embedding", "eagle31", lambda d: noise(d, "embed_tokens.weight")),
    ("head", "dflash", lambda d: noise(d, "lm_head.weight")),
    ("mask-token", "dflash", lambda d: Variant("", {"mask_token_id": 3})),
    ("noise", "eagle31", lambda d: noise(d, "fc.weight")),
]


FIRST = {id: i for i, (id, *_) in reversed([*enumerate(SUSPECTED)])}
"""Each suspect once in every run, in all its ways among the slow tests."""


@pytest.mark.parametrize(
    ("id", "algorithm", "change"),
    [pytest.param(*s, id=f"{s[0]}-{i}", marks=() if FIRST[s[0]] == i else pytest.mark.slow) for i, s in enumerate(SUSPECTED)],
)
def test_the_suspect_that_fits_is_named(id: str, algorithm: str, change: Callable[[Any], Variant], pair: Callable[[str], Pair]) -> None:
    bench, draft = pair(algorithm)
    found = dynamic.run(bench, change(draft).of(draft))
    assert [f.id for f in found] == [f"suspect-{id}", "acceptance"], [f.found for f in found]
    assert found[0].found.count("teacher-forced") == found[0].found.count("decoded") == 2, "both numbers, before and after"


def test_what_sound_drafts_gain_by_must_gain_much() -> None:
    """More norms keep a sound draft's states from growing past the steps of its training."""
    count_UK = torch.full((8, 4), 100.0)
    weak, better, best = (Forced(count_UK, share * count_UK, share * count_UK, (1 - share) * count_UK) for share in (0.7, 0.78, 0.95))
    every = {s.id for s in suspects.SUSPECTS}
    assert {s.id for s in suspects.SUSPECTS if dynamic.Trial(s, "", cast(Any, None), weak, better).fits} == every - {"norms"}
    assert {s.id for s in suspects.SUSPECTS if dynamic.Trial(s, "", cast(Any, None), weak, best).fits} == every


def test_a_draft_that_learned_nothing_is_low(pair: Callable[[str], Pair]) -> None:
    bench, draft = pair("medusa")
    broken = noise(draft, "fc.weight", *(f"heads.{i}.weight" for i in range(3))).of(draft)
    assert [f.id for f in dynamic.run(bench, broken)] == ["acceptance-low", "acceptance"]


def test_a_gap_between_training_and_decoding_is_named(pair: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding that ignores the draft past its first token."""
    monkeypatch.setattr(AutoregressiveDrafter, "_draft", lambda self, ids, hidden, visible: torch.zeros_like(hidden))
    assert [f.id for f in dynamic.run(*pair("eagle31"))] == ["acceptance-gap", "acceptance"]


def test_a_cause_is_told_once(pair: Callable[[str], Pair]) -> None:
    """What the files name and the run confirms is one finding; of causes that explain it equally well, none is named, or the files' one."""
    bench, draft = pair("medusa")
    found = [warning("aux-looks-zero-based", "0", "", ""), note("positions", "", "", "")]
    told = dynamic.merged(found, dynamic.run(bench, shifted(draft, -1).of(draft), found))
    assert [f.id for f in told] == ["aux-looks-zero-based", "positions", "acceptance"]
    assert told[0].severity == "error"
    assert "measured: τ" in told[0].found


def test_causes_that_explain_it_equally_are_not_chosen_from(pair: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    bench, draft = pair("medusa")
    twin = replace(next(s for s in suspects.SUSPECTS if s.id == "aux"), id="other", named=("other-",))
    monkeypatch.setattr(dynamic, "SUSPECTS", (*suspects.SUSPECTS, twin))
    broken = shifted(draft, 1).of(draft)
    assert [f.id for f in dynamic.run(bench, broken)] == ["suspects-close", "acceptance"]
    assert [f.id for f in dynamic.run(bench, broken, [note("other-files", "", "", "")])] == ["suspect-other", "acceptance"]


# The command.


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a target, its tokenizer and a draft; answers are short."""
    monkeypatch.setattr(dynamic, "NEW_TOKENS", 16)
    tokenizer = tiny_tokenizer()
    model = tiny_target(vocab=len(tokenizer))
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    save_draft(tiny_draft(model), tmp_path / "draft")
    return tmp_path


def doctor(*arguments: Any) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_the_command_measures_and_mends(served: Path) -> None:
    (served / "prompts.jsonl").write_text(json.dumps({"prompt": "hello"}))
    asked = [str(served / "draft"), "--target", str(served / "target"), "--prompts", str(served / "prompts.jsonl")]
    result = CliRunner().invoke(app, ["doctor", *asked, "--json"])
    status, told, progress = result.exit_code, json.loads(result.stdout), result.stderr
    assert status == 0
    assert "acceptance" in {f["id"] for f in told["findings"]}
    assert f"trying what may be wrong: {len(suspects.SUSPECTS)} of {len(suspects.SUSPECTS)}" in progress
    broken = rewritten(served / "draft", served / "broken", setting("rope_theta", value=1.0))
    status, told = doctor(broken, "--target", served / "target", "--no-measure")
    assert (status, [f["id"] for f in told["findings"] if f["severity"] == "error"]) == (1, ["rope-spellings"])
    status, told = doctor(broken, "--target", served / "target", "--no-measure", "--fix", served / "mended")
    assert (status, len(told["mended"])) == (0, 1)
    assert auto_draft(served / "mended").config.rope_parameters["rope_theta"] == 10000.0


def test_findings_are_told_where_nothing_can_be_mended(served: Path) -> None:
    broken = rewritten(served / "draft", served / "broken", lambda c, s: s["norm.weight"].fill_(float("nan")))
    status, told = doctor(broken, "--fix", served / "mended")
    assert (status, told["mended"], told["draft"]) == (1, [], str(broken))
    assert "tensor-nan" in {f["id"] for f in told["findings"]}
    assert not (served / "mended").exists()


def test_the_command_shows_a_table(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    broken = rewritten(served / "draft", served / "broken", setting("num_hidden_layers", value=8))
    result = CliRunner().invoke(app, ["doctor", str(broken)])
    assert result.exit_code == 1
    assert "draft-layers" in result.stdout
    assert "set num_hidden_layers to 1" in result.stdout


def test_a_peer_s_draft_is_measured_as_deep_as_all_train(served: Path) -> None:
    """Past the steps of its training, a sound draft may gain by norms that are wrong."""
    draft = rewritten(served / "draft", served / "peer", spec_forge)
    (served / "prompts.jsonl").write_text(json.dumps({"prompt": "hello"}))
    found = Runner(served / "prompts.jsonl").findings(open_subject(draft, served / "target"))
    assert [f.id for f in found][-1] == "acceptance", [f.found for f in found]
    assert found[-1].found.endswith("3 tokens drafted at most")


@pytest.mark.parametrize("change", [dropping("fc.weight"), filling("fc.weight", lambda t: (100 * t).to(torch.int8))])
def test_what_cannot_be_loaded_is_not_measured(change: Break, served: Path) -> None:
    broken = rewritten(served / "draft", served / "broken", change)
    assert [f.id for f in Runner().findings(open_subject(broken, served / "target"))] == ["acceptance-unmeasured"]


def test_a_draft_that_crashes_is_not_measured(served: Path) -> None:
    """A mask token beyond the embedding."""
    model = AutoModelForCausalLM.from_pretrained(served / "target")
    save_draft(tiny_draft(model, "peagle", num_layers=1), served / "parallel")
    broken = rewritten(served / "parallel", served / "broken", setting("mask_token_id", value=10**6))
    (served / "prompts.jsonl").write_text(json.dumps({"prompt": "hello"}))
    found = Runner(served / "prompts.jsonl").findings(open_subject(broken, served / "target"))
    assert [f.id for f in found] == ["acceptance-unmeasured"]


class Picky(EngineBase):
    """Serves nothing."""

    name = "picky"

    def refuses(self, config: Any) -> str | None:
        return "it is picky"

    def arguments(self, config: Any, draft: str, target: str, num_tokens: int) -> list[str]:
        return []


class Clumsy(Picky):
    """Stumbles."""

    name = "clumsy"

    def findings(self, checkpoint: Checkpoint) -> list[Finding]:
        raise KeyError("oh")


def test_engines_have_their_say(served: Path) -> None:
    checkpoint = Checkpoint.open(served / "draft")
    assert [(f.id, f.severity) for f in ask_engines(checkpoint, [Picky, Clumsy], asked=True)] == [
        ("picky-refuses", "error"),
        ("clumsy-checks", "warning"),
    ]
    told = ask_engines(checkpoint, [Picky, Clumsy, type("Fussy", (Picky,), {"name": "fussy"})], asked=False)
    assert [(f.id, f.severity) for f in told] == [("clumsy-checks", "note"), ("engines-refuse", "note")]
    assert told[-1].found == "picky: it is picky; fussy: it is picky"


# Files that nobody should trust.


def test_only_a_directory_can_be_examined(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match="no directory"):
        examine(tmp_path / "nothing")
    assert serious(examine(tmp_path)) == {"config-json", "weights-none"}


def test_an_index_does_not_lead_out_of_its_directory(sound: Callable[..., Path], tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    save_file({"secret": torch.ones(2)}, secret)
    draft = tmp_path / "draft"
    shutil.copytree(sound(), draft)
    for path in ("../secret.safetensors", str(secret), "a/../../secret.safetensors", "..\\secret.safetensors", "model.bin", "", 3):
        index = {"weight_map": {"secret": path, "fc.weight": "model.safetensors"}}
        (draft / "model.safetensors.index.json").write_text(json.dumps(index))
        checkpoint = Checkpoint.open(draft)
        assert "secret" not in checkpoint.tensors
        assert {f.id for f in checkpoint.findings} & {"index-files", "weights-damaged"}, path


def test_shards_are_read_by_their_index(sound: Callable[..., Path], tmp_path: Path) -> None:
    state = load_file(sound() / "model.safetensors")
    shutil.copy(sound() / "config.json", tmp_path)
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: state[n] for n in part}, tmp_path / file)
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint.open(tmp_path)
    assert serious(examine(tmp_path)) == set()
    assert all(torch.equal(checkpoint.tensor(n), state[n]) for n in names)
    (tmp_path / "b.safetensors").unlink()
    assert {"weights-damaged", "index-lost"} <= serious(examine(tmp_path))


def test_a_tensor_in_two_files_is_named(sound: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(sound(), tmp_path / "draft")
    norm = load_file(sound() / "model.safetensors")["norm.weight"]
    for value, expected in ((norm, set()), (norm + 1, {"tensors-twice"})):
        save_file({"norm.weight": value}, tmp_path / "draft" / "adapter.safetensors")
        assert serious(examine(tmp_path / "draft")) == expected
    index = {"weight_map": dict.fromkeys(load_file(sound() / "model.safetensors"), "model.safetensors")}
    (tmp_path / "draft" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert serious(examine(tmp_path / "draft")) == set(), "the index says which counts"


def test_a_third_party_s_prefix_algorithm_needs_no_mask_token(sound: Callable[..., Path], tmp_path: Path) -> None:
    def change(config: Config, state: Tensors) -> None:
        for name in ("mask_token_id", "dflash_config"):
            del config[name]
        config["foredraft"] |= {"algorithm": "another", "options": {}, "fields": {}}
        config["foredraft"]["spec"] |= {"mask_token": False}

    assert serious(examine(rewritten(sound("dflash"), tmp_path / "draft", change))) == set()


def test_a_pickle_runs_no_code_and_claims_no_memory(sound: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copy(sound() / "config.json", tmp_path)
    mark = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (mark,))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Evil()}))
    assert "weights-damaged" in serious(examine(tmp_path))
    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    assert "weights-damaged" in serious(examine(tmp_path))
    assert not mark.exists()
    assert "weights_only" not in examine(tmp_path)[0].found, "torch's own message says how to run the code"
    odd = {"fc.weight": torch.empty(2, 2, device="meta"), "norm.weight": torch.eye(2).to_sparse()}
    torch.save({**odd, "d2t": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert list(Checkpoint.open(tmp_path).tensors) == ["d2t"], "what has no numbers of its own, or lies in no plain order"
    examine(tmp_path)
    torch.save({"fc.weight": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "pytorch_model.bin")
    assert Checkpoint.open(tmp_path).tensors == {}


def test_a_pipe_is_not_waited_for(sound: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copy(sound() / "config.json", tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")
    assert [f.found for f in Checkpoint.open(tmp_path).findings] == ["model.safetensors could not be read: it is no regular file"]


def test_a_file_cut_off_is_named(sound: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(sound(), tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    content = file.read_bytes()
    for size in (0, 5, 100, len(content) - 1):
        file.write_bytes(content[:size])
        assert "weights-damaged" in serious(examine(tmp_path / "draft"))


texts = st.text("aZ_.9 -/{é漢😀\x00\x1b\ud800", max_size=8)  # of all of Unicode, hypothesis makes tables for seconds
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
many = settings(max_examples=30, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


@many
@given(data=st.data())
def test_any_config_gives_findings(data: st.DataObject, sound: Callable[..., Path], target: Callable[[str], Path]) -> None:
    """A sound config with some fields, also nested ones, replaced by anything: a list of findings, no other outcome."""
    algorithm = data.draw(st.sampled_from(["eagle3", "peagle", "dflash", "medusa"]))
    draft = Checkpoint.open(sound(algorithm))
    config = copy.deepcopy(dict(draft.config))
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=4)):
        place, inner = config, config[name]
        if isinstance(inner, dict) and inner and data.draw(st.booleans()):
            place, name = inner, data.draw(st.sampled_from(sorted(inner)))
        place[name] = data.draw(anything)
    whole = Checkpoint.open(target("llama"))
    for check in CHECKS:
        assert all(isinstance(f, Finding) for f in check(Subject(Checkpoint(draft.path, config, draft.tensors), whole)))
        assert all(isinstance(f, Finding) for f in check(Subject(draft, Checkpoint(whole.path, config, whole.tensors))))


@many
@given(content=st.one_of(st.binary(max_size=40), anything.map(lambda v: json.dumps(v).encode()), st.just(b"[" * 100_000)))
def test_any_file_gives_findings(content: bytes, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(content)
        assert serious(examine(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_bytes(b'{"weight_map": ' + content + b"}")
    assert serious(examine(tmp_path))
    for file in tmp_path.iterdir():
        file.unlink()
