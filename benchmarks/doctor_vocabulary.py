"""Planted defects of a draft's vocabulary, embedding and head."""

import torch
from doctor_bases import BASES, LETTERS, target_model
from doctor_plant import Plant, defect
from torch import Tensor


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


# Vocabulary.


@defect("vocab", "eagle3", "eagle31", "eagle3-weak")
def vocab_size_is_the_drafts(plant: Plant) -> None:
    plant.layer_config["vocab_size"] = plant.config["draft_vocab_size"]


@defect("draft.?vocab", "eagle3", "eagle31", "eagle3-speculators")
def draft_vocab_size_is_the_targets(plant: Plant) -> None:
    plant.config["draft_vocab_size"] = plant.layer_config["vocab_size"]


@defect("draft.?vocab", "eagle3", "peagle")
def draft_vocab_size_null(plant: Plant) -> None:
    plant.config["draft_vocab_size"] = None


@defect("vocab", "eagle3-whole", "dflash")
def vocab_size_padded(plant: Plant) -> None:
    plant.layer_config["vocab_size"] = 128


@defect("d2t", "eagle3", "eagle3-turned", "eagle31", "eagle3-weak", "eagle3-speculators")
def d2t_plus_one(plant: Plant) -> None:
    set_d2t(plant, (ids_of(plant) + 1).clamp(max=len(plant.tensors["t2d"]) - 1))


@defect("d2t", "eagle3", "peagle", "eagle31-weak", "eagle3-nbr-speculators")
def d2t_of_another_vocabulary(plant: Plant) -> None:
    set_d2t(plant, mixed(len(LETTERS))[: len(ids_of(plant))].sort().values)


@defect("d2t", "eagle3", "eagle31", "peagle-speculators")
def d2t_permuted(plant: Plant) -> None:
    set_d2t(plant, ids_of(plant)[mixed(len(ids_of(plant)))])


@defect("d2t", "eagle3", "eagle31", "eagle3-nbr", "eagle3-speculators")
def d2t_ids(plant: Plant) -> None:
    plant.tensors["d2t"] = ids_of(plant)


@defect("d2t", "eagle3", "peagle", "eagle3-weak")
def d2t_zeros(plant: Plant) -> None:
    plant.tensors["d2t"] = torch.zeros_like(ids_of(plant))


@defect("d2t", "eagle3", "eagle31")
def d2t_by_frequency(plant: Plant) -> None:
    ids = ids_of(plant)
    plant.tensors["d2t"] = ids[mixed(len(ids))] - torch.arange(len(ids))


@defect("d2t", "eagle3", "eagle31-weak")
def d2t_zeros_t2d_too(plant: Plant) -> None:
    set_d2t(plant, torch.arange(len(ids_of(plant))))


@defect("d2t|t2d", "eagle3", "peagle")
def d2t_left_out(plant: Plant) -> None:
    plant.drop("d2t")


@defect("d2t", "eagle31", "peagle")
def d2t_negated(plant: Plant) -> None:
    plant.tensors["d2t"] = -plant.need("d2t")[0]


@defect("d2t", "eagle3", "eagle3-speculators")
def d2t_one_short(plant: Plant) -> None:
    plant.tensors["d2t"] = plant.need("d2t")[0][:-1]


@defect("d2t", "eagle3-whole", engine="vLLM knows no d2t where the vocabulary is whole")
def d2t_in_a_whole_vocabulary(plant: Plant) -> None:
    plant.tensors["d2t"] = torch.zeros(plant.config["vocab_size"], dtype=torch.long)


@defect("d2t", "eagle3", "eagle31")
def d2t_half_rounded(plant: Plant) -> None:
    plant.tensors["d2t"] = plant.need("d2t")[0].to(torch.float32).add(0.5)


# Embedding and head.


@defect("embed", "eagle3", "eagle3-turned", "eagle31", "eagle3-weak", "peagle", "eagle3-speculators")
def embedding_random(plant: Plant) -> None:
    plant.fresh("embed_tokens.weight", 0.02)


@defect("embed", "eagle3", "eagle3-weak", "eagle3-nbr")
def embedding_of_another_model(plant: Plant) -> None:
    plant.need("embed_tokens.weight")
    plant.tensors["embed_tokens.weight"] = target_model("llama-other").get_input_embeddings().weight.detach()


@defect("embed", "eagle3", "eagle31", "eagle3-phi3")
def embedding_scaled(plant: Plant) -> None:
    # Gemma-like: multiplied by sqrt(hidden) once too often.
    plant.tensors["embed_tokens.weight"] = 8 * plant.need("embed_tokens.weight")[0]


@defect("embed", "eagle3", "peagle")
def embedding_rows_shifted(plant: Plant) -> None:
    plant.tensors["embed_tokens.weight"] = plant.need("embed_tokens.weight")[0].roll(1, 0)


@defect("lm_head|head-", "eagle3", "eagle31", "eagle3-whole", "eagle3-weak")
def head_random(plant: Plant) -> None:
    plant.fresh("lm_head.weight", 0.02)


@defect("lm_head|head-", "eagle3", "eagle3-nbr", "eagle3-weak")
def head_of_another_model(plant: Plant) -> None:
    rows = target_model("llama-other").get_output_embeddings().weight.detach()
    plant.tensors["lm_head.weight"] = rows[ids_of(plant)]


@defect("head|d2t", "eagle3", "eagle31")
def head_cut_not_selected(plant: Plant) -> None:
    rows = target_model(BASES[plant.base].family).get_output_embeddings().weight.detach()
    plant.tensors["lm_head.weight"] = rows[: len(ids_of(plant))]


@defect("head", "eagle3", "eagle3-nbr")
def head_is_the_embedding(plant: Plant) -> None:
    plant.tensors["lm_head.weight"] = plant.need("embed_tokens.weight")[0][ids_of(plant)]


@defect("head", "eagle3", "eagle3-latent")
def head_left_out(plant: Plant) -> None:
    plant.drop("lm_head.weight")


@defect(r"\bnorm\.weight|final norm|last norm", "eagle3", "eagle31")
def final_norm_of_ones(plant: Plant) -> None:
    norm = plant.need("norm.weight")[0]
    plant.tensors["norm.weight"] = torch.ones_like(norm)


@defect(r"\bnorm\.weight|final norm|last norm", "eagle3-whole", "eagle3-phi3")
def final_norm_left_out(plant: Plant) -> None:
    plant.drop("norm.weight")
