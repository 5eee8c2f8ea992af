"""What layers hold for their backward pass: the numbers of plain autograd."""

import contextlib
import gc
import sys
from typing import Any

import pytest
import torch
from tiny import tiny_draft, tiny_target
from torch import nn

from foredraft import Target
from foredraft.draft.attention.kernels import FlashCPU
from foredraft.draft.layer import recomputed
from foredraft.testing.tiny import gradients, tiny_batch, tiny_rows


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("eagle3", {"ttt_steps": 3, "num_layers": 2}),
        ("eagle31", {"ttt_steps": 2}),
        ("peagle", {}),
        ("dflash", {"num_layers": 2}),
        ("dflash2", {"num_layers": 2}),
    ],
)
def test_training_gives_the_gradients_of_plain_autograd(algorithm: str, options: dict[str, Any], half: bool) -> None:
    model = tiny_target(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, attention_bias=True)
    draft = tiny_draft(model, algorithm, **options)
    batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaaaubbbbbb", "uaaaaa"], ["uuuaaaaaaaaaaaa"]]))
    signal = Target(model, draft.config.aux_layers, draft.algorithm.needs).capture(batch)
    found, losses = [], []
    for prepare in (draft.eval, draft.train, draft.gradient_checkpointing_enable):
        prepare()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = draft(batch, signal)["loss"]
        loss.backward()
        losses.append(loss.item())
        found.append(gradients(draft))
    assert losses[0] == losses[1] == losses[2]
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=0, atol=0 if not half else 1e-2, msg=name)
        torch.testing.assert_close(found[2][name], grad, rtol=0, atol=1e-6 if not half else 1e-2, msg=name)


@pytest.mark.parametrize("end", ["no backward pass", "out of memory"])
@pytest.mark.parametrize(
    ("algorithm", "options"), [("eagle3", {"ttt_steps": 3, "num_layers": 2}), ("eagle", {"ttt_steps": 2}), ("mtp", {"head": "mimo"})]
)
def test_a_step_that_ends_early_is_forgotten(algorithm: str, options: dict[str, Any], end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of it lives on: who runs out of memory tries again with less."""
    model = tiny_target()
    draft = tiny_draft(model, algorithm, **options).train()
    batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaaabbbbbb"]]))
    signal = Target(model, draft.config.aux_layers, draft.algorithm.needs).capture(batch)
    draft(batch, signal)["loss"].backward()  # what is made once is there

    def refuse(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    if end == "out of memory":
        monkeypatch.setattr(sys.modules[type(draft.algorithm).__module__], "chunked", refuse)
    before = living()
    with contextlib.suppress(torch.OutOfMemoryError):
        draft(batch, signal)
    assert living() == before


def living() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def test_a_product_that_is_changed_in_place_is_told() -> None:
    layer = nn.Linear(4, 4, bias=False).train()
    out = recomputed(layer, lambda x, cache: layer(layer(x).exp_()), torch.ones(2, 4), cache=None)
    with pytest.raises(RuntimeError, match="in place"):
        out.sum().backward()


@pytest.mark.parametrize("switch", [False, True], ids=["products", "layer"])
def test_attention_runs_once_a_step_and_the_feed_forward_twice(switch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target()
    draft = tiny_draft(model, ttt_steps=3, num_layers=2)
    draft.train()
    if switch:
        draft.gradient_checkpointing_enable()
    batch = tiny_batch(draft.algorithm, tiny_rows([["uuaaaaaaubbbbbb"]]))
    ran: list[int] = []
    forward = FlashCPU.forward
    monkeypatch.setattr(FlashCPU, "forward", staticmethod(lambda *a: (ran.append(1), forward(*a))[1]))
    fed: list[int] = []
    for layer in draft.layers:
        layer.mlp.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[0].shape[1]))
    draft(batch, Target(model, draft.config.aux_layers).capture(batch))["loss"].backward()
    assert len(ran) == 3 * 2
    slots, inputs = batch["slots"].shape[1], batch["input_ids"].shape[1]
    assert sum(fed) == 2 * (inputs + slots + 2 * 2 * slots)  # step 0 runs the lower layer on all inputs
    assert len(fed) == 2 * 2 * 3 * (1 + 3 * switch)
