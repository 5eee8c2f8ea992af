"""Layers of a target's own kind, as transformers has them: for drafts that are a part of the target (its multi-token head)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..contracts.draft import DraftModel
from ..errors import ForedraftError
from ..target.capture import decoder_layers, decoder_of
from .attention.geometry import GroupedQueryAttention
from .layer import DraftLayer

# One layer, which sees everything, with experts where the family has them: what multi-token heads are made of.
ONE = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class Family:
    """The classes of a family, and how they are sized and started for one target."""

    model: PreTrainedModel
    """Of one layer, without storage."""

    @classmethod
    def of(cls, config: Any) -> "Family":
        """That of a draft's config. Raises `ForedraftError` for a family whose layers are put together otherwise than Llama's."""
        kind, target = config.spec.layers_of, config.target_config or {}
        fields = {n: v for n, v in (target.get("text_config") or target).items() if n not in ("model_type", "architectures", "auto_map")}
        try:
            text = AutoConfig.for_model(kind, **fields)
            text.update({name: value for name, value in ONE.items() if hasattr(text, name)})
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(text, attn_implementation="eager")
            parts = {name for name, _ in decoder_layers(model)[0].named_children()}
        except Exception as error:  # whatever the family's classes raise
            raise ForedraftError(f"no layer of the family '{kind}' can be made of the target's config: {str(error)[:200]}") from error
        if parts != PARTS:
            raise ForedraftError(f"layers of the family '{kind}' have the parts {sorted(parts)}, expected {sorted(PARTS)}")
        return cls(model)

    def layer(self) -> Any:
        """A fresh decoder layer, on the default device."""
        return type(decoder_layers(self.model)[0])(self.model.config, 0)

    def norm(self, size: int, eps: float) -> nn.Module:
        """A fresh norm over `size` features."""
        layer: Any = decoder_layers(self.model)[0]
        return type(layer.input_layernorm)(size, eps=eps)

    def rotary(self) -> nn.Module:
        """The rotary embedding."""
        return type(decoder_of(self.model).rotary_emb)(self.model.config)


class OwnLayer(DraftLayer):
    """The family's norms, feed-forward and projections; attention itself is the draft's, whatever pattern it is run under."""

    def __init__(self, draft: DraftModel, layer: int, input_size: int, family: Family):
        super().__init__(draft, layer, input_size)
        theirs = family.layer()
        for name in PARTS - {"self_attn"}:
            setattr(self, name, getattr(theirs, name))
        if hasattr(theirs.self_attn, "q_proj") and hasattr(theirs.self_attn, "k_proj"):
            self.self_attn = OwnAttention(draft.config, layer, input_size, theirs.self_attn)
        ours, named = ({n: tuple(t.shape) for n, t in m.state_dict().items()} for m in (self.self_attn, theirs.self_attn))
        if ours != named:
            kind = draft.config.spec.layers_of
            raise ForedraftError(f"attention of the family '{kind}' has the parameters {named}, the draft's has {ours}: choose another")


class OwnAttention(GroupedQueryAttention):
    """Grouped-query attention by the family's own projections; half of queries twice as wide opens the output (Qwen3.5)."""

    def __init__(self, config: Any, layer: int, input_size: int, theirs: Any):
        super().__init__(config, layer, input_size)
        self.head_dim, self.scale = theirs.head_dim, theirs.scaling
        for name, module in theirs.named_children():
            setattr(self, name, module)
        self.gated = theirs.q_proj.out_features == 2 * theirs.o_proj.in_features

    def queries(self, x_BQX: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `GroupedQueryAttention`; a head's queries and its gate stand side by side."""
        if not self.gated:
            return super().queries(x_BQX)
        q_BQHd, gate_BQHd = self.q_proj(x_BQX).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        return q_BQHd.flatten(2), gate_BQHd.flatten(2)


def together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a layer as transformers' modules hold them: experts that have a matrix each, in one tensor of all."""
    found: dict[str, Tensor] = {}
    apart: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            apart.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
        else:
            found[name] = tensor
    for prefix, by_number in apart.items():
        each = [by_number[number] for number in sorted(by_number)]
        if any(len(expert) < 3 for expert in each) or sorted(by_number) != list(range(len(each))):
            raise ForedraftError(f"{prefix}: {len(each)} experts, not all of them there with gate_proj, up_proj and down_proj")
        found[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in each])
        found[f"{prefix}.down_proj"] = torch.stack([e["down_proj"] for e in each])
    return found


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same as checkpoints hold them: three matrices of each expert."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, own = name.rpartition(".")
        if not prefix.endswith(".experts"):
            found[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True) if own == "gate_up_proj" else [("down_proj", expert)]
            found.update({f"{prefix}.{number}.{part}.weight": matrix.contiguous() for part, matrix in parts})
    return found
