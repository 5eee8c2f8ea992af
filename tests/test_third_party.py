"""A stranger's day: install foredraft's wheel, write a plugin of each kind, test them, work with them, uninstall them."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from built import ROOT, build, built
from tiny import tiny_target, tiny_tokenizer
from transformers import StableLmConfig, StableLmForCausalLM
from typer.testing import CliRunner

from foredraft.cli import app

WRITTEN = {"adapter": "some_family", "algorithm": "first_token", "engine": "some_server", "format": "some_form"}
PACKAGES = [f"foredraft-{name.replace('_', '-')}" for name in WRITTEN.values()]


DRIVER = """
import contextlib, io, json, os, runpy, sys

answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    sys.argv, said, code = json.loads(line), io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([int(code), said.getvalue()]), file=answers, flush=True)
"""
"""Runs command after command: to load torch takes longer than most of them."""


@dataclass
class Stranger:
    """A virtual environment, and a folder to work in."""

    home: Path
    python: Path
    process: "subprocess.Popen[str] | None" = None

    @property
    def environment(self) -> dict[str, str]:
        return {**{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FOREDRAFT_PREFER")}, "COLUMNS": "200"}

    def run(self, *command: str, fails: bool = False) -> str:
        """What a command of the environment prints: a module of it, by its name."""
        if self.process is None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen([str(self.python), "-c", DRIVER], cwd=self.home, env=self.environment, **pipes)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        code, said = json.loads(self.process.stdout.readline())
        assert (code != 0) == fails, f"{command}\n{said}"
        return str(said)

    def ends(self) -> None:
        """What it has imported is forgotten."""
        if self.process is not None:
            self.process.communicate()
            self.process = None

    def alone(self, *command: str) -> str:
        """The same of a program, in a process of its own."""
        program = str(self.python.parent / command[0])
        done = subprocess.run([program, *command[1:]], cwd=self.home, env=self.environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def pip(self, *arguments: str) -> None:
        """pip of the running interpreter, at work in the environment."""
        self.ends()
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *arguments, "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(command, cwd=self.home, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module", params=["borrowed", pytest.param("isolated", marks=pytest.mark.slow)])
def stranger(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    """With both packages installed. `borrowed`: the heavy dependencies are the running interpreter's, foredraft is not."""
    ours, home = built(tmp_path_factory), tmp_path_factory.mktemp(request.param)
    venv.create(home / "venv", symlinks=True)
    stranger = Stranger(home, home / "venv/bin/python")
    if request.param == "borrowed":
        stranger.pip("install", "--no-deps", "--no-index", str(ours))
        # A line in a .pth file adds the folder and ignores the .pth files in it, among them the one of an editable foredraft.
        (site,) = (home / "venv/lib").glob("python*/site-packages")
        (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    else:
        stranger.pip("install", "-c", str(ROOT / "constraints.txt"), str(ours), "pytest")
    with chdir(home):  # in this process, which has loaded torch; test_packaging.py has the templates in the wheel
        for kind, name in WRITTEN.items():
            CliRunner().invoke(app, ["new", kind, name], catch_exceptions=False)
    shutil.copytree(ROOT / "tests/proof", home / "proof", ignore=shutil.ignore_patterns("__pycache__"))
    build(*(home / name for name in (*PACKAGES, "proof")), out=home / "wheels")
    stranger.pip("install", "--no-deps", "--no-index", *map(str, (home / "wheels").iterdir()))
    yield stranger
    stranger.ends()


def test_foredraft_is_the_wheel(stranger: Stranger) -> None:
    where = stranger.alone("python", "-c", "import foredraft; print(foredraft.__file__)")
    assert where.startswith(str(stranger.home / "venv"))
    assert stranger.alone("foredraft", "--version").startswith("foredraft ")


TYPED = """
from foredraft.contracts import Frozen

class MyOptions(Frozen):
    width: int = 3

class Mine(foredraft.AlgorithmBase[MyOptions]):
    Options = MyOptions

    def half(self) -> int:
        reveal_type(self.options.width)
        return self.options.width // 2
"""
SKIPPED = ("torch", "transformers", "datasets", "numpy", "typer", "rich", "matplotlib", "jinja2", "tokenizers", "huggingface_hub")


def test_checkers_see_the_public_names(stranger: Stranger) -> None:
    """mypy, of the installed package: each public name is what it is, none is `Any`, and what is no name is an error."""
    names = json.loads(stranger.alone("python", "-c", "import foredraft, json; print(json.dumps(foredraft.__all__))"))
    lines = ["import foredraft", *(f"reveal_type(foredraft.{name})" for name in names), "foredraft.no_such_name"]
    (stranger.home / "names.py").write_text("\n".join([*lines, TYPED]))
    heavy = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in SKIPPED)
    (stranger.home / "mypy.ini").write_text(f"[mypy]\nstrict = True\npython_executable = {stranger.python}\n{heavy}")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary", "names.py"]
    out = subprocess.run(command, cwd=stranger.home, capture_output=True, text=True, timeout=300).stdout
    shown = re.findall(r'^names.py:\d+: note: Revealed type is "(.*)"$', out, flags=re.M)
    assert len(shown) == len(names) + 1, out
    revealed = dict(zip([*names, "width"], shown, strict=True))
    assert not [name for name, text in revealed.items() if text == "Any"], out
    assert "foredraft.contracts.algorithm.AlgorithmBase" in revealed["AlgorithmBase"]
    assert revealed["width"].endswith("int")
    assert f'{len(lines)}: error: Module has no attribute "no_such_name"' in out


@pytest.mark.parametrize("checks", ["registers or contract or packing", pytest.param("test", marks=pytest.mark.slow)])
def test_their_suites_pass(stranger: Stranger, checks: str) -> None:
    """As they were written, against the installed packages; in every run a few checks of each."""
    suites = [f"{package}/tests" for package in (*PACKAGES, "proof")]
    out = stranger.run("pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", checks, *suites)
    passed = re.search(r"(\d+) passed", out)
    assert passed is not None
    assert int(passed[1]) >= (70 if checks == "test" else len(PACKAGES)), out


def test_train_decode_and_uninstall(stranger: Stranger) -> None:
    """All are listed and do their part by the command line; once uninstalled they are gone, and their draft says what it misses."""
    listed = stranger.run("foredraft", "plugins")
    for (kind, name), package in zip(WRITTEN.items(), PACKAGES, strict=True):
        assert re.search(rf"{kind}\W+{name}\W+{package}", listed)

    tokenizer = tiny_tokenizer()
    tiny_target(vocab=len(tokenizer)).save_pretrained(stranger.home / "target")
    tokenizer.save_pretrained(stranger.home / "target")
    turns = [[{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": f"{w} {w} {w}"}] for w in "abcd"]
    (stranger.home / "data.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    (stranger.home / "run.yaml").write_text(
        "target: target\noutput_dir: runs\nadapter: some_family\nalgorithm: first_token\noptions: {num_layers: 2}\n"
        "data: {train: data.jsonl, max_length: 64}\ntraining: {max_steps: 20, learning_rate: 1e-2, logging_steps: 10}\n"
    )
    stranger.run("foredraft", "train", "run.yaml")
    made = json.loads((stranger.home / "runs/draft/config.json").read_text())
    assert (made["foredraft"]["adapter"], made["foredraft"]["algorithm"], made["num_hidden_layers"]) == ("some_family", "first_token", 2)
    first, last = (h["loss"] for h in json.loads((stranger.home / "runs/training.json").read_text())["history"] if "loss" in h)
    assert last < first
    decode = ("foredraft", "generate", "say a", "--target", "target", "--draft", "runs/draft", "--max-new-tokens", "8")
    assert "τ" in stranger.run(*decode)
    assert "some_server serve target --draft runs/draft --draft-tokens 3" in stranger.run(
        *("foredraft", "serve-command", "runs/draft", "--engine", "some_server", "--target", "target", "--num-draft-tokens", "3")
    )
    stranger.run("foredraft", "export", "runs/draft", "exported", "--format", "some_form")
    assert "some_form" in stranger.run("foredraft", "import", "exported", "imported", "--target", "target")
    ours, again = (json.loads((stranger.home / f"{name}/config.json").read_text()) for name in ("runs/draft", "imported"))
    assert again["hidden_size"] == ours["hidden_size"]

    stranger.pip("uninstall", "--yes", *PACKAGES)
    assert not re.search("|".join(WRITTEN.values()), stranger.run("foredraft", "plugins"))
    assert "unknown adapter 'some_family'" in stranger.run(*decode, fails=True)


@pytest.fixture(scope="module")
def targets(stranger: Stranger) -> Stranger:
    """With a target that the proof package's adapter drafts for, and a Llama."""
    tokenizer = tiny_tokenizer()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = StableLmConfig(vocab_size=len(tokenizer), **shape, **ends, use_parallel_residual=True)
    StableLmForCausalLM(config).save_pretrained(stranger.home / "parallel")
    tiny_target(vocab=len(tokenizer)).save_pretrained(stranger.home / "plain")
    for name in ("parallel", "plain"):
        tokenizer.save_pretrained(stranger.home / name)
    turns = [[{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": f"{w} {w} {w}"}] for w in "abcd"]
    (stranger.home / "said.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    return stranger


@pytest.mark.slow
@pytest.mark.parametrize("target", ["parallel", "plain"])
def test_a_plugin_of_every_kind_by_the_command_line(targets: Stranger, target: str) -> None:
    """Trained under objectives of its own, described, decoded, measured, examined without an error, exported, imported, served."""
    run = f"target: {target}\noutput_dir: of_{target}\nalgorithm: proof_per_step\n"
    run += "options: {steps: 2, loss: {proof_top_k: 1.0, proof_nla: 0.2}}\ndata: {train: said.jsonl, max_length: 64}\n"
    (targets.home / "proof.yaml").write_text(run + "training: {max_steps: 20, learning_rate: 1e-2, logging_steps: 10}\n")
    targets.run("foredraft", "train", "proof.yaml")
    draft = f"of_{target}/draft"
    assert "proof_server" in targets.run("foredraft", "info", draft)
    decode = ("--target", target, "--prompts", "said.jsonl", "--max-new-tokens", "8", "--dtype", "float32")
    assert "4/4" in targets.run("foredraft", "eval", "--draft", draft, *decode)
    assert "4/4" in targets.run("foredraft", "eval", "--algorithm", "proof_echo", *decode)
    assert "0 errors" in targets.run("foredraft", "doctor", draft, "--target", target)
    assert "proof-serve" in targets.run("foredraft", "serve-command", draft, "--target", target, "--engine", "proof_server")
    if target == "parallel":
        return  # what is imported is Llama-shaped
    targets.run("foredraft", "export", draft, "boxed", "--format", "proof_boxed")
    assert "proof_per_step, in the format proof_boxed" in targets.run("foredraft", "import", "boxed", "back", "--target", target)
    assert "0 errors" in targets.run("foredraft", "doctor", "boxed", "--target", target)
    assert "4/4" in targets.run("foredraft", "eval", "--draft", "back", *decode)
