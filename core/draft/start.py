"""What a draft takes over from its target before it is trained."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..contracts.draft import DraftModel
from ..target.capture import norm_scale
from ..target.pairing import remember
from ..target.target import Target
from ..target.weights import FLOATS, is_plain, matrix_of, own_tensors
from .config import set_mask_token
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
    draft.take_head(target)
    remember(config, target.model)
    last = target.layers[len(target.layers) - config.num_hidden_layers :]
    taken += draft.algorithm.wiring.start(draft, [draft.weights_of(layer) for layer in last], target.final_norm)
    return f"from the target: {', '.join(taken)}{chosen}"


def layer_weights(layer: nn.Module) -> dict[str, Tensor]:
    """A decoder layer's parameters and saved buffers, as far as they are plain numbers: norms by what they multiply, projections that are
    quantised or have an adapter as the matrices they stand for."""
    weights: dict[str, Tensor] = {}
    dtype = next((p.dtype for p in layer.parameters() if p.dtype in FLOATS), torch.float32)
    for name, module in layer.named_modules():
        own = own_tensors(module)
        if "Norm" in type(module).__name__ and getattr(own.get("weight"), "ndim", 0) == 1:
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
