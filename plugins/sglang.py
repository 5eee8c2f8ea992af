"""SGLang, as of 0.5.23: EAGLE-3 and EAGLE-3.1 drafts, Llama- and DeepSeek-shaped, DFlash, DFlash2, Domino and DSpark."""

from typing import Any

from foredraft import hookimpl
from foredraft.contracts.engine import (
    Accepted,
    Config,
    EngineBase,
    Files,
    Metrics,
    architecture_of,
    drafts_in_parallel,
    is_reduced,
    layers_without,
    total,
    unknown_architecture,
)
from foredraft.contracts.finding import Finding

ALGORITHMS = {
    "LlamaForCausalLMEagle3": "EAGLE3",
    "Eagle3DeepseekV2ForCausalLM": "EAGLE3",
    "DFlashDraftModel": "DFLASH",
    "DFlash2DraftModel": "DFLASH",
    "Qwen3DSparkModel": "DSPARK",
    "DSparkDraftModel": "DSPARK",
}
"""`--speculative-algorithm` by architecture."""


CAUSAL = """
Apertus BailingMoE BailingMoe BailingMoeV2 DeepseekV2 DeepseekV32 DeepseekV3 ExaoneMoE ExaoneMoe Gemma3 Gemma4 Glm4Moe Glm4MoeLite
GlmMoeDsa GptOss IQuestCoder InternLM3 Llama4 Llama LongcatFlash Mellum MiniMaxM2 MiniMaxM3Sparse Ministral3 Mistral MistralLarge3
Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe SarvamMoE TeleFLM
"""
CONDITIONAL = """
Cosmos3 Gemma3 Gemma4 Gemma4Unified Glm5Next InternS1Pro InternS2Mobius InternS2Preview KimiK25 Llama4 MiniMaxM3Sparse Qwen2_5_VL
Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe
"""
TARGETS = frozenset([*(f"{n}ForCausalLM" for n in CAUSAL.split()), *(f"{n}ForConditionalGeneration" for n in CONDITIONAL.split())])
"""Targets whose entry class has, or inherits, `set_eagle3_layers_to_capture`."""


class SGLang(EngineBase):
    """`sglang.launch_server` with a draft model."""

    name = "sglang"
    summary = "SGLang's OpenAI server"
    targets = TARGETS

    def refuses(self, config: Config) -> str | None:
        """What its loaders refuse, or would load and run as something else."""
        if config.get("speculators_model_type"):
            return "it does not read the speculators format: `foredraft import` makes a draft of ours of it"
        if reason := unknown_architecture(config, ALGORITHMS):
            return reason
        if config.get("hidden_act") not in (None, "silu"):
            return f"its feed-forward knows no activation '{config['hidden_act']}', only silu"
        if config.get("kv_lora_rank") and "Deepseek" not in architecture_of(config):
            return f"its {architecture_of(config)} has grouped-query attention, the draft has latent attention"
        if ALGORITHMS[architecture_of(config)] != "EAGLE3":
            if is_reduced(config):
                return "whether its drafters of blocks may name a part of the vocabulary is not known: not offered"
            return _refuses_domino(config)
        if drafts_in_parallel(config):
            return "it does not draft in parallel (P-EAGLE): it would skip mask_hidden and run the draft as a sequential one"
        return self._refuses_eagle(config)

    def _refuses_eagle(self, config: Config) -> str | None:
        width = config.get("hidden_size")
        if config.get("norm_before_residual"):
            return "its first layer adds to the state before the norm, this draft's to the normed one (norm_before_residual)"
        if config.get("num_aux_hidden_states") == 1 and config.get("target_hidden_size", width) == width:
            return "it tells the target's states from the draft's own by their width, so with one aux layer it never applies fc"
        if "Deepseek" not in architecture_of(config):
            return "its query, key and value projections have no biases (attention_bias)" if config.get("attention_bias") else None
        if config.get("num_hidden_layers") != 1:
            return f"its latent-attention draft has one layer, found {config.get('num_hidden_layers')}"
        if not isinstance(config.get("q_lora_rank"), int):
            return f"its latent attention needs low-rank queries (an integer q_lora_rank), found {config.get('q_lora_rank')}"
        return None

    def arguments(self, config: Config, draft: str, target: str, num_tokens: int) -> list[str]:
        """The OpenAI server. SGLang counts the token it verifies first among the drafted ones."""
        algorithm = ALGORITHMS[architecture_of(config)]
        chain = ["--speculative-num-steps", str(num_tokens), "--speculative-eagle-topk", "1"] if algorithm == "EAGLE3" else []
        if algorithm == "DSPARK":  # else it drafts a whole block, and refuses any other number
            chain = ["--speculative-dspark-block-size", str(num_tokens)]
        return [
            *("python", "-m", "sglang.launch_server", "--model-path", target),
            *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", draft),
            *chain,
            *("--speculative-num-draft-tokens", str(num_tokens + 1)),
        ]

    def server(self, target: str) -> list[str]:
        """The OpenAI server; its counters are a page only if asked for."""
        return ["python", "-m", "sglang.launch_server", "--model-path", target, "--enable-metrics"]

    def accepted(self, before: Metrics, after: Metrics) -> Accepted | None:
        """It counts passes over all requests that are finished, not by position; a request's first token is no pass's."""

        def since(name: str) -> float:
            return total(after, f"sglang:{name}_total") - total(before, f"sglang:{name}_total")

        passes = since("spec_verify_calls")
        return Accepted((since("generation_tokens") - since("num_requests")) / passes, []) if passes else None

    def findings(self, checkpoint: Files) -> list[Finding]:
        """What its loader alone stumbles over, without a word."""
        refused, config, names = super().findings(checkpoint), checkpoint.config, checkpoint.tensors
        if refused or ALGORITHMS[architecture_of(config)] != "EAGLE3":
            return refused

        found = []
        for layer in layers_without("hidden_norm", names):
            breaks, mend = "SGLang leaves that norm's weight at 1", f"save {layer}.input_layernorm.weight under this name, too"
            found.append(Finding("sglang-upper-norm", "error", f"no {layer}.hidden_norm.weight", breaks, mend))
        eagle = config.get("eagle_config")
        if config.get("eagle_aux_hidden_state_layer_ids") and not (
            isinstance(eagle, dict) and eagle.get("eagle_aux_hidden_state_layer_ids")
        ):
            text = "eagle_aux_hidden_state_layer_ids stands at the top level only"
            mend = "write eagle_config.eagle_aux_hidden_state_layer_ids, each one less (layer outputs from 0)"
            found.append(Finding("sglang-aux", "warning", text, "SGLang does not look there: it reads layers (2, L//2, L-3)", mend))
        if "lm_head.weight" not in names and config.get("draft_vocab_size") is not None and not config.get("tie_word_embeddings"):
            text = f"no lm_head.weight, and draft_vocab_size is {config['draft_vocab_size']}"
            breaks = "SGLang takes the target's head only if draft_vocab_size is null, and else runs on uninitialised memory"
            found.append(Finding("sglang-head", "error", text, breaks, "save the target's rows as lm_head.weight"))
        return found


def _refuses_domino(config: Config) -> str | None:
    fields = config.get("dflash_config")
    if not isinstance(fields, dict) or fields.get("projector_type") != "domino" or fields.get("pure_draft_prefix_len") == 1:
        return None
    return f"its Domino leaves the first token of a block uncorrected, this draft {fields.get('pure_draft_prefix_len')}"


@hookimpl
def foredraft_engines() -> list[type[Any]]:
    """The engine of this file."""
    return [SGLang]
