"""Where rotary embeddings have the tokens of a text with images: no longer at their count, and in several components under M-RoPE."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..contracts.draft import Batch


def places_of(positions: Tensor | None, config: PretrainedConfig) -> Tensor | None:
    """The places [C, B, L] in the positions that a target's decoder was handed; None where tokens are counted.

    Of M-RoPE transformers hands on the count itself, too, before the components.
    """
    if positions is None:
        return None
    components = len((getattr(config.get_text_config(), "rope_parameters", None) or {}).get("mrope_section") or [0])
    places_CBL = positions[None] if positions.ndim == 2 else positions[-components:]
    counted = torch.equal(places_CBL, torch.arange(places_CBL.shape[-1], device=places_CBL.device).expand_as(places_CBL))
    return None if counted else places_CBL


def places_in(model: Any, batch: Batch) -> Tensor | None:
    """The places of a batch with images, [C, B, S], by the model's own rule, without running it; None where it counts tokens."""
    rule: Any = next((found for part in (model, model.base_model) if (found := getattr(part, "get_rope_index", None))), None)
    if rule is None:
        return None
    ids_BS, places = batch["input_ids"], list[Tensor | None]()
    for b, pixels in enumerate(batch["pixels"]):
        told = {name: t for name, t in (pixels or {}).items() if name in signature(rule).parameters}
        count = int((batch["documents"][b] >= 0).sum())
        places.append(rule(ids_BS[b, None, :count], **told)[0] if pixels else None)
    return stacked(places, ids_BS.shape[1], ids_BS.device)


def stacked(places: Sequence[Tensor | None], length: int, device: torch.device) -> Tensor | None:
    """The places of rows, [C, 1, n] each, n at most `length`, as [C, B, `length`], tokens behind them counted on; None if all are."""
    components = max((p.shape[0] for p in places if p is not None), default=0)
    count_S = torch.arange(length, device=device)
    rows = [count_S.expand(components, -1) if p is None else places_at(p.to(device), count_S[None])[:, 0] for p in places]
    return torch.stack(rows, dim=1) if components else None


def places_at(places_CBL: Tensor, index_BQ: Tensor) -> Tensor:
    """The places of the tokens at `index_BQ` of their texts, [C, B, Q]; behind the L that are known they are counted on."""
    last = places_CBL.shape[-1] - 1
    index_CBQ = index_BQ.expand(places_CBL.shape[0], places_CBL.shape[1], -1)
    return places_CBL.gather(-1, index_CBQ.clamp(max=last)) + (index_CBQ - last).clamp(min=0)
