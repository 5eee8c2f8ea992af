"""Drafts for Llama targets."""

from typing import Any

from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from foredraft import BaseDraft, hookimpl
from foredraft.config import DraftConfigMixin

# Taken over from the target; all else of the draft's config follows from the algorithm.
SHARED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class LlamaDraftConfig(DraftConfigMixin, LlamaConfig):
    """Llama's config plus the draft's fields."""


class LlamaDraft(BaseDraft):
    """A Llama-shaped draft: grouped-query attention, RMSNorm, gated MLP."""

    name = "llama"
    summary = "Llama-shaped drafts for Llama targets"
    model_types = ("llama",)
    architecture = "LlamaForCausalLMEagle3"
    config_class = LlamaDraftConfig
    norm_class = LlamaRMSNorm
    mlp_class = LlamaMLP
    rotary_class = LlamaRotaryEmbedding

    @classmethod
    def shape(cls, target: PretrainedConfig) -> dict[str, Any]:
        """The target's own dimensions, without biases (engines' fused projections have none)."""
        return {**{name: getattr(target, name) for name in SHARED}, "attention_bias": False, "mlp_bias": False}


@hookimpl
def foredraft_adapters() -> list[type]:
    """The adapters of this file."""
    return [LlamaDraft]
