"""Inputs of rows that repeat: the numbers of the dense ones, with less work."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny import tiny_draft, tiny_target
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from foredraft import Target
from foredraft.draft.attention import Lookup, take_rows
from foredraft.draft.attention.geometry import Beside
from foredraft.testing.tiny import gradients, tiny_batch, tiny_rows


def test_a_lookup_stands_for_its_rows() -> None:
    table, rows = torch.randn(2, 5, 4), torch.tensor([[0, 4, 4], [1, 1, 2]])
    whole, lookup = take_rows(table, rows), Lookup(table, rows)
    other = torch.randn(2, 3, 4)
    for made, dense in ((lookup, whole), (Beside(lookup, other), torch.cat([whole, other], -1)), (Lookup(table), table)):
        linear = nn.Linear(dense.shape[-1], 3)
        assert tuple(made.shape) == tuple(dense.shape)
        torch.testing.assert_close(linear(made), linear(dense))
        for found, expected in ((torch.tanh(made), dense.tanh()), (dense + made, 2 * dense), (made.abs(), dense.abs())):
            assert torch.equal(found, expected)
        for some in (torch.tensor([[1, 0], [2, 2]]), 2):
            assert torch.equal(take_rows(made, some).dense(), take_rows(dense, some))
        assert torch.equal(made[:, 1:], dense[:, 1:])


def counted(counter: FlopCounterMode, backbone: Any, dense: bool, *inputs: Any) -> torch.Tensor:
    """The backbone's output, its operations counted, for inputs as they are or made dense."""
    with counter:
        out: torch.Tensor = backbone(*(x.dense() if dense and isinstance(x, Lookup) else x for x in inputs))
    return out


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("eagle3", {"ttt_steps": 3, "num_layers": 2, "qk_norm": True}),
        ("eagle31", {"ttt_steps": 3, "norm_before_residual": True}),
        ("peagle", {"num_depths": 3}),
    ],
)
def test_training_gives_the_gradients_of_dense_inputs(algorithm: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target(attention_bias=True)
    draft = tiny_draft(model, algorithm, **options).train()
    draft.embed_tokens.requires_grad_()
    batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaaaubbbbbb", "uaaaaa"], ["uuuaaaaaaaaaaaa"]]))
    signal = Target(model, draft.config.aux_layers, draft.algorithm.needs).capture(batch)
    backbone = draft.backbone
    work: dict[bool, int] = {}

    def gradient(dense: bool, half: bool) -> torch.Tensor:
        counter = FlopCounterMode(display=False)
        monkeypatch.setattr(draft, "backbone", partial(counted, counter, backbone, dense))
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = draft(batch, signal)["loss"]
        loss.backward()
        work[dense] = counter.get_total_flops()
        return torch.cat([grad.flatten() for grad in gradients(draft).values()])

    exact = gradient(dense=True, half=False)
    error = {case: float((gradient(*case) - exact).norm() / exact.norm()) for case in ((False, False), (False, True), (True, True))}
    assert work[False] < work[True]
    assert error[False, False] < 1e-5
    assert error[False, True] < 1.5 * error[True, True]  # in half precision as near as the dense one
