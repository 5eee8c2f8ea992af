"""Which targets can be drafted for: asked of a tiny random model of their family, not of a list."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from typing import Any, cast

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.utils import logging

from ..auto import auto_draft
from ..contracts.algorithm import AlgorithmBase, Choose, DrafterBase
from ..contracts.draft import DraftModel
from ..data import DraftCollator
from ..errors import ForedraftError, nearest
from ..registry import Registry, default_registry
from ..target.capture import AuxCapture, decoder_layers
from ..target.loading import auto_class
from ..target.target import Target
from . import generate

LAYERS, VOCABULARY, LARGEST = 8, 64, 5_000_000

# What a family's config is shrunk to, where it has the field under this name or by its attribute_map.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "swa_head_dim": 8,
    "rotary_dim": 8,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "ffn_hidden_size": 64,
    "ffn_dim": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 8,  # shorter than the texts below, so that windows slide
    "attention_types": [[["global", "local"], LAYERS // 2]],
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# The same for what reads images and sound, which is not run.
SENSES: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "d_model": 32,
    "projection_dim": 32,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "out_hidden_size": 32,
    "intermediate_size": 64,
    "mlp_dim": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "depth": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_heads": 4,
    "head_dim": 8,
    "image_size": 32,
    "patch_size": 8,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
}


@dataclass(frozen=True)
class Verdict:
    """Whether drafts for a model_type work, and by which adapter."""

    model_type: str
    text_type: str
    """The model_type of what reads and writes text in it: another one where it is multimodal."""
    adapter: str | None = None
    problem: str | None = None
    """Why not; None if a training step and a lossless greedy decode worked."""


@lru_cache(maxsize=4)
def tiny_model(config_class: Any) -> PreTrainedModel:
    """A random model of a config class's family, small enough for milliseconds. Raises what transformers raises if it cannot be built."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        config = _shrunk(config_class)
        family = auto_class(config)
        with torch.device("meta"):
            size = family.from_config(config).num_parameters()
        if size > LARGEST:
            raise ForedraftError(f"shrunk, it still has {size:,} parameters")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = family.from_config(config, dtype=torch.float32).eval()
            for weight in model.parameters():  # a router of zeros ties its experts: which it takes follows from the width of a forward
                if weight.ndim > 1 and not weight.any():
                    torch.nn.init.normal_(weight, std=SMALL["initializer_range"])
    finally:
        logging.set_verbosity(verbosity)
    model.generation_config.eos_token_id = None  # texts of full length
    return model


def _shrunk(config_class: Any) -> PretrainedConfig:
    """A small config of this class; of one that has parts, what reads and writes text is shrunk by `SMALL`, what sees by `SENSES`."""
    whole = config_class()
    text = whole.get_text_config()
    parts = {name: part for name in config_class.sub_configs if isinstance(part := getattr(whole, name, None), PretrainedConfig)}
    if text is whole:
        return config_class(**_sizes(whole, SMALL))
    small = {name: {"model_type": part.model_type, **_sizes(part, SMALL if part is text else SENSES)} for name, part in parts.items()}
    return config_class(**small)


def _sizes(config: PretrainedConfig, small: dict[str, Any]) -> dict[str, Any]:
    """Those of `small` that a config has, and what must agree with them."""
    names = {*dir(config), *config.attribute_map, *config.to_dict()}
    names -= {name for name in names if isinstance(getattr(type(config), name, None), property)}
    sizes = {name: value for name, value in small.items() if name in names}
    if getattr(config, "sliding_window", None) is None:  # a cache believes in a window that the model may not have
        sizes.pop("sliding_window", None)
    if "kv_lora_rank" in names:  # latent attention has as many of either
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    rope = getattr(config, "rope_parameters", None) or {}
    if "mrope_section" in {*rope, *config.ignore_keys_at_rope_validation}:
        turned = int(small["head_dim"] * (rope.get("partial_rotary_factor") or 1.0)) // 2
        sizes["rope_parameters"] = {**rope, "mrope_section": [turned - 2 * (turned // 3), turned // 3, turned // 3]}
    return sizes


def objection(target: PretrainedConfig) -> str | None:
    """Why a target with this config cannot be drafted for, as far as a tiny model of its family shows; None if it can."""
    family: Any = type(target if type(target) in MODEL_FOR_MULTIMODAL_LM_MAPPING else target.get_text_config())
    with torch.device("cpu"):  # the draft may be planned on the meta device
        return _objection(family)


@cache
def _objection(config_class: Any) -> str | None:
    try:
        if config_class().is_encoder_decoder:
            return "it is an encoder with a decoder"
        known = next((m for m in (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING) if config_class in m), None)
        if known is None:
            return "transformers has no language model of its own for it"
        if known[config_class]._is_stateful:
            return "it keeps a recurrent state, which cannot go back to before a rejected draft"
        model = tiny_model(config_class)
    except Exception as error:  # a family's code may raise anything
        return f"no tiny model of its family can be built to look at: {_short(error)}"
    try:
        examine(model)
    except ForedraftError as error:
        return _short(error)
    except Exception as error:
        return f"a tiny model of its family fails: {_short(error)}"
    return None


@torch.no_grad()
def examine(model: PreTrainedModel) -> None:
    """Raises `ForedraftError` unless the model is causal, its hidden states can be captured, its head is understood, and
    verifying drafted tokens, some of them wrong, leaves its text as it is."""
    ids = _text(12)
    early, all_ = (model(input_ids=i, use_cache=False).logits for i in (ids[:, :8], ids))
    if not torch.allclose(early, all_[:, :8], rtol=1e-3, atol=1e-3 * float(early.abs().max())):
        raise ForedraftError("its logits depend on what follows: it is no causal decoder")
    count = len(decoder_layers(model))
    target = Target(model, tuple(range(1, count)))
    with AuxCapture(model, target.aux_layers) as captured:
        out = target.decoder(input_ids=ids, use_cache=False, output_hidden_states=True)
    text, embedding = model.config.get_text_config(), tuple(target.embedding_weight.shape)
    vocabulary, width = text.vocab_size, text.hidden_size
    if embedding != (vocabulary, width):
        raise ForedraftError(f"its embedding is {embedding}, not its vocabulary by its hidden size, {(vocabulary, width)}")
    expected = torch.cat(out.hidden_states[1:count], dim=-1) if len(out.hidden_states or ()) == count + 1 else None
    if captured.aux_BSA.shape != (1, 12, (count - 1) * width):
        raise ForedraftError(f"its layers hand on states of shape {tuple(captured.aux_BSA.shape)}, not one vector of {width} per token")
    if expected is None or not torch.equal(expected, captured.aux_BSA):
        raise ForedraftError("what its layers put out is not what it calls its hidden states")
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **settings)
    if not torch.equal(generate(model, _Foretold(plain[0], vocabulary), ids, num_draft_tokens=3, **settings), plain):
        raise ForedraftError("verifying drafted tokens changes its text (its cache cannot go back, perhaps)")


class _Foretold(DrafterBase):
    """Drafts a text that is known, but for every fifth token."""

    name = "foretold"

    def __init__(self, text_L: Tensor, vocabulary: int):
        super().__init__()
        self.text = [(token + (i % 5 == 0)) % vocabulary for i, token in enumerate(text_L.tolist())]

    def drafter(self, draft: DraftModel | None) -> "_Foretold":
        return self

    def propose(self, ids: Tensor, aux_1NA: Tensor, limit: int, choose: Choose) -> tuple[list[int], list[Tensor]]:
        return self.text[len(ids) : len(ids) + limit], []


def try_out(model: PreTrainedModel, registry: Registry | None = None, **options: Any) -> Any:
    """A draft for `model` after a training step and a greedy decode; `options` as in `auto_draft`.

    Raises `ForedraftError` if a trainable parameter gets no gradient, or the decoded text is not the target's own.
    """
    draft = auto_draft(model.config, registry=registry, **options)
    target = Target(model, draft.config.aux_layers)
    draft.start_from(target)
    ids = _text(20)[0].tolist()
    row = {"input_ids": ids, "documents": [0] * 9 + [1] * 11, "spans": [-1] * 2 + [0] * 7 + [-1] * 2 + [1] * 9, "row": 0}
    batch = DraftCollator(cast(AlgorithmBase, draft.algorithm))([row])
    loss = draft(batch, target.capture(batch))["loss"]
    loss.backward()
    moved = {name: p.grad is not None and bool(p.grad.any() and p.grad.isfinite().all()) for name, p in draft.named_parameters()}
    if idle := [name for name, p in draft.named_parameters() if p.requires_grad and not moved[name]]:
        raise ForedraftError(f"a training step (loss {float(loss):.3g}) gave no gradient to {', '.join(idle)}")
    draft.eval()
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    if not torch.equal(generate(model, draft, _text(12), **settings), model.generate(_text(12), **settings)):
        raise ForedraftError("decoding with a draft changes the target's text")
    return draft


def verdict(model_type: str, registry: Registry | None = None) -> Verdict:
    """What becomes of targets of a `model_type` of transformers. Raises `ForedraftError` if it knows no such type."""
    if model_type not in CONFIG_MAPPING:
        raise ForedraftError(f"transformers knows no model_type '{model_type}'{nearest(model_type, CONFIG_MAPPING.keys())}")
    registry, adapter, text_type = registry or default_registry(), None, model_type
    try:
        whole = CONFIG_MAPPING[model_type]()
        text_type = whole.get_text_config().model_type
        if not any(text_type in a.model_types for a in registry.adapters().values()) and (problem := objection(whole)):
            return Verdict(model_type, text_type, None, problem)
        adapter = registry.adapter_for(text_type, whole).name
        family: Any = type(whole if type(whole) in MODEL_FOR_MULTIMODAL_LM_MAPPING else whole.get_text_config())
        try_out(tiny_model(family), registry)
    except Exception as error:  # a family's code may raise anything
        return Verdict(model_type, text_type, adapter, _short(error))
    return Verdict(model_type, text_type, adapter)


def as_markdown(verdicts: Sequence[Verdict]) -> str:
    """The page `docs/targets.md`."""
    works = [v for v in verdicts if v.problem is None]
    own = sum(v.adapter != "generic" for v in works)
    rows = [
        f"| {v.model_type} | {v.adapter or ''} | {'works' if v.problem is None else v.problem.replace('|', '/')}"
        f"{f' (as {v.text_type})' if v.text_type != v.model_type else ''} |"
        for v in verdicts
    ]
    return (
        f"# Targets\n\nOf the {len(verdicts)} model types that transformers {metadata.version('transformers')} offers as causal language "
        f"models, drafts can be made for {len(works)}: {own} by an adapter of their own, the others by "
        "the generic one. *Works* means: on a tiny random model of the family, hidden states and head were understood, an EAGLE-3 training "
        "step gave every trainable parameter a gradient, and greedy decoding with the draft gave the target's own text. It says nothing "
        "of how well a draft does, nor which engine serves it. Written by `foredraft targets --write docs/targets.md`.\n\n"
        "| model_type | adapter | |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def _text(length: int) -> Tensor:
    """The ids of a text [1, length] that repeats itself, so that drafts are both taken and rejected."""
    return torch.tensor([[3 + (i * i) % 5 + 7 * (i % 3) for i in range(length)]])


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if isinstance(error, ForedraftError) else f"{type(error).__name__}: {' '.join(line.strip() for line in lines)}")[:200]
