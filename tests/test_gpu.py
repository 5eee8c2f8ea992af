"""A training step on CUDA (FlexAttention where a mask is a function of indices) against the same step on the CPU."""

from functools import partial
from typing import Any

import pytest
from tiny import gradients, tiny_batch, tiny_draft, tiny_rows, tiny_signal, tiny_target
from torch import Tensor
from torch.testing import assert_close
from torch.utils._pytree import tree_map

pytestmark = pytest.mark.gpu
STEPS: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_steps": 3, "num_layers": 2},
    "peagle": {"num_depths": 3, "num_layers": 2},
    "dflash": {"block_size": 4, "num_layers": 2, "anchors": 20},
    "medusa": {"num_heads": 3},
}


def moved(device: str, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


ROWS = {
    "two rows": [["u" * 20 + "a" * 130, "u" * 7 + "a" * 40], ["u" + "b" * 99]],
    "few queries": [["u" * 9 + "a" * 80]],  # where FlexAttention would take another kernel, which grouped heads do not fit
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("algorithm", STEPS)
def test_loss_and_gradients_are_the_cpus(algorithm: str, rows: list[list[str]]) -> None:
    """In float32, at lengths that are no multiple of FlexAttention's block."""
    results = []
    for device in ("cpu", "cuda"):
        model = tiny_target(hidden=64).to(device)  # heads of 16, the least that FlexAttention takes
        draft = tiny_draft(model, algorithm, **STEPS[algorithm]).to(device).train()
        batch = tiny_batch(draft.algorithm, tiny_rows(rows))
        batch = tree_map(partial(moved, device), batch)
        loss = draft(batch, tiny_signal(model, draft, batch))["loss"]
        loss.backward()
        results.append({"loss": loss.detach().cpu(), **{name: g.cpu() for name, g in gradients(draft).items()}})
    for name, expected in results[0].items():
        assert_close(results[1][name], expected, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
