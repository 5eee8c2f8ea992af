"""Sound drafts to plant defects in: tiny targets of several families that can be predicted, and trained drafts for them.

The language: token x_t follows from x_{t-3}, so a draft that does not attend three places back, by the right rotary embedding, is
wrong. Everything is trained once and kept under `.cache/doctor`.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from matrix import rows_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from foredraft import BaseDraft, DraftCollator, Target, auto_draft, save_draft
from foredraft.formats.exporting import export_draft

CACHE = Path(__file__).parent.parent / ".cache" / "doctor"
LETTERS = [chr(i) for i in range(32, 127)]
SPOKEN, LENGTH, BACK = 64, 48, 3
SHAPE = {
    "vocab_size": len(LETTERS) + 1,  # one token that no text holds
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DEFAULT = {"rope_type": "default", "rope_theta": 50000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 50000.0,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0],
    "short_factor": [1.0, 1.0, 1.1, 1.2, 1.4, 1.6, 2.0, 2.0],
    "original_max_position_embeddings": 64,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SHAPE, "rope_parameters": DEFAULT},
    "llama-other": {"model_type": "llama", **SHAPE, "rope_parameters": DEFAULT},
    "llama3-tied": {"model_type": "llama", **SHAPE, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "qwen3-yarn": {"model_type": "qwen3", **SHAPE, "head_dim": 32, "rope_parameters": YARN},
    "phi3-longrope": {"model_type": "phi3", **SHAPE, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    "deepseek": {"model_type": "deepseek_v3", **SHAPE, **LATENT, **EXPERTS, "first_k_dense_replace": 4, "rope_parameters": YARN},
}


@dataclass(frozen=True)
class Base:
    """A sound draft: how it is made."""

    family: str
    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    reduced: int | None = 60
    steps: int = 100
    turned: bool = False
    """Whether its layers look unlike the target's and compute the same: neurons in another order, values, queries and keys turned."""
    biased: bool = False
    """Whether it has biases, which no draft of foredraft's own making has."""
    export: str | None = None
    """The other format it is written in."""


EAGLE, PEAGLE, DFLASH = {"ttt_steps": 4}, {"num_depths": 4}, {"block_size": 5, "num_layers": 2, "anchors": 16}
BASES: dict[str, Base] = {
    "eagle3": Base("llama", "eagle3", EAGLE),
    "eagle3-whole": Base("llama3-tied", "eagle3", EAGLE, reduced=None),
    "eagle3-two-layers": Base("qwen3-yarn", "eagle3", {**EAGLE, "num_layers": 2, "qk_norm": True}),
    "eagle3-biased": Base("llama", "eagle3", EAGLE, biased=True),
    "eagle3-nbr": Base("llama", "eagle3", {**EAGLE, "norm_before_residual": True}, steps=180),
    "eagle3-turned": Base("llama", "eagle3", EAGLE, turned=True),
    "eagle3-phi3": Base("phi3-longrope", "eagle3", EAGLE),
    "eagle31": Base("phi3-longrope", "eagle31", EAGLE),
    "eagle3-latent": Base("deepseek", "eagle3", EAGLE),
    "eagle3-weak": Base("llama", "eagle3", EAGLE, steps=55),
    "eagle31-weak": Base("llama3-tied", "eagle31", EAGLE, steps=55),
    "peagle": Base("llama3-tied", "peagle", {**PEAGLE, "num_layers": 1}, steps=300),
    "peagle-two-layers": Base("qwen3-yarn", "peagle", {**PEAGLE, "num_layers": 2, "qk_norm": True}, reduced=None, steps=200),
    "dflash": Base("qwen3-yarn", "dflash", DFLASH, reduced=None),
    "dflash-llama": Base("llama", "dflash", DFLASH, reduced=None),
    "medusa": Base("llama", "medusa", {"num_heads": 4}, reduced=None),
    "eagle3-speculators": Base("llama", "eagle3", EAGLE, export="speculators"),
    "eagle3-nbr-speculators": Base("llama", "eagle3", {**EAGLE, "norm_before_residual": True}, steps=180, export="speculators"),
    "peagle-speculators": Base("llama3-tied", "peagle", {**PEAGLE, "num_layers": 1}, steps=300, export="speculators"),
    "dflash-speculators": Base("qwen3-yarn", "dflash", DFLASH, reduced=None, export="speculators"),
}


def following(seed: int) -> Tensor:
    """[V] what follows each token three places on: one cycle through the spoken tokens; the others lead into it."""
    generator = torch.Generator().manual_seed(seed)
    spoken = torch.randperm(len(LETTERS), generator=generator)[:SPOKEN]
    after = spoken[torch.randint(SPOKEN, (SHAPE["vocab_size"],), generator=generator)]
    after[spoken] = spoken.roll(-1)
    return after


def texts(seed: int, count: int, length: int = LENGTH, noise: float = 0.03) -> Tensor:
    """[count, length] of the language."""
    after, generator = following(0), torch.Generator().manual_seed(seed)
    ids = torch.randint(len(LETTERS), (count, length), generator=generator)
    noisy = torch.rand(count, length, generator=generator) < noise
    for t in range(BACK, length):
        ids[:, t] = torch.where(noisy[:, t], ids[:, t], after[ids[:, t - BACK]])
    return ids


def tokenizer() -> PreTrainedTokenizerFast:
    """A token per printable letter."""
    inner = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=" "))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=" ")
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made now if it is not there; all or nothing."""
    if not path.exists():
        temporary = path.with_name(f"{path.name}.partial")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        make(temporary)
        temporary.rename(path)
    return path


def target_path(family: str) -> Path:
    """The directory of a trained target."""
    return made_once(CACHE / "targets" / family, lambda path: _train_target(family, path))


@cache
def target_model(family: str) -> PreTrainedModel:
    """The trained target."""
    return AutoModelForCausalLM.from_pretrained(target_path(family), dtype=torch.float32).eval()


def draft_path(name: str) -> Path:
    """The directory of a base draft."""
    base = BASES[name]
    if base.export:
        plain, form = next(n for n, b in BASES.items() if b == replace(base, export=None)), base.export
        return made_once(CACHE / "drafts" / name, lambda path: export_draft(draft_path(plain), path, form))
    if base.turned:
        return made_once(CACHE / "drafts" / name, _save_turned)
    return made_once(CACHE / "drafts" / name, lambda path: _train_draft(base, path))


def _save_turned(path: Path) -> None:
    draft = auto_draft(draft_path("eagle3"))
    _turn(draft)
    save_draft(draft, path)


@torch.no_grad()
def _turn(draft: BaseDraft) -> None:
    """What drafts look like whose layers began at random, as other projects' do, for a draft of the llama's shape."""
    generator, head = torch.Generator().manual_seed(0), 16
    layer = draft.layers[0]
    order = torch.randperm(SHAPE["intermediate_size"], generator=generator)
    for module, dim in ((layer.mlp.gate_proj, 0), (layer.mlp.up_proj, 0), (layer.mlp.down_proj, 1)):
        module.weight.copy_(module.weight.index_select(dim, order))
    attention = layer.self_attn
    for g in range(SHAPE["num_key_value_heads"]):
        turn, _ = torch.linalg.qr(torch.randn(head, head, generator=generator))
        angle = 6.28 * torch.rand(head // 2, generator=generator)
        cos, sin = torch.diag(angle.cos()), torch.diag(angle.sin())
        rotate = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])
        keys, queries = slice(g * head, (g + 1) * head), [slice(h * head, (h + 1) * head) for h in (2 * g, 2 * g + 1)]
        attention.v_proj.weight[keys] = turn @ attention.v_proj.weight[keys]
        attention.k_proj.weight[keys] = rotate @ attention.k_proj.weight[keys]
        for rows in queries:
            attention.o_proj.weight[:, rows] = attention.o_proj.weight[:, rows] @ turn.T
            attention.q_proj.weight[rows] = rotate @ attention.q_proj.weight[rows]


def _train_target(family: str, path: Path, steps: int = 250) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TARGETS[family]), dtype=torch.float32)
    if family == "llama-other":
        _reorder(model)
    else:
        _teach(model, steps)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)


@torch.no_grad()
def _reorder(model: PreTrainedModel) -> None:
    """The trained llama with its tokens in another order."""
    model.load_state_dict(target_model("llama").state_dict())
    order = torch.randperm(SHAPE["vocab_size"], generator=torch.Generator().manual_seed(1))
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.weight.copy_(module.weight[order])


def _teach(model: PreTrainedModel, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        ids = texts(step + 1, 16)
        loss = F.cross_entropy(model(input_ids=ids).logits[:, BACK - 1 : -1].flatten(0, 1), ids[:, BACK:].flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    print(f"target {model.config.model_type}: loss {loss.item():.3f}", flush=True)


def _train_draft(base: Base, path: Path) -> None:
    torch.manual_seed(0)
    model = target_model(base.family)
    draft = auto_draft(model.config, base.algorithm, draft_vocab_size=base.reduced, **base.options)
    if base.biased:
        draft.config.update({"attention_bias": True, "mlp_bias": True})
        draft = type(draft)(draft.config, draft.algorithm)
        for parameter in (p for name, p in draft.named_parameters() if name.endswith(".bias")):
            torch.nn.init.normal_(parameter, std=0.2)
    target = Target(model, draft.config.aux_layers)
    rows = rows_of(texts(10_000, 512))
    draft.start_from(target, rows)
    collate = DraftCollator(draft.algorithm)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=2e-3)
    draft.train()
    for step in range(base.steps):
        collate.epoch = step // 64
        batch = collate(rows[8 * (step % 64) : 8 * (step % 64) + 8])
        loss = draft(batch, target.capture(batch))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"draft {path.name}: loss {loss.item():.3f}", flush=True)
    save_draft(draft.eval(), path)
