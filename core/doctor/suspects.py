"""What usually is wrong with a draft that is not accepted, each as a change to try."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import check_aux_layers
from ..draft import BaseDraft
from ..errors import ForedraftError
from ..grouped_query import rope_of

Change = Callable[[Any], None]
Variants = Iterator[tuple[str, Change]]
"""What is changed, in words, and a function that changes a copy of the draft in place."""


@dataclass(frozen=True)
class Suspect:
    """One way to fail without a word."""

    id: str
    breaks: str
    mend: str
    variants: Callable[[BaseDraft, PreTrainedModel], Variants]
    """The changes that would undo it in this draft; none where it cannot be the cause."""


def aux_layers(draft: BaseDraft, target: PreTrainedModel) -> Variants:
    """All aux layers one up or one down."""
    count = target.config.get_text_config().num_hidden_layers
    for shift in (1, -1):
        layers = tuple(i + shift for i in draft.config.aux_layers)
        try:
            check_aux_layers(layers, count)
        except ForedraftError:
            continue
        yield f"aux layers {list(layers)} in place of {list(draft.config.aux_layers)}", partial(_read, layers=layers)


def _read(draft: Any, layers: tuple[int, ...]) -> None:
    draft.config.eagle_aux_hidden_state_layer_ids = list(layers)


def norms(draft: BaseDraft, target: PreTrainedModel) -> Variants:
    """The norm flags flipped; norms before fc cannot be put where there are none."""
    yield f"norm_output={not draft.config.norm_output}", _flip_output
    if draft.config.fc_norm:
        yield "fc_norm=False", _no_fc_norm


def _flip_output(draft: Any) -> None:
    draft.config.norm_output = not draft.config.norm_output


def _no_fc_norm(draft: Any) -> None:
    draft.fc_norm = nn.ModuleList()


def vocabulary(draft: Any, target: PreTrainedModel) -> Variants:
    """`d2t` read as target ids."""
    if draft.config.has_reduced_vocabulary:
        ids = draft.d2t
        if bool(((ids >= 0) & (ids < draft.config.vocab_size)).all()) and len(ids.unique()) == len(ids):
            yield "d2t read as target ids", _absolute


def _absolute(draft: Any) -> None:
    draft.d2t -= torch.arange(len(draft.d2t), device=draft.d2t.device)


def rope(draft: Any, target: PreTrainedModel) -> Variants:
    """The target's rotary parameters."""
    text = target.config.get_text_config()
    if not len(draft.layers) or not getattr(text, "rope_parameters", None):
        return
    latent = hasattr(draft.config, "kv_lora_rank")
    theirs = dict(text.rope_parameters) if latent else rope_of(text, draft.config.head_dim)
    if theirs != dict(draft.config.rope_parameters or {}):
        yield f"the target's RoPE, {str(theirs)[:120]}", partial(_turn, rope=theirs)


def _turn(draft: Any, rope: dict[str, Any]) -> None:
    draft.config.rope_parameters = rope
    draft.rotary_emb = draft.rotary_class(draft.config).to(draft.device)


def order(draft: Any, target: PreTrainedModel) -> Variants:
    """The halves of the first layer's input swapped; the aux states in the opposite order."""
    if draft.config.spec.wiring == "fuse" and len(draft.layers):
        yield "features before the embedding in the first layer's input", _swap_halves
    if draft.config.num_aux_hidden_states > 1:
        yield "aux states concatenated from the last to the first", _reverse_chunks


def _swap_halves(draft: Any) -> None:
    width = draft.config.hidden_size
    for module in draft.layers[0].self_attn.modules():
        if isinstance(module, nn.Linear) and module.in_features == 2 * width:
            module.weight.copy_(module.weight.roll(width, dims=1))


def _reverse_chunks(draft: Any) -> None:
    chunks = draft.fc.weight.chunk(draft.config.num_aux_hidden_states, dim=1)
    draft.fc.weight.copy_(torch.cat(chunks[::-1], dim=1))
    draft.fc_norm = nn.ModuleList(reversed(draft.fc_norm))


def embedding(draft: Any, target: PreTrainedModel) -> Variants:
    """The target's embedding."""
    theirs = target.get_input_embeddings().weight
    if theirs.shape == draft.embed_tokens.weight.shape and not torch.equal(theirs.to(draft.dtype), draft.embed_tokens.weight):
        yield "the target's embedding", partial(_embed, weight=theirs)


def _embed(draft: Any, weight: torch.Tensor) -> None:
    draft.embed_tokens.weight.copy_(weight)


def head(draft: Any, target: PreTrainedModel) -> Variants:
    """The target's head."""
    theirs, ids = target.get_output_embeddings().weight, draft.draft_ids
    if int(ids.min()) >= 0 and int(ids.max()) < len(theirs) and theirs.shape[1] == draft.lm_head.weight.shape[1]:
        yield "the target's head", partial(_head, weight=theirs[ids])


def _head(draft: Any, weight: torch.Tensor) -> None:
    draft.lm_head.weight.copy_(weight)


def mask_token(draft: Any, target: PreTrainedModel) -> Variants:
    """The mask tokens that other fields name, and the last id."""
    config = draft.config
    if config.mask_token_id is None:
        return
    others = [getattr(config, name, None) for name in ("ptd_token_id", "pard_token")]
    others += [(getattr(config, "dflash_config", None) or {}).get("mask_token_id"), config.vocab_size - 1]
    for token in dict.fromkeys(others):
        if isinstance(token, int) and 0 <= token < config.vocab_size and token != config.mask_token_id:
            yield f"mask token {token} in place of {config.mask_token_id}", partial(_mask, token=token)


def _mask(draft: Any, token: int) -> None:
    draft.config.mask_token_id = token


SUSPECTS = (
    Suspect("aux", "the draft reads other layers than it was trained on", "write these aux layers, in both conventions", aux_layers),
    Suspect("norms", "the draft is normed otherwise than in training", "set the flags so, at the top level of config.json", norms),
    Suspect("d2t", "drafted tokens are taken for others", "subtract 0, 1, 2, ... from d2t", vocabulary),
    Suspect("rope", "the draft turns queries and keys otherwise than in training", "write the target's rope_parameters", rope),
    Suspect("order", "weights meet the wrong half of their input", "reorder the columns, or name the layers in the other order", order),
    Suspect("embedding", "the draft reads noise in place of tokens", "take the target's embedding, or leave it out of the file", embedding),
    Suspect("head", "the draft's states are read by a head that is not theirs", "take the target's rows, or train the head", head),
    Suspect(
        "mask-token", "masked slots read a token that training did not use for them", "write this mask token by every name", mask_token
    ),
)
