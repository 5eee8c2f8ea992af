"""Of the format `gguf`: a target's multi-token head in a file of its own, beside which llama.cpp loads the target (`draft-mtp`).

The file is one of the target's architecture without its layers: its tokens, embedding and head, and one block behind the others.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foredraft.formats.gguf import tables
from foredraft.target.gguf import GGUFFile

ARCHITECTURES = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}
"""By the family of a head's layer."""
WHY_NOT = {
    "deepseek_v3": "its layer has latent attention, whose keys and values deepseek2 wants apart: not written yet",
    "qwen2": "its graph of MiMo 7B, qwen2, runs no head",
}
NAMES = {
    "fc.weight": "nextn.eh_proj.weight",
    "embedding_norm.weight": "nextn.enorm.weight",
    "state_norm.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
    "layers.0.input_layernorm.weight": "attn_norm.weight",
    "layers.0.post_attention_layernorm.weight": "post_attention_norm.weight",
    **{f"layers.0.self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    "layers.0.self_attn.o_proj.weight": "attn_output.weight",
    **{f"layers.0.self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"},
    **{f"layers.0.mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    "layers.0.mlp.gate.weight": "ffn_gate_inp.weight",
    "layers.0.mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "layers.0.mlp.experts.down_proj": "ffn_down_exps.weight",
    **{f"layers.0.mlp.shared_expert.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
    "layers.0.mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
"""Of a block's tensors, by ours."""
NORM = "norm.weight"
"""How the names of these families' norms end; ours hold what is added to 1, theirs the sum, so that both compute the same."""


def refuses(config: Mapping[str, Any]) -> list[str]:
    """Why the head of a draft with this `config.json` has no place in such a file."""
    family = config["foredraft"]["options"].get("layers_of")
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        return [f"MTP: {WHY_NOT.get(family, 'models of its target have no head there')}; heads of {known} are written"]
    rope = _text(config).get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    return [] if kind == "default" else [f"MTP: a rotary embedding scaled by '{kind}' was not tried with a head"]


def metadata(text: Mapping[str, Any]) -> dict[str, Any]:
    """What a file of a family in `ARCHITECTURES` says of a target with this (text) config, without its architecture's prefix."""
    rope, width = text["rope_parameters"], text["head_dim"]
    stated = {
        "block_count": text["num_hidden_layers"],
        "context_length": text["max_position_embeddings"],
        "embedding_length": text["hidden_size"],
        "feed_forward_length": text["intermediate_size"],
        "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(text["rms_norm_eps"]),
        "full_attention_interval": 1 + text["layer_types"].index("full_attention"),
        "attention.recurrent_layers": [kind == "linear_attention" for kind in text["layer_types"]],
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(width * rope.get("partial_rotary_factor", 1.0)),
        "rope.dimension_sections": [*rope.get("mrope_section", (11, 11, 10)), 0],
        "ssm.conv_kernel": text["linear_conv_kernel_dim"],
        "ssm.state_size": text["linear_key_head_dim"],
        "ssm.group_count": text["linear_num_key_heads"],
        "ssm.time_step_rank": text["linear_num_value_heads"],
        "ssm.inner_size": text["linear_value_head_dim"] * text["linear_num_value_heads"],
        "vocab_size": text["vocab_size"],
    }
    experts = {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }
    return stated | {theirs: text[ours] for theirs, ours in experts.items() if text.get("num_experts")}


def written(config: Any, tensors: Mapping[str, Tensor], target: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata, the architecture among it, and tensors of a head that `refuses` nothing of."""
    told = config.to_dict()
    text, kind = _text(told), ARCHITECTURES[told["foredraft"]["options"]["layers_of"]]
    layers = text["num_hidden_layers"]
    stated = metadata(text) | {"block_count": layers + 1, "nextn_predict_layers": 1}
    stated["attention.recurrent_layers"] = [*stated["attention.recurrent_layers"], False]
    block = {f"blk.{layers}.{NAMES[name]}": plus_one(name, tensor) for name, tensor in tensors.items()}
    dtype = tensors["fc.weight"].dtype
    held = {name: table.to(dtype) for name, table in tables(target).items()}
    # The loader asks for the target's final norm, which no head reads that has its own.
    return (
        {"general.architecture": kind, **{f"{kind}.{key}": value for key, value in stated.items()}},
        {**held, "output_norm.weight": block[f"blk.{layers}.{NAMES['norm.weight']}"], **block},
    )


def plus_one(name: str, tensor: Tensor) -> Tensor:
    """A norm as it multiplies, in float32; any other tensor as it is."""
    return tensor.float() + 1 if name.endswith(NORM) else tensor


def alone(file: GGUFFile) -> GGUFFile:
    """Of a file that holds a head the head alone, by its names in a block, norms as ours hold them; any other file as it is."""
    blocks = [name.split(".nextn.")[0] for name in file.tensors if ".nextn." in name]
    if not blocks or file.fields.get("general.architecture") not in ARCHITECTURES.values():
        return file
    block = f"{blocks[0]}."
    known = set(NAMES.values())
    names = {own: name for name in file.tensors if name.startswith(block) and (own := name.removeprefix(block)) in known}
    halves = {dtype for shape, dtype in file.tensors.values() if len(shape) > 1}
    half = getattr(torch, next(iter(halves))) if len(halves) == 1 else torch.float32

    def load(own: str) -> Tensor:
        tensor = file.load(names[own])
        if not own.endswith(NORM):
            return tensor
        added = tensor.float() - 1
        return added.to(half) if torch.equal(added.to(half).float(), added) else added

    tensors = {own: file.tensors[name] for own, name in names.items()}
    tensors |= {own: (tensors[own][0], str(load(own).dtype).removeprefix("torch.")) for own in tensors if own.endswith(NORM)}
    return GGUFFile(file.fields, tensors, load, file.packed)


def flattened(kind: str) -> dict[str, Any]:
    """What the file settles of a draft; the rest is the target's."""
    family = next(ours for ours, theirs in ARCHITECTURES.items() if theirs == kind)
    return {"num_hidden_layers": 1, "head": "qwen", "layers_of": family}


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    target = config.get("target_config") or {}
    found: Mapping[str, Any] = target.get("text_config") or target
    return found
