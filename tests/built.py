"""foredraft's wheel, built from what git knows, once for all tests and workers that ask for it."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[1]


def tracked(*folders: str) -> list[str]:
    """Files that git knows and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def build(*sources: Path, out: Path) -> None:
    """Wheels of projects, without a network."""
    installed = {d.name for d in metadata.distributions()}  # a folder called build can be imported, too
    if "pip" not in installed:
        pytest.skip("pip is not installed")
    command = [sys.executable, "-m", "pip", "wheel", *map(str, sources), "--no-deps", "--no-build-isolation", "--quiet", "-w", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PIP_NO_INDEX": "1"}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def built(factory: pytest.TempPathFactory) -> Path:
    """The wheel."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    shared = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    with FileLock(shared / "wheel.lock"):
        if not (out := shared / "wheel").exists():
            for name in tracked():
                (shared / "source" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, shared / "source" / name)
            assert not (shared / "source/build").exists()
            build(shared / "source", out=out)
    (file,) = out.iterdir()
    return file
