"""A training step stays on its device: on `meta`, whose tensors hold no values, whatever waits for one raises; most uses of a tensor
left on the CPU do, too."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny import tiny_batch, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from foredraft import Signal
from foredraft.draft.attention import patterns
from foredraft.draft.attention.masked import dense_mask

STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"ttt_steps": 3, "num_layers": 2}),
    "reduced": ("eagle3", {"ttt_steps": 2, "draft_vocab_size": 30}),
    "eagle31": ("eagle31", {"ttt_steps": 2}),
    "peagle": ("peagle", {"num_depths": 3, "num_layers": 2}),
    "dflash": ("dflash", {"block_size": 4, "num_layers": 2}),
    "dpace": ("dflash", {"block_size": 4, "num_layers": 2, "weighting": "dpace"}),
    "medusa": ("medusa", {"num_heads": 3}),
    "served": ("medusa", {"num_heads": 2, "served": True}),
    "eagle": ("eagle", {"ttt_steps": 2}),
    "mtp": ("mtp", {"head": "mimo"}),
}


def masked_plain(q: Tensor, k: Tensor, v: Tensor, sees: Any, rows: Tensor, scale: float) -> Tensor:
    """In place of the CPU's, which looks for keys that nobody sees."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(sees, rows, k.shape[2]), scale=scale, enable_gqa=True)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_never_leaves_its_device(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "masked_dense", masked_plain)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # meta has none
    model, (algorithm, options) = tiny_target(), STEPS[step]
    draft = tiny_draft(model, algorithm, **options).train()
    batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaaaaau", "uuaaauubbbbb"]]))
    signal = tiny_signal(model, draft, batch)
    draft.to("meta")
    model.to("meta")
    batch = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, batch)
    states = (x.to("meta") for x in (signal.aux_BSA, signal.hidden_BST))
    out = draft(batch, Signal(*states, signal.head))
    out["loss"].backward()
    assert {x.device.type for x in (out["loss"], *out["metrics"].values())} == {"meta"}
    assert all(p.grad is not None for p in draft.parameters() if p.requires_grad)
