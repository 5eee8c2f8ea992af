"""Objectives against recorded losses of speculators (see golden/README.md), whose α is over the draft's vocabulary."""

from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import Tensor
from torch.testing import assert_close

from foredraft.loss import Taught, objective
from foredraft.loss.rows import Against, differentiate


def rows_of(logits_NW: Tensor, p_NW: Tensor, weight_N: Tensor, loss: Any, mass: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Per row: our loss, its gradient times the weight, and α."""
    count = len(logits_NW)
    taught = Taught(p_NW.argmax(-1), torch.full((count,), mass), p_NW, p_NW.argmax(-1))
    gradient_NW = logits_NW.clone()
    found = differentiate(gradient_NW, Against(taught, torch.arange(count), weight_N, objective(loss)), True)
    return found.loss_N, gradient_NW, found.accepted_N


@pytest.mark.parametrize(("ours", "theirs"), {"kl": "kl_div", "tv": "tv", "nla": "nla", "lk": "lk_hybrid", "text": "ce"}.items())
def test_speculators(ours: str, theirs: str) -> None:
    """A teacher whose every token the draft can name: then both α are one. Where it cannot, ours is the smaller.

    Its `ce` is against the likeliest token, given here as the text's.
    """
    tensors = {name: t[0] for name, t in Recorded("speculators_losses").tensors.items() if t.ndim}
    arguments = tensors["inputs.logits"], tensors["inputs.targets"].softmax(-1), tensors["inputs.weights"], ours
    loss_N, gradient_NW, accepted_N = rows_of(*arguments)
    assert_close(loss_N, tensors[f"{theirs}.elementwise"], rtol=1e-5, atol=1e-6)
    assert_close(gradient_NW, tensors[f"{theirs}.grad"], rtol=1e-4, atol=1e-6)
    assert rows_of(*arguments, mass=0.5)[2].lt(accepted_N).all()
