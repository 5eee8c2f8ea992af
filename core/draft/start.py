"""What a draft takes over from its target before it is trained."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..contracts.draft import DraftModel
from ..errors import few
from ..files.raw import read_tensor
from ..files.tensor_names import TARGET_HEAD
from ..target.capture import norm_scale
from ..target.pairing import remember
from ..target.shipped import tensor_files
from ..target.target import Target
from ..target.weights import FLOATS, is_plain, matrix_of, own_tensors
from .config import set_mask_token
from .family import together
from .vocabulary import choose_mask_token, choose_vocabulary, count_tokens, coverage


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
        shipped = draft.algorithm.wiring.start(draft, [draft.weights_of(layer) for layer in last], target.final_norm)
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
            with suppress(TypeError, AttributeError):  # a norm with a gate, of linear attention: no part of a draft
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
