"""A tiny random model of any family of transformers: its config shrunk, field by field, and nothing known of the family."""

from functools import lru_cache
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..errors import ForedraftError
from ..target.loading import untrained

LAYERS, VOCABULARY, LARGEST = 8, 64, 20_000_000

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
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "n_mamba_heads": 8,
    "num_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "n_groups": 2,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "lru_width": 32,
    "qk_dim_factor": 2.0,
    "v_dim_factor": 2.0,
    "attention_window_size": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "router_hidden_size": 16,
    "adapter_rank": 8,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "o_lora_rank": 16,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ple_layer_ids": [2],
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
    "hc_lowrank": 8,
    "attn_layer_indices": [2, 5],
    "full_attn_idxs": [2, 5],
    "sliding_window": 8,  # shorter than the texts below, so that windows slide
    "attention_types": [[["global", "local"], LAYERS // 2]],
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": VOCABULARY - 1,
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
    "projector_hidden_size": 32,
    "video_temporal_patch_size": 2,
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


@lru_cache(maxsize=4)
def tiny_model(config_class: Any) -> PreTrainedModel:
    """A random model of a config class's family, small enough for milliseconds. Raises what transformers raises if it cannot be built."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        config = _shrunk(config_class)
        with torch.device("meta"):
            size = untrained(config).num_parameters()
        if size > LARGEST:
            raise ForedraftError(f"shrunk, it still has {size:,} parameters")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = untrained(config, torch.float32).eval()
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
    between = {name: SENSES[name] for name in ("projector_hidden_size",) if hasattr(whole, name)}
    config = config_class(**small, **between)
    if not hasattr(config, "vision_start_token_id"):  # published ones say it, some families' defaults do not
        config.vision_start_token_id = VOCABULARY - 2
    return config


def _sizes(config: PretrainedConfig, small: dict[str, Any]) -> dict[str, Any]:
    """Those of `small` that a config has and that are not smaller in it, and what must agree with them."""
    fields = config.to_dict()
    names = {*dir(config), *config.attribute_map, *fields}
    names -= {name for name in names if isinstance(getattr(type(config), name, None), property)}
    counts = {name for name, value in fields.items() if type(value) is int} - {"num_hidden_layers"}
    sizes = {
        name: min(value, fields[name]) if type(value) is int and name in counts else value for name, value in small.items() if name in names
    }
    sizes |= {name: [value] * len(fields[name]) for name, value in sizes.items() if type(value) is int and type(fields.get(name)) is list}
    if getattr(config, "sliding_window", None) is None:  # a cache believes in a window that the model may not have
        sizes.pop("sliding_window", None)
    if "kv_lora_rank" in names:  # latent attention has as many of either, and heads whose width follows from that of their parts
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        if "head_dim" not in getattr(type(config), "__dataclass_fields__", fields):
            sizes.pop("head_dim", None)
    if small is SMALL:
        sizes |= _layers(fields)
    rope = getattr(config, "rope_parameters", None) or {}
    if "mrope_section" in {*rope, *(config.ignore_keys_at_rope_validation if rope else ())}:
        turned = int(small["head_dim"] * (rope.get("partial_rotary_factor") or 1.0)) // 2
        section = {"mrope_section": [turned - 2 * (turned // 3), turned // 3, turned // 3]}
        kinds = {kind: {**own, **section} for kind, own in rope.items() if isinstance(own, dict)}
        sizes["rope_parameters"] = {**rope, **(kinds or section)}
    return sizes


def _layers(fields: dict[str, Any]) -> dict[str, Any]:
    """What a config says layer by layer, for `LAYERS` of them: the first ones, and the last of these of a kind that comes later.

    Where all are linear attention or convolution, as in some families' defaults, two are not.
    """
    told = fields.get("layer_types") or fields.get("layers_block_type") or (["conv"] if "conv_L_cache" in fields else ["full_attention"])
    if set(told) == {"full_attention"}:
        return {}
    places = [i % len(told) for i in range(LAYERS)]
    for later in (told.index(kind) for kind in dict.fromkeys(told) if kind not in told[:LAYERS]):
        places[-1] = later
    whole = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == len(told) > 1}
    cut = {name: [value[i] for i in places] for name, value in whole.items()}
    if set(told) <= {"linear_attention", "conv"} and "num_attention_heads" in fields:
        cut["layer_types"] = [told[0] if i not in (2, 5) else "full_attention" for i in range(LAYERS)]
    return cut
