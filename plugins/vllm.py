"""vLLM, as of 0.32: EAGLE-1, EAGLE-3, EAGLE-3.1, P-EAGLE, DFlash, DFlash2, DSpark, Llama-, Qwen3- and (sequential ones) DeepSeek-shaped;
targets' own multi-token heads."""

import json
from collections.abc import Sequence
from typing import Any

from foredraft import default_registry, hookimpl
from foredraft.contracts.engine import (
    Accepted,
    Config,
    EngineBase,
    Files,
    Metrics,
    accepted_by_position,
    architecture_of,
    drafts_in_parallel,
    is_reduced,
    layers_without,
    unknown_architecture,
)
from foredraft.contracts.finding import Finding
from foredraft.files.spellings import value

METHODS = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Qwen3ForCausalLM": "eagle3",
    "Eagle3DeepseekV2ForCausalLM": "eagle3",
    "Eagle3DeepseekV3ForCausalLM": "eagle3",
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "EagleLlamaForCausalLM": "eagle",
    "MTPDraftModel": "mtp",
    "DeepseekMTPDraftModel": "mtp",
    "MedusaModel": "medusa",
    "DeepseekMedusaModel": "medusa",
    "OrdinaryDraftModel": "draft_model",
}
"""The method by which vLLM runs an architecture. It guesses from the path if none is named, and runs a DFlash draft wrongly."""
EXPORTED = {"mtp": "mtp", "medusa": "medusa", "draft_model": "causal_lm"}
"""Methods whose drafts are served from what `foredraft export` makes of ours, and the format."""
EAGLE1_LACKS = {
    "fc.bias": "drops it without a word: the draft reads other states than in training",
    "norm.weight": "has no norm behind the layers, and refuses the draft",
    "layers.0.input_layernorm.weight": "has no norm before the first attention, and refuses the draft",
}
"""Tensors that its EAGLE-1 knows nothing of, though peers train them."""
SPECULATORS = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dflash2": "dflash", "dspark": "dspark"}
"""The same by the `speculators_model_type` of a draft in the speculators format, whose class vLLM chooses itself."""


CAUSAL = """
Afmoe Apertus Arcee Cohere2Moe Cwm Deepseek DeepseekV2 DeepseekV32 DeepseekV3 DeepseekV41 DeepseekV4 Ernie4_5 FlexOlmo Gemma4
Glm5Next Glm GlmMoeDsa GptOss Granite GraniteSWA HunYuanDenseV1 HunYuanMoEV1 IQuestCoder InternLM3 Jais2 K2Horizon KimiLinear
Laguna Llama4 Llama Mellum MiMo MiMoV2Flash MiMoV2 MiMoV2Omni MiniCPM3 MiniCPM MiniMaxM2 MiniMaxM3Sparse Ministral3 Mistral
MistralLarge3 MuseGlimmer Nanbeige NemotronH NemotronHPuzzle Olmo2 Olmo3 Olmo Phi3 Phi Plamo3 Qwen2 Qwen3 Qwen3Moe Qwen3Next
Qwen3_5 Qwen3_5Moe SarvamMLA SeedOss SmolLM3 Starcoder2 Step1 TeleChat2 TeleChat3 TeleFLM VaultGemma
"""
CONDITIONAL = """
CohereCompass Cosmos3 DeepseekV4 Emu3 Gemma4 Gemma4Unified Glm5Next HunYuanVL InternS1Pro InternS2Mobius
InternS2Preview KimiK25 KimiK3 LightOnOCR Llama4 Llava MiniCPMV4_6 MiniCPMV4_7 MiniMaxM3Sparse Mistral3 MuseGlimmer OpenCUA
Pixtral Qwen2_5_VL Qwen3ASR Qwen3OmniMoe Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe VibeVoiceAsr
"""
NEMOTRON = (f"NemotronH_{n}" for n in ("Nano_VL_V2", "Nano_Omni_Reasoning_V3", "Super_Omni_Reasoning_V3", "Omni_Reasoning_V3"))
TARGETS = frozenset(
    [*(f"{n}ForCausalLM" for n in CAUSAL.split()), *(f"{n}ForConditionalGeneration" for n in CONDITIONAL.split()), *NEMOTRON]
)
"""Targets by a class that keeps to its interface `SupportsEagle3`, as of 0.32.0; others it may run by transformers' code. Some
that do fail when they are started: Exaone4_5_ (what reads text in it does not), GPTNeoX and GPTBigCode (their embedding has another name
than the two that drafts are given)."""


class VLLM(EngineBase):
    """`vllm serve` with a `--speculative-config`."""

    name = "vllm"
    summary = "vLLM's OpenAI server"
    targets = TARGETS

    def refuses(self, config: Config) -> str | None:
        """What its loaders refuse, or would load and run as something else."""
        kind = _speculators_type(config)
        if kind and kind not in SPECULATORS:
            return f"it reads no speculators_model_type '{kind}'; it takes {', '.join(SPECULATORS)}"
        if not kind and (reason := unknown_architecture(config, METHODS)):
            return reason
        if (head := config.get("markov_head_type")) not in (None, "vanilla"):
            return f"its DSpark knows the vanilla Markov head only, this draft's is '{head}'"
        if value(config, "dflash_config.projector_type"):
            return f"its DFlash has no corrections (projector_type '{value(config, 'dflash_config.projector_type')}')"
        if kind:
            return None
        if "foredraft" in config and (method := METHODS[architecture_of(config)]) in EXPORTED:
            return "; ".join(default_registry().format(EXPORTED[method])().refuses(config)) or None
        if "Deepseek" in architecture_of(config):
            return _refuses_latent(config)
        if config.get("kv_lora_rank"):
            return f"its {architecture_of(config)} has grouped-query attention, the draft has latent attention"
        if config.get("hidden_act") not in (None, "silu"):
            return f"its feed-forward knows no activation '{config['hidden_act']}', only silu"
        return None

    def speculative_config(self, config: Config, draft: str, num_tokens: int) -> dict[str, Any]:
        """What `--speculative-config` and `LLM(speculative_config=...)` take for this draft."""
        kind = _speculators_type(config)
        method = SPECULATORS[kind] if kind else METHODS[architecture_of(config)]
        file = f"{draft}-head" if method in EXPORTED and "foredraft" in config else draft
        fields = {"model": file, "method": method, "num_speculative_tokens": num_tokens}
        if method == "eagle3" and (kind == "peagle" or drafts_in_parallel(config)):
            fields["parallel_drafting"] = True  # else it would skip mask_hidden and draft in sequence
        return fields

    def prepare(self, config: Config, draft: str, target: str) -> list[str]:
        """Drafts whose config it would read otherwise are written in its own words first."""
        method = METHODS.get(architecture_of(config), "")
        own = "foredraft" in config and method in EXPORTED
        return ["foredraft", "export", draft, f"{draft}-head", "--format", EXPORTED[method]] if own else []

    def arguments(self, config: Config, draft: str, target: str, num_tokens: int) -> list[str]:
        """The OpenAI server."""
        return [*self.server(target), "--speculative-config", json.dumps(self.speculative_config(config, draft, num_tokens))]

    def server(self, target: str) -> list[str]:
        """The same without a draft."""
        return ["vllm", "serve", target]

    def extraction(self, target: str, layers: Sequence[int], directory: str) -> list[str]:
        """By its method extract_hidden_states, a "draft" that writes down what it is given."""
        read = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
        method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": read}
        connector = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": directory},
        }
        settings = ["--speculative-config", json.dumps(method), "--kv-transfer-config", json.dumps(connector)]
        return [*self.server(target), *settings, "--no-enable-prefix-caching"]  # what is cached is not run, and says nothing

    def accepted(self, before: Metrics, after: Metrics) -> Accepted | None:
        """By position, from its counters."""
        return accepted_by_position("vllm", before, after)

    def findings(self, checkpoint: Files) -> list[Finding]:
        """What its loader alone stumbles over."""
        if refused := super().findings(checkpoint):
            return refused

        names, found = checkpoint.tensors, []
        if prefixed := [name for name in names if name.startswith("model.")]:
            text = f"{len(prefixed)} tensors' names begin with `model.`, {prefixed[0]} for one"
            found.append(
                Finding("vllm-prefix", "error", text, "vLLM puts it before every name itself and refuses the draft", "take it off")
            )
        if "d2t" in names and not is_reduced(checkpoint.config):
            text = "d2t is there, though draft_vocab_size is the target's"
            found.append(Finding("vllm-d2t", "error", text, "vLLM knows no such parameter and refuses the draft", "leave d2t and t2d out"))
        method = self.speculative_config(checkpoint.config, "", 1)["method"]
        if method == "dspark" and not _speculators_type(checkpoint.config) and not checkpoint.config.get("markov_rank"):
            text, breaks = "no markov_rank at the top level of config.json", "vLLM looks for it there only, and fails while it loads"
            found.append(Finding("vllm-markov-rank", "error", text, breaks, "write it there"))
        for name in (name for name in EAGLE1_LACKS if method == "eagle" and name in names):
            found.append(Finding("vllm-eagle1", "error", f"{name} is there", f"vLLM {EAGLE1_LACKS[name]}", "train the draft without it"))
        if method == "eagle3":
            found += _fc_width(checkpoint.config)
            for layer in layers_without("input_layernorm", names):
                breaks, mend = "vLLM leaves that norm's weight at 1", f"save {layer}.hidden_norm.weight under this name, too"
                found.append(Finding("vllm-upper-norm", "error", f"no {layer}.input_layernorm.weight", breaks, mend))
        return found


def _speculators_type(config: Config) -> str:
    return str(config.get("speculators_model_type") or "")


def _fc_width(config: Config) -> list[Finding]:
    """It sizes fc by the number of aux layers, for which it does not look everywhere."""

    inner = config.get("transformer_layer_config")
    eagle = config.get("eagle_config")
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    counted = (inner if isinstance(inner, dict) else config).get("num_aux_hidden_states")
    twice = isinstance(eagle, dict) and eagle.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or len(ids) == 3 or counted or twice or "Qwen3" in architecture_of(config):
        return []
    where = "transformer_layer_config" if inner else "config.json"
    text = f"{len(ids)} aux layers, and no num_aux_hidden_states in {where}"
    return [Finding("vllm-aux-count", "error", text, "vLLM makes fc for 3 aux states and fails while it loads", f"write {len(ids)} there")]


def _refuses_latent(config: Config) -> str | None:
    if config.get("model_type") in ("deepseek_v3", "deepseek_v32"):
        return f"it takes model_type '{config['model_type']}' for the target's own multi-token prediction; deepseek_v2 is what it serves"
    if not isinstance(config.get("q_lora_rank"), int):
        return f"its latent attention needs low-rank queries (an integer q_lora_rank), found {config.get('q_lora_rank')}"
    if drafts_in_parallel(config):
        return "it drafts in parallel (P-EAGLE) with Llama- and Qwen3-shaped drafts only, not with latent attention"
    return None


@hookimpl
def foredraft_engines() -> list[type[Any]]:
    """The engine of this file."""
    return [VLLM]
