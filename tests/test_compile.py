"""A draft that is compiled by regions: the numbers of one that is not, and a few compilations however lengths vary."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_deepseek import config
from tiny import gradients, tiny_batch, tiny_rows, tiny_signal, tiny_target
from torch._dynamo.testing import CompileCounterWithBackend

from foredraft import DraftTrainer, DraftTrainingArguments, ForedraftError, auto_draft
from foredraft.testing.tiny import tiny_model

SHAPES = (
    [["uuaaaaaaubbbbbb", "uaaaaa"], ["uuuaaaaaaaaaaaa"]],
    [["uaaa"], ["uuuaaaaaaaaaaaaaaaaaa", "uaa"], ["uubbb"]],
    [["uuaaaaaaaaaa"]],
    [["u" + "a" * 40]],
    [["uu" + "a" * 33], ["uaaaaa"]],
)
"""Batches of two rows, three, one, one, and two again."""
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("backend", "family", "half", "most"),
    [
        pytest.param("eager", "llama", False, 9),
        pytest.param("inductor", "llama", True, 11, marks=slow),
        pytest.param("inductor", "latent", False, 15, marks=slow),
    ],
)
def test_numbers_and_number_of_compilations(backend: str, family: str, half: bool, most: int) -> None:
    """A batch of a single row is one case, any other the other: after four shapes nothing more is compiled. Numbers are those without."""
    torch._dynamo.reset()
    model: Any = tiny_target() if family == "llama" else tiny_model(config())
    options: dict[str, Any] = {"ttt_steps": 4 if backend == "inductor" else 2, "num_layers": 2, "qk_norm": family == "llama"}
    draft = auto_draft(model.config, "eagle3", **options).train()
    batches = [tiny_batch(draft.algorithm, tiny_rows(shape)) for shape in SHAPES]
    signals = [tiny_signal(model, draft, batch) for batch in batches]

    def step(i: int) -> dict[str, Any]:
        draft.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = draft(batches[i], signals[i])["loss"]
        loss.backward()
        return {"loss": loss.detach(), **gradients(draft)}

    counter, counts = CompileCounterWithBackend(backend), []
    for checkpointing in (False, True) if backend == "inductor" else (True,):
        if checkpointing:
            draft.gradient_checkpointing_enable()
        for module in draft.modules():
            module.regions = None
        expected = [step(i) for i in range(len(SHAPES))]
        draft.compile(backend=counter)
        for i, numbers in enumerate(expected):
            torch.testing.assert_close(step(i), numbers, rtol=2e-2 if half else 1e-4, atol=2e-2 if half else 1e-5)
            counts.append(counter.frame_count)
    assert 0 < counts[0] <= counts[-1] <= most, counts
    assert counts[3:] == [counts[3]] * (len(counts) - 3), counts


def test_a_model_compiled_whole_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' argument and Accelerate's launcher would have it."""
    model = tiny_target()
    draft, wanted = auto_draft(model.config), "call draft.compile"
    arguments = DraftTrainingArguments(output_dir=str(tmp_path), max_steps=1)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(ForedraftError, match=wanted):
        DraftTrainer(draft, model, arguments)
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND")
    arguments.torch_compile = True
    with pytest.raises(ForedraftError, match=wanted):
        DraftTrainer(draft, model, arguments)
