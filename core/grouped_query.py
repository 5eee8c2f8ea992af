"""`GroupedQueryDraft`: the Llama-shaped draft that most adapters offer, with Qwen3's norms on queries and keys where they are asked for."""

from typing import Any

from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from .config import DraftConfigMixin
from .draft import BaseDraft
from .protocols import DraftSpec

# Taken over from the target where it has them; all else of the draft's config follows from the algorithm.
SHARED = ("max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
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
    rotary_class = LlamaRotaryEmbedding

    @classmethod
    def architecture_for(cls, spec: DraftSpec) -> str:
        """Engines tell the shape with norms on queries and keys by name."""
        return spec.architecture or ("Eagle3Qwen3ForCausalLM" if spec.qk_norm else cls.architecture)

    @classmethod
    def shape(cls, target: PretrainedConfig) -> dict[str, Any]:
        """The target's own dimensions, without biases (engines' fused projections have none) and with the one activation they know."""

        # Where layers differ: the draft stands behind the last.
        last = target.per_layer_config[target.num_hidden_layers - 1] if getattr(target, "is_heterogeneous", False) else target

        def own(*names: str) -> Any:
            values = (getattr(last, name, None) for name in names)
            value = next((v for v in values if v is not None), None)
            return value[-1] if isinstance(value, list | tuple) else value

        hidden, heads = target.hidden_size, own("num_attention_heads")
        head_dim = own("head_dim") or hidden // heads
        rope = rope_of(target, head_dim)
        # Readers of transformers 4 look for the unscaled length beside the scaling, not in it.
        length = {name: rope[name] for name in ("original_max_position_embeddings",) if name in rope}
        return {
            **{name: value for name in SHARED if (value := getattr(target, name, None)) is not None},
            "hidden_size": hidden,
            "intermediate_size": own("intermediate_size") or 4 * hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": own("num_key_value_heads") or heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": own("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon") or 1e-6,
            "rope_parameters": rope,
            **length,
            "attention_bias": False,
            "mlp_bias": False,
        }


def rope_of(target: PretrainedConfig, head_dim: int) -> dict[str, Any]:
    """The rotary parameters of a draft for `target`: those of its full-attention layers, turning the whole head.

    Frequencies that change with the length of the text (longrope, dynamic) stay at what short texts get: transformers, vLLM and
    SGLang switch at different moments, and cached keys keep the old ones.
    """
    rope = getattr(target, "rope_parameters", None) or {}
    if nested := [v for v in rope.values() if isinstance(v, dict)]:
        rope = rope.get("full_attention") or nested[0]
    kind, short = rope.get("rope_type", "default"), rope.get("short_factor")
    partial = rope.get("partial_rotary_factor") or getattr(target, "partial_rotary_factor", None) or 1.0
    if kind not in SCALINGS or partial != 1.0 or (short and len(short) != head_dim // 2):
        return {"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10000.0)}
    kept = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    return {**kept, "long_factor": short} if short else kept
