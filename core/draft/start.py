"""What a draft takes over from its target before it is trained."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..contracts.draft import DraftModel
from ..target.capture import norm_scale
from ..target.pairing import remember
from ..target.target import Target
from .config import set_mask_token
from .vocabulary import choose_mask_token, choose_vocabulary, count_tokens, coverage

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
    """A decoder layer's parameters and saved buffers: norms by what they multiply, quantised projections as the matrices they stand for."""
    weights = layer.state_dict()
    for name, module in layer.named_modules():
        weight: Any = getattr(module, "weight", None)
        if "Norm" in type(module).__name__ and getattr(weight, "ndim", 0) == 1:
            weights[f"{name}.weight"] = norm_scale(module)
        elif hasattr(module, "in_features") and not _is_matrix(weight):
            weights[f"{name}.weight"] = _asked(module, next((p.dtype for p in layer.parameters() if p.dtype in FLOATS), torch.float32))
    return weights


def _is_matrix(weight: Any) -> bool:
    """Whether a projection keeps its weight as it is: quantisers keep integers, subclasses of Tensor, or parts under other names."""
    return type(weight) in (Tensor, nn.Parameter) and weight.dtype in FLOATS and not weight.is_meta


def _asked(projection: Any, dtype: torch.dtype) -> Tensor:
    """The matrix [out, in] by which any projection multiplies, however it is stored: what it makes of the identity, less its bias."""
    device = next((t.device for t in (*projection.parameters(), *projection.buffers()) if not t.is_meta), None)
    eye = torch.eye(projection.in_features, dtype=dtype, device=device)
    return (projection(eye) - projection(torch.zeros_like(eye[:1]))).T


def note_coverage(draft: DraftModel, counts_V: Tensor) -> str:
    """Record which share of the supervised tokens a reduced vocabulary names; the same in words."""
    share = coverage(counts_V, draft.draft_ids)
    draft.config.update({"foredraft": {**draft.config.foredraft, "vocabulary_coverage": round(share, 4)}})
    return f"the draft vocabulary of {draft.config.draft_vocab_size} tokens covers {share:.1%} of the supervised ones"
