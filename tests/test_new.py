"""`foredraft new` writes packages that pass as they stand, and refuses names that cannot be."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foredraft import ForedraftError, __version__
from foredraft.cli import app
from foredraft.cli.new import versions

KINDS = ("adapter", "algorithm", "engine", "format")


def new(*arguments: str) -> str:
    """What the command prints; its errors are raised."""
    return CliRunner().invoke(app, ["new", *arguments], catch_exceptions=False).output


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_family_that_transformers_knows(here: Path) -> None:
    """Its own tiny targets are under test. Those of unknown families, and algorithms: see test_third_party.py."""
    assert "next: cd foredraft-mine && pip install -e" in new("adapter", "mine", "--model-type", "qwen2_moe")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=here / "foredraft-mine",
        env={**os.environ, "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 50, done.stdout


def test_the_package(here: Path) -> None:
    """Its entry point leads to its module; the adapter is as short as the documentation says."""
    new("adapter", "some_family")
    root = here / "foredraft-some-family"
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [f"foredraft{versions(__version__)}"]
    assert project["name"] == "foredraft-some-family"
    assert project["entry-points"]["foredraft"] == {"some_family": "foredraft_some_family"}
    module = (root / "src/foredraft_some_family/__init__.py").read_text()
    assert len(module.splitlines()) <= 30
    assert [node.name for node in ast.parse(module).body if isinstance(node, ast.ClassDef)] == ["SomeFamilyDraft"]
    assert not [file for file in root.rglob("*") if file.is_file() and "$" in file.read_text()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_package_is_tidy(kind: str, here: Path) -> None:
    """No import is idle, double or out of order."""
    new(kind, "mine")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F,I"]
    done = subprocess.run(command, cwd=here / "foredraft-mine", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("version", "asked"), [("0.1.0", ">=0.1.0,<0.2"), ("1.4.2", ">=1.4.2,<2"), ("0.10.0.dev1", ">=0.10.0.dev1,<0.11")])
def test_the_versions_it_asks_for(version: str, asked: str) -> None:
    assert versions(version) == asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("adapter", "My-Model"), "'My-Model' cannot name a module: use lower-case letters, digits and underscores, as in my_adapter"),
        (("algorithm", "class"), "'class' cannot name a module"),
        (("algorithm", "eagle3"), "there is algorithm 'eagle3' already, from foredraft: choose another name"),
        (("engine", "vllm"), "there is engine 'vllm' already, from foredraft"),
        (("format", "nemo"), "there is format 'nemo' already, from foredraft"),
        (("adapter", "llama"), "there is adapter 'llama' already, from foredraft"),
        (("adapter", "mine", "--model-type", "llama"), "targets of model_type 'llama' have an adapter: 'llama' of foredraft"),
        (("algorithm", "mine", "--directory", "."), "'.' is there already: choose another --directory"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str, here: Path) -> None:
    with pytest.raises(ForedraftError, match="^" + message.replace(".", r"\.")):
        new(*arguments)
    assert list(here.iterdir()) == []
