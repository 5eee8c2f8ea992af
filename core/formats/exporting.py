"""`foredraft export`: a draft of ours in a format that engines do not need, but other tools ask for."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..auto import auto_draft
from ..contracts.algorithm import tokens_to_draft
from ..draft.model import BaseDraft
from ..errors import ForedraftError, nearest
from ..files.hub import find_draft
from ..files.ours import WEIGHTS
from ..files.reading import read_config
from ..files.tensor_names import TARGET_HEAD
from ..files.writing import check_new, replacing
from ..registry import Registry
from .peers import KINDS

LAYER_FIELDS = (
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "use_cache",
    "vocab_size",
)
"""What describes the draft's layers in a speculators config."""


def export_draft(
    source: str | Path, out: str | Path, form: str, num_draft_tokens: int | None = None, registry: Registry | None = None
) -> Path:
    """Write the draft of ours in `source` (directory or hub id) to `out` in the format `form`.

    `num_draft_tokens` is what servers draft unless told otherwise; default: all that the draft makes at once, else 4.

    Raises `ForedraftError` for an unknown format, and for a draft that the format cannot express.
    """
    if form not in FORMATS:
        raise ForedraftError(f"unknown format '{form}'{nearest(form, FORMATS)} (known: {', '.join(FORMATS)})")
    check_new(out)
    source = find_draft(source)
    if "foredraft" not in read_config(source):
        raise ForedraftError(f"'{source}' is no draft of foredraft's: its config.json has no 'foredraft' entry")
    draft = auto_draft(source, registry=registry)
    left_out = TARGET_HEAD if draft.config.spec.target_head else ()
    tensors = {name: tensor.contiguous() for name, tensor in draft.state_dict().items() if name not in left_out}
    config = FORMATS[form](draft, num_draft_tokens)
    with replacing(out) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / WEIGHTS).chmod(0o644)
        (temporary / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return Path(out)


def speculators(draft: BaseDraft, num_draft_tokens: int | None) -> dict[str, Any]:
    """The config of speculators 0.9 for a draft. Raises `ForedraftError` if it has no model for it."""
    config = draft.config
    spec, fields = config.spec, config.to_dict()
    kind = next((k for k in KINDS if k.recognises(draft.state_dict())), None)
    extra = set(draft.algorithm.modules(config) if draft.algorithm else {}) - {"mask_hidden"}
    if kind is None or extra or fields["model_type"] not in ("llama", "qwen3"):
        reason = f"adds {', '.join(sorted(extra))}" if extra else f"is a {fields['model_type']} of {spec.num_layers} layers"
        raise ForedraftError(
            f"speculators has no model for this draft, by algorithm '{config.foredraft['algorithm']}': it {reason}\n"
            f"  it has {', '.join(k.name for k in KINDS)}, of Llama- and Qwen3-shaped layers"
        )
    tokens = tokens_to_draft(num_draft_tokens, draft.algorithm.max_tokens if draft.algorithm else None)
    layers = {name: fields[name] for name in LAYER_FIELDS if name in fields}
    if config.num_aux_hidden_states != 3:  # vLLM sizes fc by it, and looks for it here only
        layers["num_aux_hidden_states"] = config.num_aux_hidden_states
    architecture, own = MODELS[kind.name]
    target = config.foredraft["target"]
    return {
        "architectures": [architecture],
        "dtype": str(draft.dtype).removeprefix("torch."),
        "speculators_model_type": kind.name,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind.name,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": tokens, "accept_tolerance": 0.0, "verifier_accept_k": 1}
            ],
            "verifier": {
                "name_or_path": target["name"] or None,
                "architectures": [a] if (a := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(target["model_type"])) else [],
            },
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "transformers_version": transformers_version,
        **own(config),
    }


def _eagle3(config: Any) -> dict[str, Any]:
    return {
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "embed_requires_grad": False,
        "fc_norm": config.fc_norm,
        "norm_before_fc": False,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
    }


def _peagle(config: Any) -> dict[str, Any]:
    return {**_eagle3(config), "mask_token_id": config.mask_token_id}


def _dflash(config: Any) -> dict[str, Any]:
    return {
        "aux_hidden_state_layer_ids": list(config.aux_layers),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,  # no layer has a window, but vLLM takes false for causal attention in all of them
    }


MODELS: Mapping[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "eagle3": ("Eagle3DraftModel", _eagle3),
    "peagle": ("PEagleDraftModel", _peagle),
    "dflash": ("DFlashDraftModel", _dflash),
}
"""speculators' class for each kind of draft, and the fields of its own."""
FORMATS: Mapping[str, Callable[[BaseDraft, int | None], dict[str, Any]]] = {"speculators": speculators}
"""What can be exported to: the config of a draft by the number of tokens drafted. The tensors keep their names."""
