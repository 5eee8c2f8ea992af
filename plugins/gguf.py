"""GGUF as llama.cpp's build 11434 reads drafts: EAGLE-3 (`eagle3`), DFlash and DSpark (`dflash`), multi-token heads; a file each."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from foredraft import ForedraftError, FormatBase, hookimpl
from foredraft.contracts import Config
from foredraft.contracts.engine import architecture_of, drafts_in_parallel, is_reduced
from foredraft.contracts.format import OneFile
from foredraft.contracts.options import Frozen
from foredraft.files import spellings
from foredraft.formats.gguf import halved, paired, rope_fields, token_fields, write_gguf
from foredraft.target.gguf import read_gguf, rope_parameters, shortest

from . import gguf_heads as heads

BUILD = "llama.cpp (build 11434)"
INSIDE = "gguf"
"""The metadata of a file, inside what stands for its `config.json`."""
KINDS = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Qwen3ForCausalLM": "eagle3",
    "DFlashDraftModel": "dflash",
    "Qwen3DSparkModel": "dflash",
}
HEAD = ("MTPDraftModel", "DeepseekMTPDraftModel")
"""Its architecture for ours."""
OUTER = {
    "embed_tokens": "token_embd",
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}
INNER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""Metadata, behind the architecture's name, by what it is in a config."""
HEAD_NAMES = {theirs: ours for ours, theirs in heads.NAMES.items()}
PERMUTED = {"eagle3": ("attn_q", "attn_k"), "dflash": ()}
"""What its rotary embedding wants in adjacent pairs; ours, as transformers', turns the halves of a head against each other."""
TARGETS = (
    *("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    *("gpt_oss", "lfm2", "mimo_v2", "minimax", "minimax_m2", "nemotron_h", "nanbeige", "deepseek_v4"),
)
"""Model types of targets whose graph hands out what its layers read; at any other the process ends. Gemma 4's does, too, but scales the
embeddings that a draft shares: untried."""


class GGUFOptions(Frozen):
    """Options of the export."""

    outtype: Literal["auto", "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"] = Field(
        "auto", description="of the matrices (norms stay f32); auto: as the draft is saved"
    )
    target: str | None = Field(
        None, description="GGUF file or directory of the target, whose tokens the file lists; default: the one that the draft names"
    )


class GGUF(FormatBase):
    """Read and written. What llama.cpp computes otherwise than the draft was trained is refused: it would not notice most of it."""

    name = "gguf"
    summary = "EAGLE-3, DFlash and DSpark drafts, and multi-token heads, for llama.cpp"
    sign = "a .gguf file of architecture eagle3 or dflash, or with a block nextn"
    suffix = ".gguf"
    Options = GGUFOptions

    def recognises(self, names: Collection[str], config: Config) -> bool:
        """By the file."""
        return isinstance(config.get(INSIDE), Mapping)

    def rename(self, name: str) -> str | None:
        """Frequencies of the rotary embedding are told by the config."""
        if name in ("d2t", "rope_freqs.weight"):
            return name if name == "d2t" else None
        if name in HEAD_NAMES:
            return HEAD_NAMES[name]
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            return f"layers.{layer}.{_renamed(rest, {theirs: ours for ours, theirs in INNER.items()})}"
        return _renamed(name, {theirs: ours for ours, theirs in OUTER.items()})

    def flatten(self, config: Config) -> dict[str, Any]:
        """Metadata by the names that engines know. Raises `ForedraftError` for another architecture."""
        data = config.get(INSIDE)
        kind = data.get("general.architecture") if isinstance(data, Mapping) else None
        if kind in heads.ARCHITECTURES.values():
            return heads.flattened(str(kind))
        if not isinstance(data, Mapping) or kind not in PERMUTED:
            raise ForedraftError(f"a GGUF file of architecture {str(kind)[:40]!r}: {BUILD} drafts with {', '.join(PERMUTED)}")

        def told(key: str) -> Any:
            return shortest(data.get(f"{kind}.{key}"))

        fields = {
            **{ours: told(theirs) for theirs, ours in SIZES.items()},
            "rope_parameters": rope_parameters(data, str(kind), data.get("rope_freqs")),
            "target_hidden_size": told("target_hidden_size"),
            "draft_vocab_size": data.get("d2t"),
            "eagle_aux_hidden_state_layer_ids": told("target_layers"),
            "norm_before_residual": told("norm_before_residual"),
            "norm_before_fc": told("norm_before_fc"),
        }
        if isinstance(tokens := data.get("tokenizer.ggml.tokens"), int):
            fields["vocab_size"] = tokens
        if kind == "dflash":
            fields |= {
                "block_size": told("block_size"),
                **_markov(data),
                "mask_token_id": data.get("tokenizer.ggml.mask_token_id"),
                "causal": told("attention.causal"),
                "hidden_act": told("hidden_act"),
                "use_swa": any(pattern) if isinstance(pattern := told("attention.sliding_window_pattern"), list) else None,
                "input_embedding_scale": told("embedding_scale"),
                "logit_scale": told("logit_scale"),
                "attention_value_scale": told("attention.value_scale"),
                "final_logit_softcapping": told("final_logit_softcapping"),
            }
        return {name: value for name, value in fields.items() if value is not None}

    def notes(self, config: Config) -> list[str]:
        """Quantised weights are read as what they stand for."""
        packed = config[INSIDE].get("packed")
        return [f"its weights were {packed}: read as the floats that they stand for"] if packed else []

    def refuses(self, config: Config) -> list[str]:
        """What its graphs do not compute, or abort at."""
        architecture, made = architecture_of(config), config["foredraft"]
        kind = KINDS.get(architecture)
        if architecture in HEAD:
            return [f"{reason} ({BUILD})" for reason in heads.refuses(config)]
        if config.get("kv_lora_rank"):
            return [f"kv_lora_rank: latent attention, its drafts have grouped-query attention ({BUILD})"]
        if corrected := spellings.value(config, "dflash_config.projector_type"):
            return [f"projector_type: a block corrected by what is drafted ('{corrected}'), which its dflash does not ({BUILD})"]
        if kind is None or (kind == "eagle3" and drafts_in_parallel(config)):
            what = "that drafts in parallel (P-EAGLE)" if kind else architecture
            return [f"{BUILD} has no architecture for a draft {what}: it runs {' and '.join(PERMUTED)}"]
        wants = {
            "attention_bias": (config.get("attention_bias"), "biases in attention: it reads none"),
            "mlp_bias": (config.get("mlp_bias"), "biases in the feed-forward: it reads none"),
            "hidden_act": (config.get("hidden_act") != "silu", f"activation {config.get('hidden_act')}: it computes silu"),
        }
        if kind == "eagle3":
            layers, aux = config.get("num_hidden_layers"), config.get("num_aux_hidden_states")
            wants |= {
                "num_hidden_layers": (layers != 1, f"{layers} layers: it runs drafts of one"),
                "num_aux_hidden_states": (aux != 3, f"{aux} aux layers: it reads exactly 3"),
                "fc_norm": (config.get("fc_norm"), "one norm per aux state: it knows one over all of them (norm_before_fc), another thing"),
                "norm_output": (config.get("norm_output"), "the normed state is fed back: it feeds back the state before the norm"),
                "qk_norm": (made["spec"]["qk_norm"], "norms on queries and keys: it applies none"),
            }
        else:
            widths = config.get("target_hidden_size"), config.get("hidden_size")
            markov = config.get("markov_head_type")
            sure = config.get("enable_confidence_head") and not config.get("confidence_head_with_markov")
            wants |= {
                "draft_vocab_size": (is_reduced(config), "a part of the vocabulary: not tried with blocks"),
                "markov_head_type": (markov not in (None, "vanilla"), f"{markov}: it knows vanilla Markov heads only"),
                "confidence_head_with_markov": (sure, "false: its confidence head reads the token before, too"),
                "target_hidden_size": (widths[0] != widths[1], f"{widths[1]}, the target's is {widths[0]}: it takes them for one"),
            }
        model = made["target"]["model_type"]
        beside = f"model_type {model}: drafts are served beside {', '.join(TARGETS)}; other graphs hand out no layer inputs, and abort"
        wants["target"] = (model not in TARGETS, beside)
        return [f"{name}: {text} ({BUILD})" for name, (bad, text) in wants.items() if bad]

    def write(
        self, draft: Any, tensors: Mapping[str, Tensor], algorithm: str | None, num_tokens: int
    ) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """Metadata, the tokens among it, and tensors. Raises `ForedraftError` for tensors without a name there."""
        config = draft.config
        if reasons := self.refuses(config.to_dict()):
            raise ForedraftError("\n  ".join(reasons))
        tokens = token_fields(self.options.target, config.foredraft["target"]["name"], config.vocab_size)
        if config.foredraft["architecture"] in HEAD:
            data, named = heads.written(config, tensors, self.options.target or config.foredraft["target"]["name"])
            return {INSIDE: {**data, **tokens}}, named
        kind = KINDS[config.foredraft["architecture"]]
        factors, scaling = rope_fields(draft.rotary_emb, config.rope_parameters)
        stated = {
            **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
            "attention.value_length": config.head_dim,
            "rope.dimension_count": config.head_dim,
            **scaling,
            "target_layers": list(config.aux_layers),
        }
        if kind == "eagle3":
            stated |= {"target_hidden_size": config.target_hidden_size, "norm_before_residual": bool(config.norm_before_residual)}
        else:
            fields = config.to_dict()
            stated["block_size"] = fields["block_size"]
            if "markov_rank" in fields:
                stated |= {"sample_from_anchor": fields["sample_from_anchor"], "has_confidence_head": fields["enable_confidence_head"]}
            tokens["tokenizer.ggml.mask_token_id"] = config.mask_token_id
        data = {"general.architecture": kind, **{f"{kind}.{key}": value for key, value in stated.items()}, **tokens}
        return {INSIDE: data}, {**self._named(kind, config, tensors), **({"rope_freqs.weight": factors} if factors is not None else {})}

    def _named(self, kind: str, config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ours = {_gguf_name(name): name for name in tensors if name not in ("d2t", "t2d")}
        if None in ours:
            raise ForedraftError(f"{ours[None]}: {kind} of {BUILD} has no such tensor")
        named = {str(theirs): tensors[name] for theirs, name in ours.items()}
        for theirs in [name for name in named if name.split(".")[2:3] and name.split(".")[2] in PERMUTED[kind]]:
            named[theirs] = paired(named[theirs], config.head_dim)
        if "d2t" in tensors:
            named["d2t"] = tensors["d2t"].new_tensor(range(len(tensors["d2t"]))) + tensors["d2t"]
        return named

    def save(self, file: Path, config: Config, tensors: Mapping[str, Tensor]) -> None:
        """The matrices as `outtype` says."""
        data = dict(config[INSIDE])
        write_gguf(file, data.pop("general.architecture"), data, tensors, self.options.outtype)

    def open(self, file: Path) -> OneFile:
        """Metadata and tensors; rows of q and k, and d2t, are made ours as they are loaded."""
        read = heads.alone(read_gguf(file))
        data, kind = dict(read.fields), read.fields.get("general.architecture")
        if "d2t" in read.tensors:
            data["d2t"] = read.tensors["d2t"][0][0]
        if "markov_w1.weight" in read.tensors:
            data["markov"] = [read.tensors["markov_w1.weight"][0][1], "conf_proj.weight" in read.tensors]
        if "rope_freqs.weight" in read.tensors:
            data["rope_freqs"] = read.load("rope_freqs.weight").tolist()
        if read.packed:
            data["packed"] = ", ".join(read.packed)
        permuted, dim = PERMUTED.get(str(kind), ()), data.get(f"{kind}.attention.key_length")

        def load(name: str) -> Tensor:
            tensor = read.load(name)
            if name == "d2t":
                return tensor - torch.arange(len(tensor))
            here = name.startswith("blk.") and name.split(".")[2] in permuted and isinstance(dim, int)
            return halved(tensor, dim) if here and dim and tensor.shape[0] % dim == 0 else tensor

        return OneFile({INSIDE: data}, read.tensors, load)


def _gguf_name(name: str) -> str | None:
    """Its name of one of our tensors; None if it has none."""
    (outer, _, end), inner = name.rpartition("."), name.split(".", 2)
    if outer in OUTER:
        return f"{OUTER[outer]}.{end}"
    if inner[0] != "layers" or (part := INNER.get(inner[2].removesuffix(".weight"))) is None:
        return None
    return f"blk.{inner[1]}.{part}.weight"


def _markov(data: Mapping[str, Any]) -> dict[str, Any]:
    """Of a DSpark draft, its heads."""
    held = data.get("markov")
    if not isinstance(held, list) or len(held) != 2:
        return {}
    anchor = data.get("dflash.sample_from_anchor", True)
    return {"markov_rank": held[0], "enable_confidence_head": held[1], "sample_from_anchor": anchor, "markov_head_type": "vanilla"}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    stem, dot, end = name.rpartition(".")
    return f"{names.get(stem, stem)}{dot}{end}"


@hookimpl
def foredraft_formats() -> list[type]:
    """The format of this file."""
    return [GGUF]
