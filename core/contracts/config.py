"""What every draft's config adds to its family's native one."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from .spec import DraftSpec

UNTOLD = (
    "attention_bias",
    "eagle_aux_hidden_state_layer_ids",
    "head_dim",
    "hidden_act",
    "mask_token_id",
    "mlp_bias",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_interleave",
    "rope_parameters",
)
"""Fields that decide what a draft computes and that neither its tensors nor its algorithm tell: kept once more, for `foredraft doctor`."""


@dataclass(kw_only=True)
class DraftConfigMixin:
    """Fields that every draft config adds to its family's native one.

    Use as `class LlamaDraftConfig(DraftConfigMixin, LlamaConfig)`. The defaults only serve transformers' own bookkeeping; real
    configs come from `BaseDraft.make_config`.
    """

    draft_vocab_size: int = 1
    target_hidden_size: int = 1
    num_aux_hidden_states: int = 1
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    target_config: dict[str, Any] | None = None
    """The whole of the config that a draft's layers are sized by, the target's as a rule, where they are of a family's own kind
    (`DraftSpec.layers_of`)."""
    foredraft: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields as written: the engines' architecture name, and RoPE as transformers 4 and 5 spell it."""
        fields: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        if self.foredraft:
            fields["architectures"] = [self.foredraft["architecture"]]
            fields["foredraft"]["fields"] = {name: deepcopy(fields[name]) for name in UNTOLD if name in fields}
        rope = fields.get("rope_parameters") or {}
        if "rope_theta" in rope:
            fields["rope_theta"] = rope["rope_theta"]
            scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
            fields["rope_scaling"] = scaling if scaling.get("rope_type", "default") != "default" else None
        return fields

    @property
    def spec(self) -> DraftSpec:
        """What the algorithm asked of the adapter."""
        return DraftSpec(**(self.foredraft or {"spec": {}})["spec"])

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target layers whose hidden states the draft reads, as HF `hidden_states` indices."""
        return tuple(self.eagle_aux_hidden_state_layer_ids or ())

    @property
    def has_reduced_vocabulary(self) -> bool:
        """Whether the draft predicts only a part of the target's vocabulary."""
        return self.draft_vocab_size < self.vocab_size  # type: ignore[attr-defined]
