"""Every code block of the README does what it says: on a tiny target where the real one takes minutes, the rest marked slow."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from tiny import tiny_target, tiny_tokenizer
from typer.testing import CliRunner

from foredraft.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [line.split("#")[0].strip() for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
MAKE = [line for line in SHELL if line.startswith("make ")]
COMMANDS = [line for line in SHELL if line.startswith("foredraft ")]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncounted: None) -> Path:
    """A folder with a tiny target, data, prompts and a run file under the README's names."""
    tokenizer = tiny_tokenizer()
    tiny_target(vocab=len(tokenizer)).save_pretrained(tmp_path / ".cache/smollm2")
    tokenizer.save_pretrained(tmp_path / ".cache/smollm2")
    lines = [
        {"messages": [{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": f"{w} {w} {w}"}]}
        for w in ("a", "b", "c", "d")
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "examples/prompts").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    for name in ("examples/prompts/mt_bench.jsonl", "examples/smollm2_chat.jsonl"):
        (tmp_path / name).write_text(text)
    run = (ROOT / "examples/demo.yaml").read_text()
    for real, tiny in (
        ("held_out: 12", "held_out: 1"),
        ("max_length: 512", "max_length: 64"),
        ("draft_vocab_size: 8192", "draft_vocab_size: 40"),
    ):
        assert real in run
        run = run.replace(real, tiny)
    (tmp_path / "examples/demo.yaml").write_text(run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("foredraft.doctor.dynamic.NEW_TOKENS", 8)
    return tmp_path


def test_all_blocks_are_known() -> None:
    """A new kind of block needs a test of its own."""
    assert {language for language, _ in BLOCKS} == {"sh", "python"}
    assert set(SHELL) - {""} == {*MAKE, *COMMANDS, ". .venv/bin/activate"}


def test_make_targets_exist() -> None:
    """`make -n` knows every target that the README names."""
    for line in MAKE:
        subprocess.run(["make", "-n", line.split()[1]], cwd=ROOT, check=True, capture_output=True)


def test_python_block(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program trains and generates; only the number of steps and the length of rows are cut."""
    assert len(PYTHON) == 1
    program = PYTHON[0]
    for real, tiny in (
        ("max_steps=100", 'max_steps=2, save_strategy="no"'),
        ("length=512", "length=64"),
        ("draft_vocab_size=8192", "draft_vocab_size=40"),
    ):
        assert real in program
        program = program.replace(real, tiny)
    exec(compile(program, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
    assert (here / "runs/mine/draft/config.json").exists()
    imports = ("import ", "from ")
    assert sum(1 for line in PYTHON[0].splitlines() if line.strip() and not line.startswith(imports)) <= 12


def test_commands_in_order(here: Path) -> None:
    """Each command of the README succeeds, in the README's order (`eval` before `train` has run would fail)."""
    for line in COMMANDS:
        arguments = shlex.split(line)[1:]
        if arguments[0] in ("regenerate", "eval", "generate", "tune", "compare"):
            arguments += ["--max-new-tokens", "8"]
        if arguments[0] in ("eval", "generate"):
            arguments += ["--dtype", "float32"]
        if arguments[0] in ("tune", "compare"):
            arguments += ["--limit", "1", "--num-draft-tokens", "1"]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, f"{line}\n{result.output}"
    assert (here / "runs/again/draft/model.safetensors").exists()
    assert json.loads((here / "runs/result.json").read_text())["mt_bench"]["tau"] >= 1


@pytest.mark.slow
def test_demo() -> None:
    """`make demo`, as the README says it."""
    out = subprocess.run(["make", "demo"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "4/4" in out
    assert "done in" in out
