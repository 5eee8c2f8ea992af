"""The tensors that engines are known to look for, by the architecture that a draft claims."""

NORMS, MLP = ("input_layernorm", "post_attention_layernorm"), ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

GROUPED = tuple(f"self_attn.{x}_proj" for x in "qkvo")

QK_NORM = ("self_attn.q_norm", "self_attn.k_norm")

LATENT_PARTS = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")

LATENT = tuple(f"self_attn.{part}" for part in LATENT_PARTS)

EAGLE = ("fc", "norm", "lm_head")

EAGLE_OPTIONAL = r"embed_tokens\.weight|fc_norm\.\d+\.weight|d2t|t2d|mask_hidden"

BLOCK, BLOCK_LAYER = ("fc", "hidden_norm", "norm"), (*NORMS, *GROUPED, *QK_NORM, *MLP)

CONVOLVED = ("attention_conv.kernel_projection", "mlp_conv.kernel_projection")

DFLASH2_OPTIONAL = r"layers\.\d+\.(attention|mlp)_conv\.base_kernel|candidate_selector\.(predecessor|successor)_codebook"

MARKOV = ("markov_head.markov_w1", "markov_head.markov_w2")

LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "LlamaForCausalLMEagle3": (EAGLE, (*NORMS, "hidden_norm", *GROUPED, *MLP), EAGLE_OPTIONAL),
    "Eagle3Qwen3ForCausalLM": (EAGLE, (*NORMS, "hidden_norm", *GROUPED, *QK_NORM, *MLP), EAGLE_OPTIONAL),
    "Eagle3DeepseekV2ForCausalLM": (EAGLE, (*NORMS, "hidden_norm", *LATENT, *MLP), EAGLE_OPTIONAL),
    "EagleLlamaForCausalLM": (("fc",), ("post_attention_layernorm", *GROUPED, *MLP), r"layers\.[1-9]\d*\.input_layernorm\.weight"),
    "DFlashDraftModel": (BLOCK, BLOCK_LAYER, r"prefix_gru\.weight_[ih]h_l0|embed_proj\.[02]\.weight"),
    "DFlash2DraftModel": ((*BLOCK, "candidate_selector.hidden_projection"), (*BLOCK_LAYER, *CONVOLVED), DFLASH2_OPTIONAL),
    "Qwen3DSparkModel": (
        (*BLOCK, *MARKOV),
        BLOCK_LAYER,
        r"(markov_head\.(gate|joint)_proj|confidence_head\.proj)\.(weight|bias)",
    ),
}
"""By the `architectures` entry: weights of the draft, weights of each layer, and a pattern of what may be there too."""


def tensor_names(architecture: str, num_layers: int) -> tuple[set[str], str]:
    """The names that a draft of ours holds, and a pattern of those that it may hold. Raises `KeyError` for an unknown architecture."""
    top, layer, optional = LAYOUTS[architecture]
    return {f"{n}.weight" for n in top} | {f"layers.{i}.{n}.weight" for i in range(num_layers) for n in layer}, optional
