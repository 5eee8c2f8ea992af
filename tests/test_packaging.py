"""The wheel holds what the repository holds, whatever an old `build/` may contain."""

import tomllib
import zipfile

import pytest
from built import ROOT, built, tracked

FOLDERS = {"core": "foredraft", "adapters": "foredraft/adapters", "plugins": "foredraft/plugins"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def in_package(name: str) -> str:
    """Where the wheel puts a file of ours: `core/auto.py` → `foredraft/auto.py`."""
    folder, _, rest = name.partition("/")
    return f"{FOLDERS[folder]}/{rest}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(built(tmp_path_factory))


def test_code_and_templates(wheel: zipfile.ZipFile) -> None:
    ours = {in_package(name) for name in tracked(*FOLDERS) if name.endswith((".py", ".txt"))}
    theirs = {name for name in wheel.namelist() if name.endswith((".py", ".txt")) and ".dist-info/" not in name}
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
