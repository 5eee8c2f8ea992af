"""The defects: each a way in which drafts of real projects went wrong, or can.

Listed by what people do (convert between formats and versions, train with another project's defaults, copy a config, merge, quantise,
cut), not by what doctor looks at.
"""

import json
from pathlib import Path

import torch
from doctor_bases import LETTERS, target_model, target_path
from doctor_plant import Plant, table
from torch import Tensor

DEFECTS, defect = table()
ATTENTION = "layers.0.self_attn"


def mixed(count: int, seed: int = 3) -> Tensor:
    """A random order of `count` things."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def set_d2t(plant: Plant, ids: Tensor) -> None:
    """Let the draft ids stand for these target ids, t2d included."""
    plant.tensors["d2t"] = ids - torch.arange(len(ids))
    t2d = torch.zeros_like(plant.tensors["t2d"])
    t2d[ids.clamp(0, len(t2d) - 1)] = True
    plant.tensors["t2d"] = t2d


def ids_of(plant: Plant) -> Tensor:
    """The target ids of the draft ids."""
    (d2t,) = plant.need("d2t")
    return d2t + torch.arange(len(d2t))


def interleaved(rows: Tensor, head: int) -> Tensor:
    """Rows of a projection, from halves (Llama) to pairs (the original RoPE's layout), head by head."""
    return rows.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)


# Aux layers.


@defect("aux", "eagle3", "eagle31", "eagle3-whole", "peagle", "dflash", "eagle3-speculators")
def aux_all_up_one(plant: Plant) -> None:
    plant.aux(lambda ids: [i + 1 for i in ids])


@defect("aux", "eagle3", "peagle")
def aux_top_level_counts_outputs(plant: Plant) -> None:
    plant.aux(lambda ids: [i - 1 for i in ids], nested=False)


@defect("aux|target_layer_ids", "dflash", "dflash-llama")
def target_layer_ids_one_based(plant: Plant) -> None:
    plant.aux(lambda ids: [i + 1 for i in ids], top=False)


@defect("aux", "eagle3", "eagle31")
def aux_of_a_deeper_target(plant: Plant) -> None:
    plant.aux(lambda ids: [2, 16, 29])


@defect("aux", "eagle3-phi3", "eagle3-latent")
def aux_first_layers(plant: Plant) -> None:
    plant.aux(lambda ids: list(range(1, len(ids) + 1)), nested=False)
    plant.aux(lambda ids: list(range(len(ids))), top=False)


@defect("aux|use_aux", "eagle3", engine="vLLM: use_aux_hidden_state false builds no fc")
def eagle_config_of_eagle1(plant: Plant) -> None:
    plant.config["eagle_config"]["use_aux_hidden_state"] = False


# Rotary embedding.


@defect("rope|theta|rotary", "eagle3", "eagle31", "dflash-llama", "eagle3-speculators")
def rope_theta_default(plant: Plant) -> None:
    plant.rope_everywhere(rope_theta=1000.0)


@defect("rope|theta|rotary", "eagle3", "peagle")
def rope_theta_missing_at_top(plant: Plant) -> None:
    plant.config["rope_theta"] = 100.0


@defect("rope|scaling|rotary", "eagle3-whole", "eagle3-two-layers")
def rope_scaling_lost_in_old_spelling(plant: Plant) -> None:
    plant.config["rope_scaling"] = None


@defect("rope|original_max|rotary", "peagle", "dflash")
def rope_original_max_lost(plant: Plant) -> None:
    plant.rope_everywhere(original_max_position_embeddings=None)


@defect("rope|rotary", "eagle3-whole", "eagle3-two-layers")
def rope_type_linear(plant: Plant) -> None:
    plant.rope_everywhere(rope_type="linear")


@defect("rope|factor|rotary", "eagle31", "eagle3-phi3")
def longrope_factors_of_another_model(plant: Plant) -> None:
    plant.rope_everywhere(short_factor=[16.0] * 8, long_factor=[32.0] * 8)


@defect("rope|attention_factor|rotary", "dflash", "eagle3-two-layers")
def yarn_attention_factor(plant: Plant) -> None:
    plant.rope_everywhere(attention_factor=3.0)


# Vocabulary.


@defect("draft.?vocab", "eagle3", "eagle31", "eagle3-speculators")
def draft_vocab_size_is_the_targets(plant: Plant) -> None:
    plant.config["draft_vocab_size"] = plant.layer_config["vocab_size"]


@defect("vocab", "eagle3-whole", "dflash")
def vocab_size_padded(plant: Plant) -> None:
    plant.layer_config["vocab_size"] = 128


@defect("d2t", "eagle3", "peagle", "eagle31-weak", "eagle3-nbr-speculators")
def d2t_of_another_vocabulary(plant: Plant) -> None:
    set_d2t(plant, mixed(len(LETTERS))[: len(ids_of(plant))].sort().values)


@defect("d2t", "eagle3", "eagle31", "eagle3-nbr", "eagle3-speculators")
def d2t_ids(plant: Plant) -> None:
    plant.tensors["d2t"] = ids_of(plant)


@defect("d2t", "eagle3", "eagle31")
def d2t_by_frequency(plant: Plant) -> None:
    ids = ids_of(plant)
    plant.tensors["d2t"] = ids[mixed(len(ids))] - torch.arange(len(ids))


@defect("d2t|t2d", "eagle3", "peagle")
def d2t_left_out(plant: Plant) -> None:
    plant.drop("d2t")


@defect("d2t", "eagle3", "eagle3-speculators")
def d2t_one_short(plant: Plant) -> None:
    plant.tensors["d2t"] = plant.need("d2t")[0][:-1]


@defect("d2t", "eagle3", "eagle31")
def d2t_half_rounded(plant: Plant) -> None:
    plant.tensors["d2t"] = plant.need("d2t")[0].to(torch.float32).add(0.5)


# Embedding and head.


@defect("embed", "eagle3", "eagle3-weak", "eagle3-nbr")
def embedding_of_another_model(plant: Plant) -> None:
    plant.need("embed_tokens.weight")
    plant.tensors["embed_tokens.weight"] = target_model("llama-other").get_input_embeddings().weight.detach()


@defect("embed", "eagle3", "peagle")
def embedding_rows_shifted(plant: Plant) -> None:
    plant.tensors["embed_tokens.weight"] = plant.need("embed_tokens.weight")[0].roll(1, 0)


@defect("head", "eagle3", "eagle3-nbr", "eagle3-weak")
def head_of_another_model(plant: Plant) -> None:
    rows = target_model("llama-other").get_output_embeddings().weight.detach()
    plant.tensors["lm_head.weight"] = rows[ids_of(plant)]


@defect("head", "eagle3", "eagle3-nbr")
def head_is_the_embedding(plant: Plant) -> None:
    plant.tensors["lm_head.weight"] = plant.need("embed_tokens.weight")[0][ids_of(plant)]


@defect(r"\bnorm\.weight|final norm|last norm", "eagle3", "eagle31")
def final_norm_of_ones(plant: Plant) -> None:
    norm = plant.need("norm.weight")[0]
    plant.tensors["norm.weight"] = torch.ones_like(norm)


# The projection of the aux states.


@defect(r"\bfc\b", "eagle3", "eagle31", "peagle", "dflash", "eagle3-speculators")
def fc_initialised_again(plant: Plant) -> None:
    plant.fresh("fc.weight")


@defect(r"\bfc\b|order|aux", "eagle3", "eagle3-two-layers")
def fc_chunks_rotated(plant: Plant) -> None:
    plant.tensors["fc.weight"] = plant.need("fc.weight")[0].roll(64, 1)


@defect(r"\bfc\b", "eagle3-whole", "eagle3-phi3")
def fc_left_out(plant: Plant) -> None:
    plant.drop("fc.weight")


@defect(r"fc_norm", "eagle31")
def fc_norm_tensors_left_out(plant: Plant) -> None:
    plant.drop(*[f"fc_norm.{i}.weight" for i in range(3)])


@defect(r"fc_norm", "eagle31")
def fc_norms_in_another_order(plant: Plant) -> None:
    plant.swap("fc_norm.0.weight", "fc_norm.2.weight")


# The layers.


@defect(r"gate", "eagle3", "eagle31", "dflash", "eagle3-latent")
def gate_and_up_swapped(plant: Plant) -> None:
    plant.swap("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight")


@defect(r"rotary|rope|interleav|layout|q_proj", "eagle3", "eagle31")
def q_rows_of_the_original_layout(plant: Plant) -> None:
    plant.tensors[f"{ATTENTION}.q_proj.weight"] = interleaved(plant.need(f"{ATTENTION}.q_proj.weight")[0], 16)


@defect(r"k_proj|v_proj|heads", "eagle3", "eagle3-whole")
def kv_heads_in_another_order(plant: Plant) -> None:
    for name in ("k_proj", "v_proj"):
        plant.tensors[f"{ATTENTION}.{name}.weight"] = plant.need(f"{ATTENTION}.{name}.weight")[0].roll(16, 0)


@defect(r"hidden_norm|input_layernorm", "eagle3", "eagle31", "eagle3-nbr")
def hidden_norm_and_input_layernorm_swapped(plant: Plant) -> None:
    plant.swap("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight")


@defect(r"o_proj", "eagle3", "eagle31", "dflash-llama")
def o_proj_initialised_again(plant: Plant) -> None:
    plant.fresh(f"{ATTENTION}.o_proj.weight")


@defect(r"layers?\b.*(order|swap)|order of|swapped", "eagle3-two-layers", "dflash", "peagle-two-layers")
def layers_swapped(plant: Plant) -> None:
    for name in [n for n in plant.tensors if n.startswith("layers.0.")]:
        other = name.replace("layers.0.", "layers.1.")
        if other in plant.tensors and plant.tensors[other].shape == plant.tensors[name].shape:
            plant.swap(name, other)


@defect(r"q_norm|k_norm", "eagle3-two-layers", "dflash")
def q_norm_and_k_norm_swapped(plant: Plant) -> None:
    for layer in (0, 1):
        plant.swap(f"layers.{layer}.self_attn.q_norm.weight", f"layers.{layer}.self_attn.k_norm.weight")


@defect(r"q_norm|k_norm", "dflash", "eagle3-two-layers")
def q_and_k_norms_left_out(plant: Plant) -> None:
    plant.drop(*[n for n in plant.tensors if "q_norm" in n or "k_norm" in n])


@defect(r"rope_interleave|interleav|rotary|rope", "eagle3-latent")
def latent_rope_interleave_flipped(plant: Plant) -> None:
    plant.config["rope_interleave"] = not plant.config.get("rope_interleave", True)


@defect(r"norm_output", "eagle31", "eagle31-weak")
def norm_output_lost(plant: Plant) -> None:
    plant.config["norm_output"] = False


@defect(r"norm_before_residual", "eagle3", "eagle31", "eagle3-weak")
def norm_before_residual_switched_on(plant: Plant) -> None:
    plant.config["norm_before_residual"] = True


@defect(r"norm_before_residual|norm_output|fc_norm", "eagle31", "eagle3-nbr")
def record_and_flags_lose_the_norms(plant: Plant) -> None:
    made = plant.config["foredraft"]
    for flag in ("norm_output", "norm_before_residual"):
        for place in (plant.config, made["options"], made["spec"]):
            place[flag] = False


# Tensors and files.


@defect(r"model\.", "eagle3", "dflash", engine="vLLM puts model. before every name itself")
def names_with_model(plant: Plant) -> None:
    plant.tensors = {n if n in ("d2t", "t2d", "lm_head.weight") else f"model.{n}": t for n, t in plant.tensors.items()}


@defect(r"unexpected|surplus|extra|skip|knows? no|rotary_emb", "eagle3", "dflash")
def rotary_buffers_saved(plant: Plant) -> None:
    plant.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)


@defect(r"attn|attention|self_attn", "eagle3", "dflash")
def attention_under_another_name(plant: Plant) -> None:
    plant.tensors = {n.replace("self_attn", "attention"): t for n, t in plant.tensors.items()}


@defect(r"two files|twice|more than one file|both|index", "eagle3", "eagle31", engine="vLLM reads all files, the last one wins")
def one_tensor_in_two_files(plant: Plant) -> None:
    plant.files["model-00002.safetensors"] = {"fc.weight": 0.05 * torch.randn(plant.need("fc.weight")[0].shape)}


def _write_index(path: Path, names: dict[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@defect(r"damaged|cut|truncat|whole|incomplete", "eagle3", "dflash")
def file_cut_off(plant: Plant) -> None:
    plant.after = lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-5000])


@defect(r"inf|finite", "eagle31", "peagle")
def infinite_after_a_cast(plant: Plant) -> None:
    plant.need("fc.weight")[0][0, 0] = float("inf")


@defect(r"int8|quanti|dtype", "eagle3", "eagle31")
def int8_without_scales(plant: Plant) -> None:
    for name in [n for n in plant.tensors if n.endswith("_proj.weight")]:
        w = plant.tensors[name]
        plant.tensors[name] = (w / w.abs().max() * 127).round().to(torch.int8)


@defect(r"quanti", "eagle3", "dflash")
def quantisation_config_left_over(plant: Plant) -> None:
    plant.config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}


@defect(r"lora|adapter|unexpected|missing", "eagle3", "eagle31")
def only_a_lora(plant: Plant) -> None:
    q = plant.tensors.pop(f"{ATTENTION}.q_proj.weight")
    plant.tensors[f"{ATTENTION}.q_proj.lora_A.weight"] = q[:4]
    plant.tensors[f"{ATTENTION}.q_proj.lora_B.weight"] = q[:, :4]


# Parallel drafts.


@defect(r"mask", "peagle", "dflash", "peagle-speculators", "dflash-speculators")
def mask_token_wrong(plant: Plant) -> None:
    token = 5
    for name in ("mask_token_id", "ptd_token_id", "pard_token"):
        if plant.config.get(name) is not None:
            plant.config[name] = token
    if "dflash_config" in plant.config:
        plant.config["dflash_config"]["mask_token_id"] = token


@defect(r"mask", "peagle", "dflash")
def mask_token_beyond_the_vocabulary(plant: Plant) -> None:
    plant.config["mask_token_id"] = 4096
    plant.config.get("dflash_config", {})["mask_token_id"] = 4096


@defect(r"mask_hidden", "peagle", "peagle-two-layers")
def mask_hidden_left_out(plant: Plant) -> None:
    plant.drop("mask_hidden")


@defect(r"block", "dflash", "dflash-speculators")
def block_size_doubled(plant: Plant) -> None:
    plant.config["block_size"] = 16


@defect(r"causal", "dflash", engine="vLLM and SGLang then mask what the block was trained to see")
def dflash_causal(plant: Plant) -> None:
    plant.config["dflash_config"]["causal"] = True


@defect(r"hidden_norm", "dflash", "dflash-llama")
def dflash_context_norm_left_out(plant: Plant) -> None:
    plant.drop("hidden_norm.weight")


# Shapes and the rest of the config.


@defect(r"head", "eagle3", "eagle31", "eagle3-speculators")
def heads_fewer_and_wider(plant: Plant) -> None:
    plant.layer_config.update(num_attention_heads=2, num_key_value_heads=1, head_dim=32)


@defect(r"head", "eagle3-whole", "eagle3-weak")
def heads_more_and_narrower(plant: Plant) -> None:
    plant.layer_config.update(num_attention_heads=8, num_key_value_heads=4, head_dim=8)


@defect(r"hidden_act|activation|gelu", "eagle3", "eagle3-whole", "dflash")
def activation_gelu(plant: Plant) -> None:
    plant.layer_config["hidden_act"] = "gelu_new"


@defect(r"intermediate|shape|mlp|gate", "eagle3")
def intermediate_size_of_another(plant: Plant) -> None:
    plant.layer_config["intermediate_size"] = 256


@defect(r"target_hidden_size|width|fc", "eagle3", "dflash")
def target_hidden_size_wrong(plant: Plant) -> None:
    plant.config["target_hidden_size"] = 128


@defect(r"bias", "eagle3", "eagle31")
def attention_bias_without_biases(plant: Plant) -> None:
    plant.config["attention_bias"] = True


@defect(r"bias", "eagle3-biased")
def biases_lost(plant: Plant) -> None:
    plant.drop(*[n for n in plant.tensors if n.endswith(".bias")])


@defect(r"bias", "eagle3-biased")
def biases_and_flags_lost(plant: Plant) -> None:
    plant.drop(*[n for n in plant.tensors if n.endswith(".bias")])
    plant.config.update(attention_bias=False, mlp_bias=False)


@defect(r"architecture|refuses|dflash", "dflash-llama", "dflash")
def dflash_under_an_eagle_architecture(plant: Plant) -> None:
    plant.config["architectures"] = ["LlamaForCausalLMEagle3"]


@defect(r"target|verifier|embed|vocab|hidden|layers", "eagle3-whole", "eagle31")
def wrong_target_of_another_family(plant: Plant) -> None:
    plant.target = target_path("qwen3-yarn")
