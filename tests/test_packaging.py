"""The wheel holds what the repository holds, whatever an old `build/` may contain."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"core": "foredraft", "adapters": "foredraft/adapters", "plugins": "foredraft/plugins"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def tracked(*folders: str) -> list[str]:
    """Files that git knows and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def in_package(name: str) -> str:
    """Where the wheel puts a file of ours: `core/auto.py` → `foredraft/auto.py`."""
    folder, _, rest = name.partition("/")
    return f"{FOLDERS[folder]}/{rest}"


def built_with() -> list[str]:
    """The command that builds a wheel from the current folder, without a network."""
    installed = {d.name for d in metadata.distributions()}  # a folder called build can be imported, too
    if "build" in installed:
        return [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    if "pip" in installed:
        return [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir"]
    pytest.skip("neither build nor pip is installed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    assert not (source / "build").exists()
    done = subprocess.run(
        [*built_with(), str(out)], cwd=source, capture_output=True, text=True, env={**os.environ, "PIP_NO_INDEX": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.iterdir()
    return zipfile.ZipFile(file)


def test_python_files(wheel: zipfile.ZipFile) -> None:
    ours = {in_package(name) for name in tracked(*FOLDERS) if name.endswith(".py")}
    theirs = {name for name in wheel.namelist() if name.endswith(".py")}
    assert theirs == ours


def test_nothing_but_the_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"foredraft"}


def test_type_marker(wheel: zipfile.ZipFile) -> None:
    assert "foredraft/py.typed" in wheel.namelist()


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    lines = wheel.read(name).decode().splitlines()
    assert "foredraft = foredraft.cli:main" in lines
    plugins = PROJECT["project"]["entry-points"]["foredraft"]
    assert {f"{key} = {module}" for key, module in plugins.items()} <= set(lines)
    files = set(wheel.namelist())
    assert [module for module in plugins.values() if f"{module.replace('.', '/')}.py" not in files] == []


def test_every_adapter_and_plugin_has_an_entry_point() -> None:
    named = set(PROJECT["project"]["entry-points"]["foredraft"].values())
    hooks = {
        f"foredraft.{folder}.{file.stem}"
        for folder in ("adapters", "plugins")
        for file in (ROOT / folder).glob("*.py")
        if "@hookimpl" in file.read_text(encoding="utf-8")
    }
    assert named == hooks


def test_every_subpackage_is_listed() -> None:
    found = {
        in_package(file.relative_to(ROOT).as_posix()).removesuffix("/__init__.py").replace("/", ".")
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_every_folder_with_code_is_a_package() -> None:
    folders = {file.parent for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []
