"""Training on a draft's own outputs: which slots, and the states of every drafting step (training-time test)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contracts.algorithm import Plan
from ..contracts.draft import Batch, DraftModel, Layout
from ..data.collate import padded_width, reachable
from .attention import Lookup, Unrolled, UnrolledCache, unrolled_segments


def plan_unrolled(batch: Batch, steps: int, ahead: int = 0) -> Plan:
    """The slots that serving reaches: x_{t+1} .. x_{t+2+k} in one assistant span of x_t's document.

    `slots` [B, Q] are those of step 0, or so many `ahead` of them (drafts that read the newest token where these read the one behind
    it), padded with slot 0; `queries[k]` [N_k] index the flattened [B·Q]. `segments`: see `Unrolled`.
    """
    spans_BS, documents_BS = batch["spans"], batch["documents"]
    length = spans_BS.shape[1]
    slots = [mask_S.nonzero()[:, 0] for mask_S in reachable(spans_BS, documents_BS, 0)]
    width = padded_width(batch, slots)
    queries, rows = [], []
    for k in range(steps):
        mask_BS = reachable(spans_BS, documents_BS, k)
        at = [mask_S[s].nonzero()[:, 0] for s, mask_S in zip(slots, mask_BS, strict=True)]
        queries.append(torch.cat([b * width + q for b, q in enumerate(at)]))
        rows.append(torch.cat([b * length + slots[b][q] + 1 + k for b, q in enumerate(at)]))
    slots_BQ = torch.stack([F.pad(s, (0, width - len(s))) for s in slots]) + ahead
    return Plan.taught(queries, rows, slots=slots_BQ, segments=unrolled_segments(documents_BS, slots_BQ))


def unrolled(draft: DraftModel, batch: Batch, aux_BSA: Tensor, steps: int, through_time: bool = True) -> list[Tensor]:
    """The draft's states at `batch["slots"]` after each step: K tensors [B, Q, D].

    Slot t reads the target's state after x_t and the embedding of x_{t+1}; at step k its own state of step k-1, and x_{t+1+k}: with a
    gradient, unless `through_time` is off.
    """
    ids_BS, slots_BQ, positions_BS = batch["input_ids"], batch["slots"], batch["positions"]
    last = ids_BS.shape[1] - 1
    pattern = Unrolled(batch["documents"], slots_BQ, draft.kernel, batch.get("segments"), draft.regions)
    cache = UnrolledCache()
    context = draft.project_hidden_states(aux_BSA)
    embeds: Any = Lookup(draft.embed_input_ids(ids_BS.roll(-1, dims=1)))  # all steps read the same tokens
    hidden_BQD = draft.backbone(embeds, context, Layout(positions_BS, pattern, slots_BQ), cache)
    states = [hidden_BQD]
    positions_BQ = positions_BS.gather(1, slots_BQ)
    for k in range(1, steps):
        fed_BQD = hidden_BQD if through_time else hidden_BQD.detach()
        hidden_BQD = draft.backbone(embeds.at((slots_BQ + k).clamp(max=last)), fed_BQD, Layout(positions_BQ + k, pattern), cache)
        states.append(hidden_BQD)
    return states
