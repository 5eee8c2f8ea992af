"""Planted defects of a draft's config: aux layers, rotary embedding, masks and blocks, shapes."""

import torch
from doctor_bases import target_path
from doctor_plant import Plant, defect

# Aux layers.


@defect("aux", "eagle3", "eagle3-turned", "eagle31", "eagle3-whole", "peagle", "dflash", "eagle3-speculators")
def aux_all_up_one(plant: Plant) -> None:
    plant.aux(lambda ids: [i + 1 for i in ids])


@defect("aux", "eagle3", "eagle31", "peagle", "dflash-llama", "eagle3-nbr-speculators")
def aux_all_down_one(plant: Plant) -> None:
    plant.aux(lambda ids: [i - 1 for i in ids])


@defect("aux", "eagle3", "peagle")
def aux_top_level_counts_outputs(plant: Plant) -> None:
    plant.aux(lambda ids: [i - 1 for i in ids], nested=False)


@defect("aux", "eagle3", "eagle31")
def aux_nested_counts_embedding(plant: Plant) -> None:
    plant.aux(lambda ids: [i + 1 for i in ids], top=False)


@defect("aux|target_layer_ids", "dflash", "dflash-llama")
def target_layer_ids_one_based(plant: Plant) -> None:
    plant.aux(lambda ids: [i + 1 for i in ids], top=False)


@defect("aux", "eagle3", "dflash-speculators")
def aux_last_one_up(plant: Plant) -> None:
    plant.aux(lambda ids: [*ids[:-1], ids[-1] + 1])


@defect("aux", "eagle3", "eagle31")
def aux_of_a_deeper_target(plant: Plant) -> None:
    plant.aux(lambda ids: [2, 16, 29])


@defect("aux", "eagle3-whole", "peagle")
def aux_one_fewer(plant: Plant) -> None:
    plant.aux(lambda ids: ids[:-1])


@defect("aux", "eagle3-phi3", "eagle3-latent")
def aux_first_layers(plant: Plant) -> None:
    plant.aux(lambda ids: list(range(1, len(ids) + 1)), nested=False)
    plant.aux(lambda ids: list(range(len(ids))), top=False)


@defect("aux", "eagle31", "eagle3")
def aux_descending(plant: Plant) -> None:
    plant.aux(lambda ids: ids[::-1])
    (fc,) = plant.need("fc.weight")
    plant.tensors["fc.weight"] = torch.cat(list(fc.chunk(3, dim=1))[::-1], dim=1)


@defect("aux|use_aux", "eagle3", engine="vLLM: use_aux_hidden_state false builds no fc")
def eagle_config_of_eagle1(plant: Plant) -> None:
    plant.config["eagle_config"]["use_aux_hidden_state"] = False


@defect("num_aux|aux-count|fc", "eagle3", "peagle")
def num_aux_wrong(plant: Plant) -> None:
    plant.config["num_aux_hidden_states"] = 4


# Rotary embedding.


@defect("rope|theta|rotary", "eagle3", "eagle3-turned", "eagle31", "dflash-llama", "eagle3-speculators")
def rope_theta_default(plant: Plant) -> None:
    plant.rope_everywhere(rope_theta=1000.0)


@defect("rope|theta|rotary", "eagle3-whole", "dflash")
def rope_theta_of_a_long_model(plant: Plant) -> None:
    plant.rope_everywhere(rope_theta=5e6)


@defect("rope|theta|rotary", "eagle3", "peagle")
def rope_theta_missing_at_top(plant: Plant) -> None:
    plant.config["rope_theta"] = 100.0


@defect("rope|scaling|rotary", "eagle3-whole", "dflash", "peagle-two-layers", "peagle-speculators")
def rope_scaling_lost(plant: Plant) -> None:
    layer = plant.layer_config
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": plant.rope["rope_theta"]}
    if "rope_scaling" in layer:
        layer["rope_scaling"] = None


@defect("rope|scaling|rotary", "eagle3-whole", "eagle3-two-layers")
def rope_scaling_lost_in_old_spelling(plant: Plant) -> None:
    plant.config["rope_scaling"] = None


@defect("rope|factor|rotary", "eagle3-whole", "dflash")
def rope_factor_wrong(plant: Plant) -> None:
    plant.rope_everywhere(factor=64.0)


@defect("rope|original_max|rotary", "peagle", "dflash")
def rope_original_max_lost(plant: Plant) -> None:
    plant.rope_everywhere(original_max_position_embeddings=None)


@defect("rope|original_max|rotary", "eagle3-whole", "peagle")
def rope_original_max_of_another_model(plant: Plant) -> None:
    plant.rope_everywhere(original_max_position_embeddings=2)


@defect("rope|rotary", "eagle3-whole", "eagle3-two-layers")
def rope_type_linear(plant: Plant) -> None:
    plant.rope_everywhere(rope_type="linear")


@defect("rope|scaling|rotary", "eagle3", "dflash-llama")
def rope_scaling_added(plant: Plant) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    plant.rope.update(scaling)
    plant.config["rope_scaling"] = scaling


@defect("rope|factor|rotary", "eagle31", "eagle3-phi3")
def longrope_factors_of_another_model(plant: Plant) -> None:
    plant.rope_everywhere(short_factor=[16.0] * 8, long_factor=[32.0] * 8)


@defect("rope|rotary", "eagle3-whole", "eagle3")
def rope_partial(plant: Plant) -> None:
    plant.rope_everywhere(partial_rotary_factor=0.25)


@defect("rope|attention_factor|rotary", "dflash", "eagle3-two-layers")
def yarn_attention_factor(plant: Plant) -> None:
    plant.rope_everywhere(attention_factor=3.0)


# Parallel drafts.


@defect(r"mask", "peagle", "dflash", "peagle-speculators", "dflash-speculators")
def mask_token_wrong(plant: Plant) -> None:
    token = 5
    for name in ("mask_token_id", "ptd_token_id", "pard_token"):
        if plant.config.get(name) is not None:
            plant.config[name] = token
    if "dflash_config" in plant.config:
        plant.config["dflash_config"]["mask_token_id"] = token


@defect(r"mask", "peagle", "dflash-llama")
def mask_token_differs_by_field(plant: Plant) -> None:
    top, nested = plant.config, plant.config.get("dflash_config", {})
    for place, name in ((top, "ptd_token_id"), (top, "pard_token"), (nested, "mask_token_id")):
        if place.get(name) is not None:
            place[name] = 7


@defect(r"mask", "peagle", "dflash")
def mask_token_beyond_the_vocabulary(plant: Plant) -> None:
    plant.config["mask_token_id"] = 4096
    plant.config.get("dflash_config", {})["mask_token_id"] = 4096


@defect(r"mask", "peagle", "dflash-llama")
def mask_token_null(plant: Plant) -> None:
    for name in ("mask_token_id", "ptd_token_id", "pard_token"):
        plant.config[name] = None
    plant.config.get("dflash_config", {})["mask_token_id"] = None


@defect(r"mask_hidden", "peagle", "peagle-two-layers")
def mask_hidden_left_out(plant: Plant) -> None:
    plant.drop("mask_hidden")


@defect(r"mask_hidden", "peagle", "peagle-speculators")
def mask_hidden_random(plant: Plant) -> None:
    plant.fresh("mask_hidden", 3.0)


@defect(r"block", "dflash", "dflash-speculators")
def block_size_doubled(plant: Plant) -> None:
    plant.config["block_size"] = 16


@defect(r"block", "dflash-llama")
def block_size_halved(plant: Plant) -> None:
    plant.config["block_size"] = 3


@defect(r"causal", "dflash", engine="vLLM and SGLang then mask what the block was trained to see")
def dflash_causal(plant: Plant) -> None:
    plant.config["dflash_config"]["causal"] = True


@defect(r"anchor", "dflash-speculators", engine="vLLM then reads a token more from each block")
def dflash_sample_from_anchor(plant: Plant) -> None:
    plant.config["sample_from_anchor"] = True


@defect(r"hidden_norm", "dflash", "dflash-llama")
def dflash_context_norm_left_out(plant: Plant) -> None:
    plant.drop("hidden_norm.weight")


@defect(r"hidden_norm|norm\b", "dflash", "dflash-llama")
def dflash_norm_and_hidden_norm_swapped(plant: Plant) -> None:
    plant.swap("hidden_norm.weight", "norm.weight")


# Shapes and the rest of the config.


@defect(r"num_(attention|key_value)_heads|\bheads\b|head_dim", "eagle3", "eagle31", "eagle3-speculators")
def heads_fewer_and_wider(plant: Plant) -> None:
    plant.layer_config.update(num_attention_heads=2, num_key_value_heads=1, head_dim=32)


@defect(r"num_key_value_heads|k_proj", "eagle3", "dflash")
def kv_heads_as_many_as_heads(plant: Plant) -> None:
    plant.layer_config["num_key_value_heads"] = plant.layer_config["num_attention_heads"]


@defect(r"num_(attention|key_value)_heads|\bheads\b|head_dim", "eagle3-whole", "eagle3-weak")
def heads_more_and_narrower(plant: Plant) -> None:
    plant.layer_config.update(num_attention_heads=8, num_key_value_heads=4, head_dim=8)


@defect(r"eps", "eagle3", "dflash", "eagle31")
def eps_of_one(plant: Plant) -> None:
    plant.layer_config["rms_norm_eps"] = 1.0


@defect(r"hidden_act|activation|gelu", "eagle3", "eagle3-whole", "dflash")
def activation_gelu(plant: Plant) -> None:
    plant.layer_config["hidden_act"] = "gelu_new"


@defect(r"num_hidden_layers|draft-layers", "eagle3", "dflash", "eagle3-speculators")
def num_hidden_layers_of_the_target(plant: Plant) -> None:
    plant.layer_config["num_hidden_layers"] = 8


@defect(r"intermediate|shape|mlp|gate", "eagle3")
def intermediate_size_of_another(plant: Plant) -> None:
    plant.layer_config["intermediate_size"] = 256


@defect(r"hidden_size|width|shape", "eagle3", "dflash")
def hidden_size_of_another(plant: Plant) -> None:
    plant.layer_config["hidden_size"] = 128


@defect(r"target_hidden_size|width|fc", "eagle3", "dflash")
def target_hidden_size_wrong(plant: Plant) -> None:
    plant.config["target_hidden_size"] = 128


@defect(r"sliding|window", "dflash", "eagle3-two-layers", engine="vLLM takes each layer's window from layer_types")
def sliding_window_left_over(plant: Plant) -> None:
    layers = plant.layer_config["num_hidden_layers"]
    plant.layer_config.update(sliding_window=2, use_sliding_window=True, layer_types=["sliding_attention"] * layers, max_window_layers=0)


@defect(r"bias", "eagle3", "eagle31")
def attention_bias_without_biases(plant: Plant) -> None:
    plant.config["attention_bias"] = True


@defect(r"bias", "eagle3-whole", "eagle3-weak")
def mlp_bias_without_biases(plant: Plant) -> None:
    plant.config["mlp_bias"] = True


@defect(r"bias", "eagle3-biased")
def biases_lost(plant: Plant) -> None:
    plant.drop(*[n for n in plant.tensors if n.endswith(".bias")])


@defect(r"bias", "eagle3-biased")
def bias_flags_lost(plant: Plant) -> None:
    plant.config.update(attention_bias=False, mlp_bias=False)


@defect(r"bias", "eagle3-biased")
def biases_and_flags_lost(plant: Plant) -> None:
    plant.drop(*[n for n in plant.tensors if n.endswith(".bias")])
    plant.config.update(attention_bias=False, mlp_bias=False)


@defect(r"architecture|refuses", "eagle3", "dflash")
def architecture_of_the_target(plant: Plant) -> None:
    plant.config["architectures"] = ["MixtralForCausalLM"]


@defect(r"architecture|refuses|dflash", "dflash-llama", "dflash")
def dflash_under_an_eagle_architecture(plant: Plant) -> None:
    plant.config["architectures"] = ["LlamaForCausalLMEagle3"]


@defect(r"(another|other|wrong|different) (target|model)|fingerprint", "eagle3", "eagle3-nbr", "dflash-llama", "eagle3-speculators")
def wrong_target_of_the_same_shape(plant: Plant) -> None:
    plant.target = target_path("llama-other")


@defect(r"(another|other|wrong|different) (target|model)|fingerprint|target-", "eagle3-whole", "eagle31")
def wrong_target_of_another_family(plant: Plant) -> None:
    plant.target = target_path("qwen3-yarn")


@defect(r"upper.norm|layers\.1", "eagle3-two-layers", engine="vLLM leaves the norm of layer 1 at ones")
def upper_norm_under_one_name(plant: Plant) -> None:
    plant.drop("layers.1.input_layernorm.weight")
