"""Every code block of the pages under docs/ runs, page by page, in the order in which a reader meets them."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml
from in_gguf import write_target
from tiny import tiny_target, tiny_tokenizer
from typer.testing import CliRunner

from foredraft import default_registry
from foredraft.cli import app

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = DOCS.parent / "examples"
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", flags=re.S | re.M)
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if BLOCK.search(page.read_text()))
SUITED = [page for page in PAGES if "\npytest " in (DOCS / page).read_text()]
"""Pages that run suites of tests."""
SHOWN = {"", "text", "toml", "yaml", "json"}
"""Languages that are shown; with a title they are written to that file."""
ELSEWHERE = {
    "pip install": "test_third_party.py",
    "pip wheel": "test_third_party.py",
    "make": "test_readme.py",
}
"""Commands that other tests run."""


@pytest.fixture(scope="module")
def assumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages assume, made tiny: targets, conversations, prompts, the runs of examples/."""
    folder, tokenizer = tmp_path_factory.mktemp("assumed"), tiny_tokenizer()
    for name in ("my-target", ".cache/smollm2"):
        tiny_target(vocab=len(tokenizer)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write_target(tiny_target(vocab=len(tokenizer)), tokenizer, folder / "my-target.gguf")
    text = "".join(
        json.dumps({"messages": [{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": f"{w} {w} {w}"}]}) + "\n"
        for w in "abcd"
    )
    examples = [str(p.relative_to(DOCS.parent)) for p in (DOCS.parent / "examples").rglob("*.jsonl")]
    for name in ("my-data.jsonl", "my-prompts.jsonl", *examples):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for file in (DOCS.parent / "examples").glob("*.yaml"):
        fields = yaml.safe_load(file.read_text())
        fields["data"].update(held_out=1, max_length=64)
        fields["training"].update(max_steps=2, num_train_epochs=1, save_strategy="no")
        if "draft_vocab_size" in fields:
            fields["draft_vocab_size"] = 40
        if fields.get("algorithm", "eagle3") == "eagle3":
            fields["options"] = {**fields.get("options", {}), "ttt_steps": 2}
        (folder / "examples" / file.name).write_text(yaml.safe_dump(fields))
    return folder


@pytest.fixture
def here(assumed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncounted: None) -> Iterator[Path]:
    """A folder with all that, and a registry that forgets."""
    shutil.copytree(assumed, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("foredraft.doctor.dynamic.NEW_TOKENS", 8)
    default_registry.cache_clear()
    yield tmp_path
    default_registry.cache_clear()


@pytest.mark.parametrize("page", PAGES)
def test_page(page: str, here: Path) -> None:
    """Files are written, Python runs in one namespace, commands of ours run in process; suites are among the slow, and none is left out."""
    read(page, here, suites := [])
    assert bool(suites) == (page in SUITED)


@pytest.mark.slow
@pytest.mark.parametrize("page", SUITED)
def test_page_with_its_suite(page: str, here: Path) -> None:
    read(page, here, suites := [])
    assert suites
    for line in suites:
        subprocess.run([sys.executable, "-m", *shlex.split(line), "-q", "-p", "no:cacheprovider"], check=True)


def read(page: str, here: Path, suites: list[str]) -> None:
    """As a reader does; `suites` gets the lines that run pytest."""
    names: dict[str, Any] = {}
    for language, title, text in BLOCK.findall((DOCS / page).read_text()):
        assert language in SHOWN | {"python", "sh"}, f"a block of '{language}' needs a test of its own"
        if title:
            (here / title).parent.mkdir(parents=True, exist_ok=True)
            (here / title).write_text(text)
        elif language == "python":
            exec(compile(text, page, "exec"), names)
        elif language == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                run(line.split(" #")[0].strip(), suites)


def load_module(file: Path) -> Any:
    """A script as a module."""
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(line: str, suites: list[str]) -> None:
    """A line of a shell block."""
    covered = [file for command, file in ELSEWHERE.items() if line.startswith(command)]
    if not line or covered:
        assert all((Path(__file__).parent / file).exists() for file in covered)
        return
    if line.startswith("pytest "):
        suites.append(line)
        return
    if line == "python examples/image_questions.py":
        assert load_module(EXAMPLES / "image_questions.py").main(conversations=12, steps=3, draft_steps=2, asked=2).identical == 2
        return
    assert line.startswith("foredraft "), f"who runs '{line}'?"
    arguments = shlex.split(line)[1:]
    if arguments[0] in ("compare", "eval", "generate", "regenerate", "report") and "--max-new-tokens" not in arguments:
        arguments += ["--max-new-tokens", "8"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, f"{line}\n{result.output}"


@pytest.mark.slow
def test_site() -> None:
    """`make docs`: pictures, then the site; mkdocs is strict."""
    subprocess.run(["make", "docs"], cwd=DOCS.parent, check=True)
