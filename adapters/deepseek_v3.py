"""Drafts for targets with DeepSeek's multi-head latent attention, dense or with experts.

V2, V3 and V3.2, and what engines run by the same code: Kimi-K2 and Moonlight (V3s), GLM-5 (V3.2's sparse attention), Mistral Large 3
and 4. Behind other families with a latent (MiniCPM3, LongCat, Kimi-Linear, GLM-4.7-Flash) no engine serves a draft with one: theirs is
Llama-shaped, by the generic adapter.
"""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import DeepseekV3Config, PretrainedConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3MLP,
    DeepseekV3MoE,
    DeepseekV3PreTrainedModel,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
    DeepseekV3TopkRouter,
)

from foredraft import BaseDraft, ForedraftError, hookimpl
from foredraft.contracts.algorithm import AlgorithmBase
from foredraft.contracts.config import DraftConfigMixin
from foredraft.contracts.draft import Batch
from foredraft.contracts.signal import Signal
from foredraft.contracts.spec import DraftSpec
from foredraft.draft.attention import MultiHeadLatentAttention

# Taken over from the target; all else of the draft's config follows from the algorithm.
SHARED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",  # of a dense draft too: transformers wants an integer
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
EXPERTS = (
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
)
# How far a step moves the router's bias against an expert's load: DeepSeek-V3's (arXiv:2412.19437, section 4.2).
BALANCE_SPEED = 0.001


class DeepseekDraftConfig(DraftConfigMixin, DeepseekV3Config):
    """DeepSeek-V3's config plus the draft's fields."""

    model_type = "deepseek_v2"  # as engines want it: they take a deepseek_v3 for the target's own multi-token prediction


class DeepseekV3Draft(BaseDraft):
    """Latent attention with a dense feed-forward.

    V2's attention is V3's up to the order of the rotary dimensions, which queries and keys share; it starts from V2 weights too. Of V3.2's
    the indexer, by which a layer chooses what it looks at, is left out: engines give a draft none.
    """

    name = "deepseek_v3"
    summary = "latent-attention drafts for DeepSeek-V2, V3 and V3.2, Kimi-K2, GLM-5 and Mistral-4 targets"
    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3", "deepseek_v2", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "mistral4")
    architecture = "Eagle3DeepseekV2ForCausalLM"
    config_class = DeepseekDraftConfig
    norm_class = DeepseekV3RMSNorm
    mlp_class: ClassVar[type[nn.Module]] = DeepseekV3MLP
    rotary_class = DeepseekV3RotaryEmbedding

    @classmethod
    def shape(cls, target: PretrainedConfig) -> dict[str, Any]:
        """The target's own dimensions without biases, dense in every layer, with interleaved rotary pairs: all that engines know.

        Mistral 4 says of RoPE how much of a whole head it turns, and how queries far behind are scaled: neither is a draft's.
        """
        fields = {name: getattr(target, name) for name in SHARED}
        other = ("partial_rotary_factor", "llama_4_scaling_beta")
        fields["rope_parameters"] = {name: value for name, value in target.rope_parameters.items() if name not in other}
        dense = {"first_k_dense_replace": target.num_hidden_layers, "num_mtp_layers": 0}
        return {**fields, **dense, "num_key_value_heads": target.num_attention_heads, "attention_bias": False, "rope_interleave": True}

    @classmethod
    def architecture_for(cls, spec: DraftSpec) -> str:
        """Engines know this structure in EAGLE drafts alone: any other has a name that none takes for a draft of another structure."""
        other = spec.architecture or ("ParallelDraftModel" if spec.mask_token else None)
        return f"Deepseek{other}" if other else cls.architecture

    def make_attention(self, layer: int, input_size: int) -> nn.Module:
        """Latent attention; `qk_norm` asks for nothing more: the latents of queries and keys are normed."""
        return MultiHeadLatentAttention(self.config, layer, input_size, self.make_norm)


class BalancedRouter(DeepseekV3TopkRouter):
    """Counts in training how often each expert is chosen, for `balance`."""

    def __init__(self, config: DeepseekV3Config):
        super().__init__(config)
        # Saved, so that a resumed run goes on exactly; integers, so that no cast touches them.
        self.register_buffer("load", torch.zeros(self.num_experts, dtype=torch.long))

    def forward(self, hidden_BQD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The family's routing."""
        logits, weights, indices = super().forward(hidden_BQD)
        if self.training:
            chosen = indices.flatten()
            self.load.scatter_add_(0, chosen, torch.ones_like(chosen))  # bincount would wait for the device
        return logits, weights, indices

    def balance(self) -> None:
        """Move the bias of busy experts down and of idle ones up (arXiv:2408.15664); the load starts anew."""
        load = self.load.clone()
        if dist.is_initialized():
            dist.all_reduce(load)
        self.e_score_correction_bias += BALANCE_SPEED * torch.sign(load.float().mean() - load)
        self.load.zero_()


class BalancedMoE(DeepseekV3MoE):
    """The family's experts behind a router that keeps them all in use."""

    def __init__(self, config: DeepseekV3Config):
        super().__init__(config)
        self.gate = BalancedRouter(config)


class DeepseekV3MoEDraft(DeepseekV3Draft, DeepseekV3PreTrainedModel):
    """The same with the target's mixture of experts as feed-forward; no engine serves it.

    The family's base class initialises the experts, which are bare parameters.
    """

    name = "deepseek_v3_moe"
    summary = "latent-attention drafts with experts, for DeepSeek-V3 targets by name"
    model_types = ()
    architecture = "Eagle3DeepseekV2MoEForCausalLM"  # a name that no engine takes for the dense draft's
    mlp_class: ClassVar[type[nn.Module]] = BalancedMoE

    def __init__(self, config: Any, algorithm: AlgorithmBase | None = None):
        super().__init__(config, algorithm)
        # DDP would put rank 0's counts in the place of every other rank's before each step.
        loads = [name for name, _ in self.named_buffers() if name.endswith("gate.load")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, loads)

    @classmethod
    def shape(cls, target: PretrainedConfig) -> dict[str, Any]:
        """The dense draft's, and the target's experts. Raises `ForedraftError` for a target with another router."""
        if target.model_type == "deepseek_v2":
            raise ForedraftError(
                "adapter 'deepseek_v3_moe' has DeepSeek-V3's router, the target is a deepseek_v2, which scores its experts otherwise: "
                "use adapter 'deepseek_v3', a dense draft"
            )
        return {**super().shape(target), **{name: getattr(target, name) for name in EXPERTS}, "first_k_dense_replace": 0}

    def forward(self, batch: Batch, signal: Signal) -> dict[str, Any]:
        """The training step; the routers are balanced by the load of the step before, so that a recomputed forward routes alike."""
        if self.training:
            for module in self.modules():
                if isinstance(module, BalancedRouter):
                    module.balance()
        return super().forward(batch, signal)


@hookimpl
def foredraft_adapters() -> list[type]:
    """The adapters of this file."""
    return [DeepseekV3Draft, DeepseekV3MoEDraft]
