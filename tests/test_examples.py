"""The shipped data: no training prompt overlaps with an evaluation prompt, and every run file is valid."""

import json
import re
from pathlib import Path

import pytest

from foredraft.decoding import load_prompts
from foredraft.training.settings import RunConfig

EXAMPLES = Path(__file__).parents[1] / "examples"


def word_runs(text: str, length: int = 8) -> set[tuple[str, ...]]:
    """All runs of `length` words."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def test_no_training_prompt_overlaps_with_evaluation() -> None:
    """Eight consecutive words in common would be a leak."""
    evaluation = {
        run
        for file in (EXAMPLES / "prompts").glob("*.jsonl")
        for line in file.open()
        for t in json.loads(line)["turns"]
        for run in word_runs(t)
    }
    assert len(evaluation) > 10_000
    leaks = []
    for file in EXAMPLES.glob("*.jsonl"):
        for line in file.open():
            asked = " ".join(m["content"] for m in json.loads(line)["messages"] if m["role"] == "user")
            if word_runs(asked) & evaluation:
                leaks.append((file.name, asked[:80]))
    assert not leaks


def test_data_is_small() -> None:
    """The repository carries at most 3 MB of conversations."""
    assert sum(f.stat().st_size for f in EXAMPLES.glob("*.jsonl")) <= 3_000_000


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda f: f.stem)
def test_run_files_are_valid(file: Path) -> None:
    """Every example run passes validation."""
    config = RunConfig.load(file)
    sources = [config.data.train] if isinstance(config.data.train, str) else config.data.train
    assert all((EXAMPLES.parent / source).exists() for source in sources)


@pytest.mark.parametrize("file", sorted((EXAMPLES / "prompts").glob("*.jsonl")), ids=lambda f: f.stem)
def test_evaluation_prompts_load(file: Path) -> None:
    """Eighty first turns each."""
    assert len(load_prompts(file)) == 80
