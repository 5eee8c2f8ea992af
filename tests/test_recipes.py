"""The run files of docs/recipes: each can start, for a target of its shape; the page names them, and only commands that there are."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from foredraft.cli import COMMANDS
from foredraft.training.checks import check_draft
from foredraft.training.settings import RunConfig

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B-Instruct": ("llama", {**LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}),
    "Llama-3.3-70B-Instruct": (
        "llama",
        {**LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
    ),
    "DeepSeek-V3": ("deepseek_v3", {}),
}


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_recipe(file: Path, tmp_path: Path) -> None:
    config = RunConfig.load(file)
    family, fields = SHAPES[Path(config.target).name]
    AutoConfig.for_model(family, **fields).save_pretrained(tmp_path)
    problems: list[str] = []
    check_draft(config.model_copy(update={"target": str(tmp_path)}), problems)
    assert not problems


def test_page() -> None:
    text = (RECIPES / "index.md").read_text()
    assert {f"{name}.yaml" for name in re.findall(r"\]\(([\w-]+)\.yaml\)", text)} == {file.name for file in RECIPES.glob("*.yaml")}
    assert set(re.findall(r"docs/recipes/([\w-]+)\.yaml", text)) == {file.stem for file in RECIPES.glob("*.yaml")}
    assert set(re.findall(r"^foredraft (\w+)|which foredraft\) (\w+)", text, flags=re.M)) <= {(c, "") for c in COMMANDS} | {
        ("", c) for c in COMMANDS
    }
