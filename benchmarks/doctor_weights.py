"""Planted defects of a draft's layers and files."""

import json
from pathlib import Path

import torch
from doctor_plant import Plant, defect
from torch import Tensor

ATTENTION = "layers.0.self_attn"


def interleaved(rows: Tensor, head: int) -> Tensor:
    """Rows of a projection, from halves (Llama) to pairs (the original RoPE's layout), head by head."""
    return rows.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)


# The projection of the aux states.


@defect(r"\bfc\b", "eagle3", "eagle3-turned", "eagle31", "peagle", "dflash", "eagle3-speculators")
def fc_initialised_again(plant: Plant) -> None:
    plant.fresh("fc.weight")


@defect(r"\bfc\b|order|aux", "eagle3", "eagle3-turned", "eagle31", "peagle", "eagle3-nbr-speculators")
def fc_chunks_reversed(plant: Plant) -> None:
    plant.tensors["fc.weight"] = torch.cat(list(plant.need("fc.weight")[0].chunk(3, dim=1))[::-1], dim=1)


@defect(r"\bfc\b|order|aux", "eagle3", "eagle3-two-layers")
def fc_chunks_rotated(plant: Plant) -> None:
    plant.tensors["fc.weight"] = plant.need("fc.weight")[0].roll(64, 1)


@defect(r"\bfc\b", "eagle3", "dflash-llama")
def fc_of_zeros(plant: Plant) -> None:
    plant.tensors["fc.weight"] = torch.zeros_like(plant.need("fc.weight")[0])


@defect(r"\bfc\b", "eagle3-whole", "eagle3-phi3")
def fc_left_out(plant: Plant) -> None:
    plant.drop("fc.weight")


@defect(r"\bfc\b", "eagle31", "eagle3-latent")
def fc_columns_interleaved(plant: Plant) -> None:
    plant.tensors["fc.weight"] = plant.need("fc.weight")[0].unflatten(1, (3, 64)).transpose(1, 2).flatten(1).contiguous()


@defect(r"fc_norm", "eagle31")
def fc_norm_tensors_left_out(plant: Plant) -> None:
    plant.drop(*[f"fc_norm.{i}.weight" for i in range(3)])


@defect(r"fc_norm", "eagle31")
def fc_norm_flag_lost(plant: Plant) -> None:
    plant.config["fc_norm"] = False


@defect(r"fc_norm", "eagle31")
def fc_norms_in_another_order(plant: Plant) -> None:
    plant.swap("fc_norm.0.weight", "fc_norm.2.weight")


# The layers.


@defect(
    r"\bk(_proj)?\b.*\bv(_proj)?\b|\bv(_proj)?\b.*\bk(_proj)?\b|keys? and values?",
    "eagle3",
    "eagle3-turned",
    "peagle",
    "dflash",
    "eagle3-speculators",
)
def k_and_v_swapped(plant: Plant) -> None:
    plant.swap(f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.v_proj.weight")


@defect(r"gate", "eagle3", "eagle3-turned", "eagle31", "dflash", "eagle3-latent")
def gate_and_up_swapped(plant: Plant) -> None:
    plant.swap("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight")


@defect(r"rotary|rope|interleav|layout", "eagle3", "eagle3-turned", "dflash-llama", "eagle3-nbr-speculators")
def q_and_k_rows_of_the_original_layout(plant: Plant) -> None:
    head = plant.layer_config["head_dim"]
    for name in ("q_proj", "k_proj"):
        plant.tensors[f"{ATTENTION}.{name}.weight"] = interleaved(plant.need(f"{ATTENTION}.{name}.weight")[0], head)


@defect(r"rotary|rope|interleav|layout|q_proj", "eagle3", "eagle31")
def q_rows_of_the_original_layout(plant: Plant) -> None:
    plant.tensors[f"{ATTENTION}.q_proj.weight"] = interleaved(plant.need(f"{ATTENTION}.q_proj.weight")[0], 16)


@defect(r"o_proj|heads", "eagle3", "dflash")
def o_columns_by_another_head_order(plant: Plant) -> None:
    head = plant.layer_config["head_dim"]
    plant.tensors[f"{ATTENTION}.o_proj.weight"] = plant.need(f"{ATTENTION}.o_proj.weight")[0].unflatten(1, (-1, head)).flip(1).flatten(1)


@defect(r"k_proj|v_proj|heads", "eagle3", "eagle3-whole")
def kv_heads_in_another_order(plant: Plant) -> None:
    for name in ("k_proj", "v_proj"):
        plant.tensors[f"{ATTENTION}.{name}.weight"] = plant.need(f"{ATTENTION}.{name}.weight")[0].roll(16, 0)


@defect(r"order|halves|concat|embed.*(state|feature)", "eagle3", "eagle3-turned", "eagle31", "peagle", "eagle3-weak")
def first_layer_reads_state_before_embedding(plant: Plant) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        plant.tensors[f"{ATTENTION}.{name}.weight"] = plant.need(f"{ATTENTION}.{name}.weight")[0].roll(64, 1)


@defect(r"hidden_norm|input_layernorm", "eagle3", "eagle31", "eagle3-nbr")
def hidden_norm_and_input_layernorm_swapped(plant: Plant) -> None:
    plant.swap("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight")


@defect(r"norm", "eagle3", "dflash", "eagle31")
def norms_less_one(plant: Plant) -> None:
    # As Gemma keeps them.
    for name in plant.tensors:
        if name.endswith("norm.weight"):
            plant.tensors[name] = plant.tensors[name] - 1


@defect(r"o_proj", "eagle3", "eagle3-turned", "eagle31", "dflash-llama")
def o_proj_initialised_again(plant: Plant) -> None:
    plant.fresh(f"{ATTENTION}.o_proj.weight")


@defect(r"mlp|down_proj", "eagle3", "eagle3-whole")
def mlp_initialised_again(plant: Plant) -> None:
    for name in ("gate_proj", "up_proj", "down_proj"):
        plant.fresh(f"layers.0.mlp.{name}.weight")


@defect(r"layers?\b.*(order|swap)|order of|swapped", "eagle3-two-layers", "dflash", "peagle-two-layers")
def layers_swapped(plant: Plant) -> None:
    for name in [n for n in plant.tensors if n.startswith("layers.0.")]:
        other = name.replace("layers.0.", "layers.1.")
        if other in plant.tensors and plant.tensors[other].shape == plant.tensors[name].shape:
            plant.swap(name, other)


@defect(r"layers?\.?1", "eagle3-two-layers", "dflash")
def second_layer_left_out(plant: Plant) -> None:
    plant.drop(*[n for n in plant.tensors if n.startswith("layers.1.")])


@defect(r"q_norm|k_norm", "eagle3-two-layers", "dflash")
def q_norm_and_k_norm_swapped(plant: Plant) -> None:
    for layer in (0, 1):
        plant.swap(f"layers.{layer}.self_attn.q_norm.weight", f"layers.{layer}.self_attn.k_norm.weight")


@defect(r"q_norm|k_norm|qk|architecture", "eagle3-two-layers", engine="vLLM's Llama draft has no q_norm and refuses the tensors")
def qwen_norms_under_llama(plant: Plant) -> None:
    plant.config["architectures"] = ["LlamaForCausalLMEagle3"]
    plant.config["model_type"] = "llama"


@defect(r"q_norm|k_norm", "dflash", "eagle3-two-layers")
def q_and_k_norms_left_out(plant: Plant) -> None:
    plant.drop(*[n for n in plant.tensors if "q_norm" in n or "k_norm" in n])


@defect(r"kv_b|kv_a|q_b", "eagle3-latent")
def latent_rows_values_before_keys(plant: Plant) -> None:
    name = f"{ATTENTION}.kv_b_proj.weight"
    plant.tensors[name] = plant.need(name)[0].unflatten(0, (4, 2, 16)).flip(1).flatten(0, 2)


@defect(r"rope_interleave|interleav|rotary|rope", "eagle3-latent")
def latent_rope_interleave_flipped(plant: Plant) -> None:
    plant.config["rope_interleave"] = not plant.config.get("rope_interleave", True)


@defect(r"norm_output", "eagle3", "eagle3-whole", "eagle3-speculators")
def norm_output_switched_on(plant: Plant) -> None:
    plant.config["norm_output"] = True


@defect(r"norm_output", "eagle31", "eagle31-weak")
def norm_output_lost(plant: Plant) -> None:
    plant.config["norm_output"] = False


@defect(r"norm_before_residual", "eagle3-nbr")
def norm_before_residual_lost(plant: Plant) -> None:
    plant.config["norm_before_residual"] = False


@defect(r"norm_before_residual", "eagle3", "eagle3-turned", "eagle31", "eagle3-weak")
def norm_before_residual_switched_on(plant: Plant) -> None:
    plant.config["norm_before_residual"] = True


@defect(r"norm_before_residual", "eagle3-speculators")
def norm_before_residual_left_to_the_default(plant: Plant) -> None:
    del plant.config["norm_before_residual"]


@defect(r"norm_before_residual|norm_output|fc_norm", "eagle31", "eagle3-nbr")
def record_and_flags_lose_the_norms(plant: Plant) -> None:
    made = plant.config["foredraft"]
    for flag in ("norm_output", "norm_before_residual"):
        for place in (plant.config, made["options"], made["spec"]):
            place[flag] = False


@defect(r"norm_before_residual", "eagle3-nbr-speculators")
def norm_before_residual_false_in_export(plant: Plant) -> None:
    plant.config["norm_before_residual"] = False


# Tensors and files.


@defect(r"model\.", "eagle3", "dflash", engine="vLLM puts model. before every name itself")
def names_with_model(plant: Plant) -> None:
    plant.tensors = {n if n in ("d2t", "t2d", "lm_head.weight") else f"model.{n}": t for n, t in plant.tensors.items()}


@defect(r"o_proj", "eagle3", "peagle-two-layers")
def o_proj_left_out(plant: Plant) -> None:
    plant.drop(f"{ATTENTION}.o_proj.weight")


@defect(r"unexpected|surplus|extra|skip|knows? no|rotary_emb", "eagle3", "dflash")
def rotary_buffers_saved(plant: Plant) -> None:
    plant.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)


@defect(r"hidden_norm", "eagle3", "eagle3-nbr")
def hidden_norm_left_out(plant: Plant) -> None:
    plant.drop("layers.0.hidden_norm.weight")


@defect(r"attn|attention|self_attn", "eagle3", "dflash")
def attention_under_another_name(plant: Plant) -> None:
    plant.tensors = {n.replace("self_attn", "attention"): t for n, t in plant.tensors.items()}


@defect(r"qkv", "eagle3", "peagle")
def fused_qkv(plant: Plant) -> None:
    parts = [plant.tensors.pop(f"{ATTENTION}.{n}_proj.weight") for n in "qkv"]
    plant.tensors[f"{ATTENTION}.qkv_proj.weight"] = torch.cat(parts)


@defect(r"two files|twice|more than one file|both|index", "eagle3", "eagle31", engine="vLLM reads all files, the last one wins")
def one_tensor_in_two_files(plant: Plant) -> None:
    plant.files["model-00002.safetensors"] = {"fc.weight": 0.05 * torch.randn(plant.need("fc.weight")[0].shape)}


@defect(r"index|model-00002", "eagle3", "dflash")
def index_names_a_file_that_is_not_there(plant: Plant) -> None:
    names = dict.fromkeys(plant.tensors, "model.safetensors") | {"fc.weight": "model-00002-of-00002.safetensors"}
    del plant.tensors["fc.weight"]
    plant.after = lambda path: _write_index(path, names)


def _write_index(path: Path, names: dict[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@defect(r"damaged|cut|truncat|whole|incomplete", "eagle3", "dflash")
def file_cut_off(plant: Plant) -> None:
    plant.after = lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-5000])


@defect(r"nan|finite", "eagle3", "dflash")
def a_nan(plant: Plant) -> None:
    plant.need("layers.0.mlp.down_proj.weight")[0][3, 5] = float("nan")


@defect(r"inf|finite", "eagle31", "peagle")
def infinite_after_a_cast(plant: Plant) -> None:
    plant.need("fc.weight")[0][0, 0] = float("inf")


@defect(r"zero", "eagle3", "eagle31")
def q_proj_of_zeros(plant: Plant) -> None:
    plant.tensors[f"{ATTENTION}.q_proj.weight"] = torch.zeros_like(plant.need(f"{ATTENTION}.q_proj.weight")[0])


@defect(r"int8|quanti|dtype", "eagle3", "eagle31")
def int8_without_scales(plant: Plant) -> None:
    for name in [n for n in plant.tensors if n.endswith("_proj.weight")]:
        w = plant.tensors[name]
        plant.tensors[name] = (w / w.abs().max() * 127).round().to(torch.int8)


@defect(r"float8|fp8|f8|quanti|dtype", "eagle3", "dflash")
def fp8_without_scales(plant: Plant) -> None:
    for name in [n for n in plant.tensors if n.endswith("_proj.weight")]:
        w = plant.tensors[name]
        plant.tensors[name] = (w / w.abs().max() * 400).to(torch.float8_e4m3fn)


@defect(r"quanti", "eagle3", "dflash")
def quantisation_config_left_over(plant: Plant) -> None:
    plant.config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}


@defect(r"quanti|scale|unexpected|int8|dtype", "eagle3")
def int8_with_scales(plant: Plant) -> None:
    for name in [n for n in plant.tensors if n.endswith("_proj.weight")]:
        w = plant.tensors[name]
        plant.tensors[name] = (w / w.abs().max() * 127).round().to(torch.int8)
        plant.tensors[f"{name}_scale"] = w.abs().max()[None] / 127


@defect(r"lora|adapter|unexpected|missing", "eagle3", "eagle31")
def only_a_lora(plant: Plant) -> None:
    q = plant.tensors.pop(f"{ATTENTION}.q_proj.weight")
    plant.tensors[f"{ATTENTION}.q_proj.lora_A.weight"] = q[:4]
    plant.tensors[f"{ATTENTION}.q_proj.lora_B.weight"] = q[:, :4]


@defect(r"config", "eagle3", "dflash")
def config_cut_off(plant: Plant) -> None:
    plant.after = lambda path: (path / "config.json").write_text((path / "config.json").read_text()[:-40])
