"""The suites shown in docs/testing.md pass under pytest; test_docs.py runs the other blocks."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs/testing.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.S)


def test_all_blocks_are_known() -> None:
    assert [language for language, _ in BLOCKS] == ["sh", "python", "python"]


def test_suites(tmp_path: Path) -> None:
    """Both suites of the page pass."""
    for i, (_, block) in enumerate(BLOCKS[1:]):
        (tmp_path / f"test_{i}.py").write_text(block)
        assert len([line for line in block.splitlines() if line.strip()]) <= 25
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    passed = re.search(r"^(\d+) passed", done.stdout.splitlines()[-1])
    assert passed is not None, done.stdout
    assert int(passed[1]) > 70
