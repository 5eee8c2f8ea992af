"""Drafts for Phi-3 and Phi-4 targets, whose projections are fused."""

from typing import Any

from torch import Tensor, nn

from foredraft import GroupedQueryDraft, hookimpl


class Phi3Draft(GroupedQueryDraft):
    """A Llama-shaped draft that starts from the parts of the target's fused projections."""

    name = "phi3"
    summary = "Llama-shaped drafts for Phi-3 and Phi-4 targets"
    model_types = ("phi3",)

    def weights_of(self, layer: nn.Module) -> dict[str, Tensor]:
        """The target's layer with its fused projections taken apart."""
        weights, config = super().weights_of(layer), self.config
        narrow = config.num_key_value_heads * config.head_dim
        for fused, parts, sizes in (
            ("self_attn.qkv_proj", "qkv", (config.num_attention_heads * config.head_dim, narrow, narrow)),
            ("mlp.gate_up_proj", ("gate", "up"), 2 * (config.intermediate_size,)),
        ):
            split = weights.pop(f"{fused}.weight").split(sizes)
            weights |= {f"{fused.split('.')[0]}.{part}_proj.weight": piece for part, piece in zip(parts, split, strict=True)}
        return weights


@hookimpl
def foredraft_adapters() -> list[Any]:
    """The adapters of this file."""
    return [Phi3Draft]
