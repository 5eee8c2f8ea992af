"""speculators 0.9: the draft's layers described in an object of their own, its algorithm and its target beside them."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from foredraft import ForedraftError, FormatBase, hookimpl
from foredraft.contracts import Config, Finding
from foredraft.contracts.engine import Files
from foredraft.contracts.finding import error

TRAINING_ONLY = ("verifier_lm_head.weight", "verifier_norm.weight")
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
"""What describes the draft's layers."""


class Speculators(FormatBase):
    """Read and written; the tensors have our names."""

    name = "speculators"
    summary = "EAGLE-3, P-EAGLE, DFlash, DFlash2 and DSpark drafts by speculators"
    sign = "speculators_model_type in config.json"

    def recognises(self, names: Collection[str], config: Config) -> bool:
        """By the field."""
        return "speculators_model_type" in config

    def rename(self, name: str) -> str | None:
        """Its training keeps parts of the target."""
        return None if name in TRAINING_ONLY else name

    def algorithm(self, config: Config) -> str:
        """The names are ours, too."""
        if (kind := config["speculators_model_type"]) not in list(MODELS):
            known = ", ".join(MODELS)
            raise ForedraftError(f"speculators_model_type {str(kind)[:80]!r}: foredraft reads {known} of speculators' models")
        return str(kind)

    def flatten(self, config: Config) -> dict[str, Any]:
        """The layers' config and the draft's own fields; EAGLE-3's residual is normed unless the file says no."""
        layers = config.get("transformer_layer_config")
        if not isinstance(layers, Mapping):
            raise ForedraftError("a speculators config needs the object transformer_layer_config, which describes the draft's layers")
        unsaid = {"norm_before_residual": config["speculators_model_type"] == "eagle3", "sample_from_anchor": False}
        fields = {**layers, **unsaid, **config}
        try:
            tokens = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
        except (KeyError, TypeError, IndexError):
            return fields
        return {**fields, "num_depths": tokens, "ttt_steps": tokens}

    def findings(self, draft: Files) -> list[Finding]:
        """The parts by which vLLM knows it, and what it asks of them."""
        config = draft.config
        inner, outer = (
            v if isinstance(v := config.get(name), Mapping) else {} for name in ("transformer_layer_config", "speculators_config")
        )
        methods = outer.get("proposal_methods")
        first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
        tokens = first.get("speculative_tokens")
        problems = {
            "transformer_layer_config is missing": not inner,
            "transformer_layer_config names no model_type": inner and not inner.get("model_type"),
            "speculators_config is missing": not outer,
            "a model_type stands at the top level": config.get("model_type") not in (None, "speculators"),
            "proposal_methods names no number of speculative_tokens": outer and (type(tokens) is not int or not 0 < tokens < 2**24),
        }
        if not (found := [problem for problem, there in problems.items() if there]):
            return []
        breaks = "vLLM does not take it for a draft in the speculators format, or fails while it reads it"
        return [error("speculators-config", "; ".join(found), breaks, "write these as speculators does")]

    def write(
        self, draft: Any, tensors: Mapping[str, Tensor], algorithm: str | None, num_tokens: int
    ) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """Raises `ForedraftError` if speculators has no model for the draft."""
        from transformers import __version__
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config, fields = draft.config, draft.config.to_dict()
        extra = set(draft.algorithm.modules(draft)) - MODULES
        if algorithm is None or algorithm not in MODELS or extra or fields["model_type"] not in ("llama", "qwen3"):
            reason = f"adds {', '.join(sorted(extra))}" if extra else f"is a {fields['model_type']} of {config.num_hidden_layers} layers"
            raise ForedraftError(
                f"speculators has no model for this draft, by algorithm '{draft.algorithm.name}': it {reason}\n"
                f"  it has {', '.join(MODELS)}, of Llama- and Qwen3-shaped layers"
            )
        layers = {name: fields[name] for name in LAYER_FIELDS if name in fields}
        if config.num_aux_hidden_states != 3:  # vLLM sizes fc by it, and looks for it here only
            layers["num_aux_hidden_states"] = config.num_aux_hidden_states
        architecture, own = MODELS[algorithm]
        target = config.foredraft["target"]
        return {
            "architectures": [architecture],
            "dtype": str(draft.dtype).removeprefix("torch."),
            "speculators_model_type": algorithm,
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": algorithm,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": num_tokens, "accept_tolerance": 0.0, "verifier_accept_k": 1}
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
            "transformers_version": __version__,
            **own(fields, list(config.aux_layers)),
        }, tensors


def _eagle3(fields: Config, aux_layers: list[int]) -> dict[str, Any]:
    flags = ("fc_norm", "norm_before_residual", "norm_output")
    return {
        "eagle_aux_hidden_state_layer_ids": aux_layers,
        "embed_requires_grad": False,
        "norm_before_fc": False,
        **{name: bool(fields.get(name)) for name in flags},
    }


def _peagle(fields: Config, aux_layers: list[int]) -> dict[str, Any]:
    return {**_eagle3(fields, aux_layers), "mask_token_id": fields["mask_token_id"]}


def _dflash(fields: Config, aux_layers: list[int]) -> dict[str, Any]:
    return {
        "aux_hidden_state_layer_ids": aux_layers,
        "block_size": fields["block_size"],
        "mask_token_id": fields["mask_token_id"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,  # no layer has a window, but vLLM takes false for causal attention in all of them
    }


def _dflash2(fields: Config, aux_layers: list[int]) -> dict[str, Any]:
    own = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return {**_dflash(fields, aux_layers), **{name: fields["dflash_config"][name] for name in own}}


def _dspark(fields: Config, aux_layers: list[int]) -> dict[str, Any]:
    own = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor")
    return {**_dflash(fields, aux_layers), **{name: fields[name] for name in own}}


MODULES = {"mask_hidden", "candidate_selector", "markov_head", "confidence_head"}
"""What its models have beside their layers, too."""
MODELS: Mapping[str, tuple[str, Callable[[Config, list[int]], dict[str, Any]]]] = {
    "dflash": ("DFlashDraftModel", _dflash),
    "dflash2": ("DFlash2DraftModel", _dflash2),
    "dspark": ("DSparkDraftModel", _dspark),
    "peagle": ("PEagleDraftModel", _peagle),
    "eagle3": ("Eagle3DraftModel", _eagle3),
}
"""Its class for each kind of draft, and the fields of its own; it and foredraft call the kinds alike."""


@hookimpl
def foredraft_formats() -> list[type]:
    """The format of this file."""
    return [Speculators]
