"""The report that is made where there is a GPU, rehearsed without one."""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pretended import pretended

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import gpu_report
import kernel_times

PARTS = [*gpu_report.STEPS, pytest.param("eagle3 compiled checkpointed", marks=pytest.mark.slow)]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The one there is, and CUDA's, pretended."""
    monkeypatch.setattr(kernel_times, "DEVICE", request.param)
    if request.param == "cuda":
        monkeypatch.setattr(gpu_report, "WORKERS", 0)  # what is pretended here, others cannot see
    with pretended() if request.param == "cuda" else nullcontext():
        yield request.param


@pytest.mark.parametrize("part", PARTS)
def test_steps(device: str, part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell, told as soon as it is there; what is counted is added behind."""
    monkeypatch.setattr(gpu_report, "SHARES", (0.5,))
    monkeypatch.setattr(gpu_report, "TINY_LENGTHS", (32,))
    cells = gpu_report.steps(part, tiny=True)
    assert json.loads(capsys.readouterr().out) == cells
    report = {
        "tiny": True,
        "peak_tflops": 1.0,
        "parts": {part: {"found": cells}, "tests": {"found": ["1 passed"]}, "loss": {"status": "no time left"}},
    }
    gpu_report.count(report)
    (cell,) = cells
    assert "error" not in cell
    needed = cell["needed_gflop_per_token"]
    for source, gflop in (("online", sum(needed.values())), ("stored", sum(needed.values()) - needed["target"])):
        assert 0 < cell["mfu"][source] < 1
        assert cell["mfu"][source] == pytest.approx(cell["tokens_per_second"][source] * gflop / 1e3)
    assert cell["counted_bytes"] > 0
    assert (cell["step_bytes"] is None) == (device == "cpu")


@pytest.mark.usefixtures("device")
def test_kernels() -> None:
    """Each gives times, or says why not."""
    for part in (kernel_times.attention, kernel_times.ranged, kernel_times.loss):
        cells = part(tiny=True)
        assert any("forward" in cell or "both" in cell for cell in cells)
        for cell in cells:
            error = cell.get("error", "")
            assert (
                not error or (cell["kernel"] == "flash-attn" and "the package" in error) or (cell["kernel"] == "flex" and "CUDA" in error)
            )
            assert all(cell[key] > 0 for key in {"forward", "backward", "both"} & {*cell})


def test_a_part_that_fails_or_lasts_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it printed until then is kept."""
    code: dict[str, str] = {
        "fails": "raise SystemExit('out of luck')",
        "lasts": "print([1], flush=True); import time; time.sleep(60)",
        "works": "print('{\"a\": 1}')",
    }
    monkeypatch.setattr(gpu_report, "parts", lambda tiny: {name: [sys.executable, "-c", text] for name, text in code.items()})
    monkeypatch.setattr(gpu_report, "PART", 4)
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", str(tmp_path / "report.json"), "--tiny"])
    gpu_report.main()
    found: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert found["fails"]["status"].startswith("status 1: out of luck")
    assert (found["lasts"]["status"], found["lasts"]["found"]) == ("cut off after 4 s", [1])
    assert (found["works"]["status"], found["works"]["found"]) == ("done", {"a": 1})
