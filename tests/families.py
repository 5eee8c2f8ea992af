"""Tiny random targets of the families behind which vLLM serves EAGLE-3 drafts, in sizes that its kernels for the CPU take."""

from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from vision import model_of

from foredraft.decoding.families import SENSES, SMALL
from foredraft.target.loading import untrained

LAYERS = 6
SIZES: dict[str, Any] = {
    **SMALL,
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "head_dim": 32,
    "global_head_dim": 32,
    "swa_head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "first_k_dense_replace": LAYERS,
}
LINEAR = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
YARN = {**ROPE, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},  # vLLM gives a draft the window that all layers of its target have
    "ministral3": {
        "rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64},
        "sliding_window": None,
    },
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_local_experts": 4, "mlp_only_layers": []},
    "phi3": {"sliding_window": None},
    "ernie4_5": {},
    "apertus": {"rope_parameters": ROPE},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    "granite_swa": {"residual_multiplier": 0.5},
    "afmoe": {"num_dense_layers": 1, "num_shared_experts": 1, "score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "cohere2_moe": {"sliding_window": 64, "num_shared_experts": 1, "tie_word_embeddings": True},
    "gemma4_text": {"tie_word_embeddings": True, "num_experts": None, "moe_intermediate_size": None},
    "gpt_oss": {"rope_parameters": YARN},
    "laguna": {},
    "llama4_text": {"num_experts_per_tok": 1},
    "mimo_v2_flash": {
        "v_head_dim": 32,
        "layer_types": ["full_attention"] * LAYERS,
        "mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)],
        # As published configs say it.
        "hybrid_layer_pattern": [0] * LAYERS,
        "moe_layer_freq": [0, *[1] * (LAYERS - 1)],
        "layernorm_epsilon": 1e-6,
        "rope_theta": 5e6,
        "partial_rotary_factor": 0.334,
        "sliding_window_size": 8,
    },
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},  # published configs say so
    "minicpm3": LATENT,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, "index_head_dim": 128},
    "glm_moe_dsa": {**LATENT, "index_head_dim": 128},
    "qwen3_next": LINEAR,
    "qwen3_5_text": LINEAR,
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"] * 2},
    "kimi_linear": LATENT,
    "arcee": {},
    "cwm": {"bos_token_id": 1},
    "glm": {},
    "hunyuan_v1_dense": {},
    "jais2": {},
    "mellum": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "phi": {},
    "seed_oss": {},
    "smollm3": {},
    "starcoder2": {"sliding_window": None},
    "vaultgemma": {},
}
"""What is not as `SIZES` has it, by model_type."""
WIDE = {"vision_output_dim": 128, "projector_input_dim": 32, "projector_output_dim": 32, "intermediate_size": 128}
SECTIONS = {**ROPE, "mrope_section": [8, 4, 4]}
INTERLEAVED = {"rope_parameters": {**SECTIONS, "mrope_interleaved": True}}
SEEN = {"patch_size": 8, "out_hidden_size": 128}
STACKED = {**SEEN, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": ({}, {}),
    "mistral3": ({"sliding_window": None}, {}),
    "gemma4": ({"num_experts": None}, {"position_embedding_size": 64, "pooling_kernel_size": 3}),
    "llama4": ({"num_experts_per_tok": 1}, WIDE),
    "qwen2_5_vl": ({"rope_parameters": SECTIONS}, {**SEEN, "fullatt_block_indexes": [1], "window_size": 32}),
    "qwen3_vl": (INTERLEAVED, STACKED),
    "qwen3_vl_moe": ({**INTERLEAVED, "norm_topk_prob": True}, STACKED),
    "qwen3_5": (LINEAR, {}),
}
"""Targets that see, by a class of its own: what reads text, and what sees. They are asked with text alone, without the pad token."""
TRANSPOSED = ("qwen3_vl_moe",)
"""Those whose experts' matrices published files hold the other way round than transformers writes them."""
NOT_ALIKE = {
    **dict.fromkeys(("minimax_m2", "laguna"), "vLLM's router of experts for the CPU knows softmax alone"),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "vLLM has no sparse attention on the CPU"),
    "kimi_linear": "vLLM's only code for it is NVIDIA's (it wants cutlass)",
}
"""Why a family is not expected to come out alike: known on 23 November 2026, with vLLM 0.32 on the CPU."""
HALF = ("qwen3_next", "qwen3_5_text", "qwen3_5", "nemotron_h", "deepseek_v2", "deepseek_v3")
"""Those for which vLLM has kernels of half precision alone on the CPU: their states are compared, by the length of what differs."""
SCALED = ("minicpm3",)
"""Those whose final states vLLM hands on times what it multiplies logits by; a draft that reads aux layers does not see it."""


@cache
def tiny_family(model_type: str) -> PreTrainedModel:
    """A random model of a family, in evaluation mode; matrices large enough that each layer changes the states."""
    if model_type in SEEING:
        heads = {"hidden_size": 64, "num_attention_heads": 2, "num_heads": 2}
        small = {**SIZES, "pad_token_id": 63}, {**SENSES, **heads}
        whole = model_of(model_type, *SEEING[model_type], small=small)
        whole.generation_config.eos_token_id = None
        return whole
    cls = CONFIG_MAPPING[model_type]
    names = {*dir(cls), *cls.attribute_map, *cls().to_dict()}
    names -= {name for name in names if isinstance(getattr(cls, name, None), property)}
    config = cls(**{**{n: v for n, v in SIZES.items() if n in names}, **FAMILIES[model_type]})
    torch.manual_seed(0)
    model = untrained(config, torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model
