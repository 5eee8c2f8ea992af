"""Pictures of masks are those of the training step."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from foredraft import ForedraftError
from foredraft.cli import app
from foredraft.training.draw import DOCUMENTS, ROW, draw_mask, training_calls


def test_eagle3_step_by_step() -> None:
    """Three calls; the last sees a causal block of its document at step 0, and its own slot at steps 1 and 2."""
    calls = training_calls("eagle3", {"ttt_steps": 3})
    slots = [t for t in range(len(ROW) - 2) if ROW[t + 1] == ROW[t + 2] != "u" and DOCUMENTS[t] == DOCUMENTS[t + 1]]
    assert [call.entries for call in calls] == [[len(ROW)], [len(ROW), len(slots)], [len(ROW), len(slots), len(slots)]]
    first, *own = calls[-1].visible_QK.split(calls[-1].entries, dim=1)
    assert first.tolist() == [[k <= t and DOCUMENTS[k] == DOCUMENTS[t] for k in range(len(ROW))] for t in slots]
    assert all(torch.equal(block, torch.eye(len(slots), dtype=torch.bool)) for block in own)
    start = DOCUMENTS.index(1)
    assert calls[-1].positions == [t - start * DOCUMENTS[t] + 2 for t in slots]


@pytest.mark.parametrize("algorithm", ["peagle", "dflash"])
def test_one_call_and_no_word_across_documents(algorithm: str) -> None:
    (call,) = training_calls(algorithm, {})
    context = call.visible_QK[:, : len(ROW)]
    documents = torch.tensor(DOCUMENTS)
    assert not bool((context[:, documents == 0].any(1) & context[:, documents == 1].any(1)).any())
    assert bool(call.visible_QK.any(1).all())


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "new" / "mask.png"
    result = CliRunner().invoke(app, ["draw", "eagle3", "ttt_steps=2", "--out", str(file)], catch_exceptions=False)
    assert result.exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match="algorithm 'medusa' has no attention to draw"):
        draw_mask("medusa", tmp_path / "mask.png")
