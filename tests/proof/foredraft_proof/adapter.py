"""Drafts for StableLM targets: attention and feed-forward side by side, a quarter of each head rotated, norms with biases."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import StableLmConfig
from transformers.models.stablelm.modeling_stablelm import StableLmMLP, StableLmRotaryEmbedding

from foredraft import BaseDraft, hookimpl
from foredraft.contracts import DraftConfigMixin
from foredraft.draft import DraftLayer
from foredraft.draft.attention import take_rows

SHARED = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act", "layer_norm_eps"),
    *("max_position_embeddings", "rope_parameters", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
)


@dataclass(kw_only=True)
class ParallelConfig(DraftConfigMixin, StableLmConfig):
    """StableLM's config plus the draft's fields."""

    head_dim: int = 1
    attention_bias: bool = False


class ParallelLayer(DraftLayer):
    """What attention reads, the feed-forward reads too (of a fused input, the context's half): x + attention(norm x) + MLP(norm x)."""

    def __init__(self, draft: Any, layer: int, input_size: int):
        super().__init__(draft, layer, input_size)
        self.post_attention_layernorm = nn.Identity()

    def attend(self, hidden_BQD: Any, x_BSX: Any, rotary: Any, pattern: Any, cache: Any, rows: Any, leave: Any = lambda y: y) -> Any:
        read_BQD, leave_mlp = self.enter("mlp", take_rows(x_BSX[..., -hidden_BQD.shape[-1] :], rows))
        return hidden_BQD + leave(self.self_attn(x_BSX, rotary, pattern, cache, rows)) + leave_mlp(self.mlp(read_BQD))


class ParallelDraft(BaseDraft):
    """The family's own layer, with grouped queries."""

    name = "proof_parallel"
    summary = "drafts with attention and feed-forward side by side, for StableLM targets"
    model_types = ("stablelm",)
    architecture = "Eagle3ParallelForCausalLM"
    config_class = ParallelConfig
    layer_class = ParallelLayer
    mlp_class = StableLmMLP
    rotary_class = StableLmRotaryEmbedding

    @classmethod
    def shape(cls, target: Any) -> dict[str, Any]:
        fields = {name: getattr(target, name) for name in SHARED if getattr(target, name, None) is not None}
        return {**fields, "head_dim": target.hidden_size // target.num_attention_heads, "use_parallel_residual": True}

    def make_norm(self, size: int) -> nn.Module:
        return nn.LayerNorm(size, eps=self.config.layer_norm_eps)

    @classmethod
    def architecture_for(cls, spec: Any) -> str:
        return f"Parallel{spec.architecture or ('Masked' if spec.mask_token else 'Eagle3')}ForCausalLM"


@hookimpl
def foredraft_adapters() -> list[type]:
    return [ParallelDraft]
