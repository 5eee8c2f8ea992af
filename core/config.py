"""The draft's own `config.json`: the family's native config plus what engines read, written in every spelling they know."""

import hashlib
import json
from copy import deepcopy
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from transformers import PretrainedConfig

from .errors import ForedraftError
from .protocols import DraftSpec

# Fields that tell a target from another; the rest varies with the transformers version and the way it was loaded.
_TELLING = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
    "rms_norm_eps",
    "hidden_act",
)


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
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
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


def eagle_fields(config: Any) -> dict[str, Any]:
    """The aux layers as SGLang reads them (0-based layer outputs); vLLM reads the top-level field, `hidden_states` indices."""
    layers = [i - 1 for i in config.aux_layers]
    return {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers}}


def set_mask_token(config: Any, token: int) -> None:
    """Let `token` stand for what is not known yet. Raises `ForedraftError` unless it is one of the target's ids."""
    if not 0 <= token < config.vocab_size:
        raise ForedraftError(f"mask_token_id={token} is no token of the target: choose 0 to {config.vocab_size - 1}")
    config.mask_token_id = token


def default_aux_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """An early, a middle and a late layer, `(2, L//2, L-3)` for three; evenly spaced between 2 and L-3 otherwise.

    Raises `ForedraftError` where the target is too shallow for distinct layers, naming a choice that works.
    """
    if count == 3:
        layers: tuple[int, ...] = (2, num_layers // 2, num_layers - 3)
    else:
        layers = tuple(round(2 + i * (num_layers - 5) / max(count - 1, 1)) for i in range(count))
    return check_aux_layers(layers, num_layers)


def check_aux_layers(layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """`layers` if they are distinct, ascending and within 1..L-1, where HF and all engines mean the same tensor; else `ForedraftError`."""
    problems = []
    if list(layers) != sorted(set(layers)):
        problems.append("they must be distinct and ascending")
    if outside := [i for i in layers if not 1 <= i <= num_layers - 1]:
        problems.append(f"{outside} lie outside 1..{num_layers - 1}")
    if not problems:
        return layers
    count = min(len(layers), num_layers - 1)
    if count < 1:
        raise ForedraftError(f"a target of {num_layers} layer(s) has no hidden state that a draft could read: at least 2 layers are needed")
    choice = [round(1 + i * (num_layers - 2) / max(count - 1, 1)) for i in range(count)]
    fewer = f", with num_aux={count}" if count < len(layers) else ""
    raise ForedraftError(
        f"aux layers {list(layers)} do not fit a target of {num_layers} layers: {' and '.join(problems)}.\n"
        f"  A choice that works: aux_layers={choice}{fewer}"
    )


def describe_target(config: PretrainedConfig) -> dict[str, Any]:
    """What a checkpoint remembers of its target: name, shape and a fingerprint of both."""
    text = config.get_text_config()
    fields = text.to_dict()
    kept = {name: fields.get(name) for name in _TELLING}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
    return {
        "name": config.name_or_path,
        "model_type": text.model_type,
        "num_hidden_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "fingerprint": digest[:16],
    }


def versions() -> dict[str, str]:
    """The versions a checkpoint was made with."""
    return {name: metadata.version(name) for name in ("foredraft", "torch", "transformers")}
