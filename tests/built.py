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
    if "pip" not in {d.name for d in metadata.distributions()}:  # a folder called build can be imported, too
        pytest.skip("pip is not installed")
    out.mkdir()
    for source in sources:  # what `pip wheel` does, in one process in place of four
        command = [sys.executable, "-c", "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])", str(out)]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
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
