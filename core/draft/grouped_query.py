"""`GroupedQueryDraft`: the Llama-shaped draft that most adapters offer, with Qwen3's norms on queries and keys where they are asked for."""

from collections.abc import Mapping
from math import gcd
from typing import Any

from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from ..contracts.config import DraftConfigMixin
from ..contracts.spec import DraftSpec
from .attention.geometry import DraftRotaryEmbedding
from .model import BaseDraft

# Taken over from the target where it has them; all else of the draft's config follows from the algorithm.
SHARED = ("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")

# What configs call a thing, those of models that bring their own code included; the first that is there counts.
NAMES = {
    "max_position_embeddings": ("max_position_embeddings", "seq_length", "max_sequence_length", "max_seq_len", "n_positions", "n_ctx"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "ffn_hidden", "ffn_dim", "n_inner", "inner_hidden_size"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_size", "d_kv"),
    "rms_norm_eps": ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "ln_eps", "norm_epsilon"),
    "rope_theta": ("rope_theta", "rotary_emb_base", "rope_base", "rotary_base"),
}

# Where a target's config names none.
ASSUMED = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}

# Frequency scalings that a Llama-shaped draft can share; the others need modules of their own.
SCALINGS = ("linear", "llama3", "yarn", "longrope")


class GroupedQueryConfig(DraftConfigMixin, LlamaConfig):
    """Llama's config plus the draft's fields; with norms on queries and keys, engines know that shape as Qwen3's."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as written."""
        fields = super().to_dict()
        if self.foredraft and self.spec.qk_norm:
            fields["model_type"] = "qwen3"
        return fields


class GroupedQueryDraft(BaseDraft):
    """A Llama-shaped draft: grouped-query attention, RMSNorm, SwiGLU.

    Its embedding is the target's table as it stands: multipliers (Gemma, Granite) are left out, since the first layer norms what it reads.
    """

    architecture = "LlamaForCausalLMEagle3"
    config_class = GroupedQueryConfig
    norm_class = LlamaRMSNorm
    mlp_class = LlamaMLP
    rotary_class = DraftRotaryEmbedding

    @classmethod
    def architecture_for(cls, spec: DraftSpec) -> str:
        """Engines tell the shape with norms on queries and keys by name."""
        return spec.architecture or ("Eagle3Qwen3ForCausalLM" if spec.qk_norm else cls.architecture)

    @classmethod
    def shape(cls, target: PretrainedConfig) -> dict[str, Any]:
        """The target's own dimensions, without biases (engines' fused projections have none) and with the one activation they know."""

        hidden = target.hidden_size
        heads = field_of(target, "num_attention_heads") or _heads(hidden)
        grouped = heads // (getattr(target, "num_key_value_groups", None) or 1)
        head_dim = field_of(target, "head_dim") or hidden // heads
        rope = rope_of(target, head_dim)
        # Readers of transformers 4 look for the unscaled length beside the scaling, not in it.
        length = {name: rope[name] for name in ("original_max_position_embeddings",) if name in rope}
        return {
            **{name: value for name in SHARED if (value := getattr(target, name, None)) is not None},
            **({"max_position_embeddings": longest} if (longest := field_of(target, "max_position_embeddings")) else {}),
            "hidden_size": hidden,
            "intermediate_size": field_of(target, "intermediate_size") or 4 * hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": field_of(target, "num_key_value_heads") or grouped,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": field_of(target, "rms_norm_eps") or ASSUMED["rms_norm_eps"],
            "rope_parameters": rope,
            **length,
            "attention_bias": False,
            "mlp_bias": False,
        }

    @classmethod
    def assumed(cls, target: PretrainedConfig) -> list[str]:
        """What its config names under none of the known names, and an attention that is not the target's."""
        rope = _full_attention(getattr(target, "rope_parameters", None) or {})
        named = {"rope_theta": rope.get("rope_theta") or field_of(target, "rope_theta")}
        named |= {name: field_of(target, name) for name in ("intermediate_size", "rms_norm_eps", "num_attention_heads")}
        values = {**ASSUMED, "intermediate_size": 4 * target.hidden_size, "num_attention_heads": _heads(target.hidden_size)}
        latent = getattr(target, "kv_lora_rank", None)
        return [f"{name} {values[name]:g}: the target's config names none" for name, value in named.items() if value is None] + (
            ["grouped-query attention, where the target's is latent: engines serve no latent draft behind this family"] if latent else []
        )


def _heads(hidden: int) -> int:
    """Of a target without attention: heads of 64 features, or of as large a power of two as fits."""
    return hidden // gcd(hidden, 64)


def rope_of(target: PretrainedConfig, head_dim: int) -> dict[str, Any]:
    """The rotary parameters of a draft for `target`: those of its full-attention layers, turning the whole head.

    Frequencies that change with the length of the text (longrope, dynamic) stay at what short texts get: transformers, vLLM and
    SGLang switch at different moments, and cached keys keep the old ones.
    """
    rope = _full_attention(getattr(target, "rope_parameters", None) or {})
    theta = float(rope.get("rope_theta") or field_of(target, "rope_theta") or ASSUMED["rope_theta"])
    kind, short = rope.get("rope_type", "default"), rope.get("short_factor")
    partial = rope.get("partial_rotary_factor") or getattr(target, "partial_rotary_factor", None) or 1.0
    if kind not in SCALINGS or partial != 1.0 or (short and len(short) != head_dim // 2):
        return {"rope_type": "default", "rope_theta": theta}
    left = ("partial_rotary_factor", "type", "mrope_section", "mrope_interleaved")  # sections: engines refuse them of parallel drafts
    kept = {**{name: value for name, value in rope.items() if name not in left}, "rope_theta": theta}
    return {**kept, "long_factor": short} if short else kept


def _full_attention(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of the layers that see everything, where kinds of layers have their own."""
    nested = [v for v in rope.values() if isinstance(v, dict)]
    return rope.get("full_attention") or nested[0] if nested else rope


def field_of(target: Any, field: str) -> Any:
    """A target's value of a field of ours, under any of its names; None if it has none. Where layers differ, the last one's."""
    last = target.per_layer_config[target.num_hidden_layers - 1] if getattr(target, "is_heterogeneous", False) else target
    value = next((v for name in NAMES[field] if (v := getattr(last, name, None)) is not None), None)
    return value[-1] if isinstance(value, list | tuple) else value
