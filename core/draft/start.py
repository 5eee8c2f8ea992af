"""What a draft takes over from its target before it is trained, or trained further."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ..contracts.aux_layers import check_aux_layers
from ..contracts.draft import DraftModel
from ..errors import ForedraftError, few
from ..files.raw import read_tensor
from ..files.spellings import TARGET_HEAD
from ..target.pairing import describe_target, remember
from ..target.shipped import tensor_files
from ..target.target import Target
from ..target.weights import FLOATS, is_plain, matrix_of, norm_scale, own_tensors
from .config import set_mask_token
from .family import together
from .vocabulary import choose_mask_token, choose_vocabulary, count_all, count_tokens, coverage


def start(draft: DraftModel, target: Target, rows: Iterable[dict[str, Any]] | None) -> str:
    """See `BaseDraft.start_from`."""
    config: Any = draft.config
    taken, chosen = ["embedding", "head"], ""
    if rows is not None and config.has_reduced_vocabulary:
        counts_V = count_tokens(rows, config.vocab_size)
        draft.set_draft_vocabulary(choose_vocabulary(counts_V, config.draft_vocab_size))
        chosen = f"; {note_coverage(draft, counts_V)}"
    if rows is not None and config.spec.mask_token:
        set_mask_token(config, choose_mask_token(rows, target.embedding_weight, config.spec.mask_token_id))
        config.update(draft.algorithm.engine_fields(config))
    if (begun := draft.algorithm.start(draft, target)) is not None:
        remember(config, target.model)
        return f"from a model of its own: {', '.join(begun)}{chosen}"
    draft.take_head(target)
    remember(config, target.model)
    shipped, refused = take_shipped(draft, target)
    if not shipped:
        last = target.layers[len(target.layers) - config.num_hidden_layers :]
        shipped = draft.wiring.start(draft, [draft.weights_of(layer) for layer in last], target.final_norm)
    taken += [*shipped, *refused]
    return f"from the target: {', '.join(taken)}{chosen}"


def take_shipped(draft: DraftModel, target: Target) -> tuple[list[str], list[str]]:
    """Take over the draft that a target's own checkpoint holds, if it holds one: what was taken, and why it was not, a text each."""
    files = tensor_files(target.model)
    named = draft.algorithm.shipped(draft, files)
    if not named:
        return [], []
    mine = {name: tensor for name, tensor in draft.state_dict().items() if name not in TARGET_HEAD}
    theirs = together({ours: read_tensor(files[name], name) for ours, name in named.items()})
    wrong = [f"{n} is not there" for n in mine if n not in theirs]
    wrong += [f"{n} is {tuple(theirs[n].shape)} of {theirs[n].dtype}" for n in mine if n in theirs and not _fits(theirs[n], mine[n])]
    if wrong:
        return [], [f"not the head in its own files, of which {few(wrong, 3)}"]
    for name, tensor in mine.items():
        tensor.copy_(theirs[name])
    return ["the head in its own files"], []


def _fits(theirs: Tensor, mine: Tensor) -> bool:
    return theirs.shape == mine.shape and theirs.dtype in FLOATS


def layer_weights(layer: nn.Module, scaled: bool = True) -> dict[str, Tensor]:
    """A decoder layer's parameters and saved buffers, as far as they are plain numbers: norms by what they multiply, projections that are
    quantised or have an adapter as the matrices they stand for. Unless `scaled`, norms as they are kept."""
    weights: dict[str, Tensor] = {}
    dtype = next((p.dtype for p in layer.parameters() if p.dtype in FLOATS), torch.float32)
    for name, module in layer.named_modules():
        own = own_tensors(module)
        if scaled and "Norm" in type(module).__name__ and getattr(own.get("weight"), "ndim", 0) == 1:
            with suppress(TypeError, AttributeError, ValueError):  # one with a gate, or of heads, in linear attention: no part of a draft
                own["weight"] = norm_scale(module)
        elif hasattr(module, "in_features"):
            own["weight"] = matrix_of(module, dtype)
        weights |= {f"{name}.{key}": tensor for key, tensor in own.items() if is_plain(tensor)}
    return weights


def note_coverage(draft: DraftModel, counts_V: Tensor) -> str:
    """Record which share of the supervised tokens a reduced vocabulary names; the same in words."""
    share = coverage(counts_V, draft.draft_ids)
    draft.config.update({"foredraft": {**draft.config.foredraft, "vocabulary_coverage": round(share, 4)}})
    return f"the draft vocabulary of {draft.config.draft_vocab_size} tokens covers {share:.1%} of the supervised ones"


def retarget(draft: DraftModel, model: PreTrainedModel, rows: Iterable[dict[str, Any]] | None, size: int | None) -> str:
    """See `BaseDraft.retarget`."""
    config: Any = draft.config
    check_fits(config, model.config)
    vocab_size = model.config.get_text_config().vocab_size
    counts_V = None if rows is None else count_tokens(rows, vocab_size)
    old_W, ids_W = draft.draft_ids.cpu(), _vocabulary(draft, vocab_size, counts_V, size)
    draft.float()
    embedding_VD, head_WD = (w.detach().clone() for w in (draft.embed_tokens.weight, draft.lm_head.weight))
    draft.resize_vocabulary(vocab_size, len(ids_W))
    draft.set_draft_vocabulary(ids_W)
    made = {name: value for name, value in config.foredraft.items() if name not in ("measured", "vocabulary_coverage")}
    config.update({"foredraft": {**made, "target": describe_target(model.config)}})
    remember(config, model)
    told = ["from a trained draft: its layers"]
    if config.spec.target_head:
        draft.take_head(model)
        told.append("embedding and head the target's")
    else:
        told += [_embed(draft, embedding_VD, model), _head(draft, head_WD, old_W, ids_W, model)]
    if config.has_reduced_vocabulary and counts_V is not None:
        told.append(note_coverage(draft, counts_V))
    if rows is not None and config.spec.mask_token and int(count_all(rows, vocab_size)[config.mask_token_id]):
        set_mask_token(config, choose_mask_token(rows, matrix_of(model.get_input_embeddings())))
        told.append(f"mask token {config.mask_token_id}, as the rows use the old one")
    config.update(draft.algorithm.engine_fields(config))
    return "; ".join(told)


def check_fits(config: Any, target: PretrainedConfig) -> None:
    """Raises `ForedraftError` unless a draft of this config can read the hidden states of `target`; its vocabulary may be another."""
    theirs, made = describe_target(target), config.foredraft["target"]
    check_aux_layers(config.aux_layers, theirs["num_hidden_layers"], config.spec.final)
    differences = [
        f"{name}: the draft expects {expected}, the target has {theirs[name]}"
        for name, expected in (("hidden_size", config.target_hidden_size), ("num_hidden_layers", made["num_hidden_layers"]))
        if expected != theirs[name]
    ]
    if differences:
        raise ForedraftError(
            f"this draft was made for a target of another shape ({made['name'] or made['model_type']}):\n  " + "\n  ".join(differences)
        )


def _vocabulary(draft: DraftModel, vocab_size: int, counts_V: Tensor | None, size: int | None) -> Tensor:
    """The target ids of the draft vocabulary from now on, [W]: as before, unless another size is asked for or the target lacks some."""
    config: Any = draft.config
    old_W = draft.draft_ids.cpu()
    if config.spec.target_head and size not in (None, vocab_size):
        raise ForedraftError(
            f"draft_vocab_size={size}: this draft uses its target's own head, so its vocabulary is the target's {vocab_size}"
        )
    if size is None and config.has_reduced_vocabulary and int(old_W[-1]) < vocab_size:
        return old_W
    size = size or (config.draft_vocab_size if config.has_reduced_vocabulary else vocab_size)
    if size == vocab_size:
        return torch.arange(vocab_size)
    if counts_V is None:
        raise ForedraftError(f"a draft vocabulary of {size} tokens is chosen by what the training data uses: hand its rows over")
    known_V = torch.zeros(vocab_size, dtype=torch.long)
    known_V[old_W[old_W < vocab_size]] = 1
    return choose_vocabulary(2 * counts_V + known_V, size)  # of two tokens as frequent, the one that the draft knows


def _embed(draft: DraftModel, old_VD: Tensor, model: PreTrainedModel) -> str:
    """The target's embedding, unless the draft has one of its own: then the target's for new tokens alone."""
    weight, theirs_VT = draft.embed_tokens.weight, matrix_of(model.get_input_embeddings())
    own = bool(draft.config.foredraft.get("own_embedding")) or weight.shape[1] != theirs_VT.shape[1]
    kept = min(len(old_VD), len(weight)) if own else 0
    if kept < len(weight):
        _check_width(draft, theirs_VT)
        weight[kept:] = theirs_VT[kept:].to(weight)
    weight[:kept] = old_VD[:kept]
    return "its own embedding" if own else "embedding the target's"


def _head(draft: DraftModel, old_WD: Tensor, old_W: Tensor, ids_W: Tensor, model: PreTrainedModel) -> str:
    """The draft's row of every token that it knew, the target's of the others."""
    place_W = torch.searchsorted(old_W, ids_W).clamp(max=len(old_W) - 1)
    known_W = old_W[place_W] == ids_W
    weight, theirs_VT = draft.lm_head.weight, matrix_of(model.get_output_embeddings(), model.dtype)
    if not bool(known_W.all()):
        _check_width(draft, theirs_VT)
        weight[~known_W] = theirs_VT[ids_W[~known_W].to(theirs_VT.device)].to(weight)
    weight[known_W] = old_WD[place_W[known_W]]
    return f"head: its rows of {int(known_W.sum())} of {len(ids_W)} tokens"


def _check_width(draft: DraftModel, theirs_VT: Tensor) -> None:
    if theirs_VT.shape[1] != draft.config.hidden_size:
        raise ForedraftError(
            f"this draft is {draft.config.hidden_size} wide, its target's embedding and head {theirs_VT.shape[1]}: it has no weights for "
            "tokens that it does not know; leave its vocabulary as it is"
        )
