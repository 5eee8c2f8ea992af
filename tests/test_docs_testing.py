"""The suites shown in docs/testing.md pass under pytest; test_docs.py runs the other blocks."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs/testing.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.S)


def test_all_blocks_are_known() -> None:
    assert [language for language, _ in BLOCKS] == ["sh", "python", "python"]


@pytest.mark.parametrize("checks", ["registers or contract or packing", pytest.param("test", marks=pytest.mark.slow)])
def test_suites(pytester: pytest.Pytester, checks: str) -> None:
    """All suites of the page pass; in every run a few checks of each, which test_conformance.py makes of the same classes."""
    suites = [block for language, block in BLOCKS if language == "python"]
    assert all(len([line for line in block.splitlines() if line.strip()]) <= 25 for block in suites)
    pytester.makepyfile(**{f"test_{i}": block for i, block in enumerate(suites)})
    done = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", checks)
    outcomes = done.parseoutcomes()
    assert not {"failed", "errors", "error"} & outcomes.keys(), str(done.stdout)
    assert outcomes["passed"] >= (70 if checks == "test" else len(suites))
