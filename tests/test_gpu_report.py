"""The report that is made where there is a GPU, rehearsed without one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import gpu_report


@pytest.mark.parametrize("algorithm", gpu_report.STEPS)
def test_steps(algorithm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell, told as soon as it is there."""
    monkeypatch.setattr(gpu_report, "SHARES", (0.5,))
    (cell,) = gpu_report.steps(f"{algorithm} 32", tiny=True)
    assert json.loads(capsys.readouterr().out) == [cell]
    assert cell["tokens_per_second"]["stored"] > cell["tokens_per_second"]["online"] > 0
    assert 0 < cell["mfu"]["online"] < 1


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
